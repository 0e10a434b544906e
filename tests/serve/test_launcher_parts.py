"""Parts of the launcher, each against what broke it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from moetier.errors import SettingsError
from moetier.serve import launcher
from moetier.serve.command import ServeRequest
from moetier.settings import Settings

STARTER = """
import os, signal, sys
from pathlib import Path
from moetier.serve import launcher
from moetier.serve.command import ServeRequest
from moetier.settings import Settings

def signalled(*arguments, environment=launcher.environment):
    os.kill(os.getpid(), signal.SIGTERM)
    return environment(*arguments)

launcher.environment = signalled
print(launcher.run(ServeRequest(Path("model"), Settings.parse({"store": "store"})), (0,), print, print))
"""


def request(tmp_path: Path, port: int) -> ServeRequest:
    return ServeRequest(tmp_path, Settings.parse({"store": tmp_path}), port=port)


def test_signal_before_the_server_exists() -> None:
    done = subprocess.run([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "None\n")


@pytest.mark.parametrize("ignored", [False, True], ids=["terminal", "nohup"])
def test_a_closed_terminal_ends_what_nohup_does_not_keep(ignored: bool) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with launcher._stop_signals() as stop:
            if not ignored:
                assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGHUP)
            assert len(stop) == (0 if ignored else 1)
    finally:
        signal.signal(signal.SIGHUP, previous)


class Well(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # the name is http.server's
        self.send_response(200)
        self.end_headers()


def test_health_is_asked_past_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with HTTPServer(("127.0.0.1", 0), Well) as server:
        threading.Thread(target=server.handle_request).start()
        assert launcher._healthy(request(tmp_path, server.server_port))


def test_what_speaks_no_http_is_not_healthy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail\r\n")

        threading.Thread(target=answer).start()
        assert not launcher._healthy(request(tmp_path, other.getsockname()[1]))


def test_the_log_of_a_server_that_runs_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as log:
        log.write("mine")
        log.flush()
        fcntl.flock(log, fcntl.LOCK_EX)
        with (
            pytest.raises(SettingsError, match=r"writes the log .* choose another --port or --log-file"),
            launcher._output(path),
        ):
            pass
    assert path.read_text() == "mine"
    with launcher._output(path) as output:
        assert output is not None
        assert path.read_text() == ""


def test_end_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"{i}\n" for i in range(100_000)))
    assert launcher.last_lines(path, 2) == "99998\n99999"
    assert launcher.last_lines(Path("/dev/full"), 1) == ""  # which has no end
    assert launcher.last_lines(tmp_path / "none", 1) == ""
