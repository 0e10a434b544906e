"""Parts of the launcher, each against what broke it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import pytest

from moetier.errors import SettingsError
from moetier.launch import process as launcher
from moetier.launch.command import ServeRequest
from moetier.launch.tls import check_certificate
from moetier.settings import Settings

STARTER = """
import os, signal, sys
from pathlib import Path
from moetier.launch import process as launcher
from moetier.launch.command import ServeRequest
from moetier.launch.tls import check_certificate
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


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Key and certificate, signed by itself, for a name that is not this machine's."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    folder = tmp_path_factory.mktemp("tls")
    key, made = str(folder / "key"), str(folder / "certificate")
    what = ("-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", made, "-days", "1", "-subj", "/CN=x")
    subprocess.run(["openssl", "req", "-x509", *what], check=True, capture_output=True)
    return key, made


@pytest.mark.parametrize("client", ["any", "with-a-certificate"])
def test_health_is_asked_over_tls_where_the_server_speaks_it(client: str, certificate: tuple[str, str]) -> None:
    key, made = certificate
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(made, key)
    if client != "any":
        tls.verify_mode = ssl.CERT_REQUIRED
    reqs = str(int(tls.verify_mode))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Well)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        plain = ServeRequest(Path("/m"), Settings(store=Path("/s")), port=server.server_port)
        assert launcher._healthy(
            replace(plain, extra=("--ssl-certfile", made, "--ssl-keyfile", key, "--ssl-cert-reqs", reqs))
        )
        assert not launcher._healthy(plain)
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_that_speaks_no_tls_is_not_healthy_over_it() -> None:
    with HTTPServer(("127.0.0.1", 0), Well) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        made = ServeRequest(
            Path("/m"), Settings(store=Path("/s")), port=server.server_port, extra=("--ssl-certfile=c",)
        )
        assert not launcher._healthy(made)


def test_a_certificate_is_looked_at_before_anything_is_loaded(certificate: tuple[str, str], tmp_path: Path) -> None:
    key, made = certificate
    other, locked = tmp_path / "other", tmp_path / "locked"
    openssl = ["openssl", "genpkey", "-algorithm", "RSA", "-out"]
    subprocess.run([*openssl, str(other)], check=True, capture_output=True)
    subprocess.run(["openssl", "rsa", "-aes256", "-passout", "pass:x", "-in", key, "-out", str(locked)], check=True)

    def check(*extra: str) -> None:
        check_certificate(ServeRequest(Path("/m"), Settings(store=Path("/s")), extra=extra))

    check()
    check("--ssl-certfile", made, "--ssl-keyfile", key)
    check("--ssl-certfile", made, "--ssl-keyfile", key, "--ssl-ca-certs", made)
    for extra, message in (
        (("--ssl-keyfile", key), "give it with --ssl-certfile"),
        (("--ssl-certfile", "/nowhere", "--ssl-keyfile", key), "--ssl-certfile /nowhere: expected a file"),
        (("--ssl-certfile", made, "--ssl-keyfile", "/nowhere"), "--ssl-keyfile /nowhere: expected a file"),
        (("--ssl-certfile", made), "name those that belong together"),
        (("--ssl-certfile", made, "--ssl-keyfile", str(other)), "name those that belong together"),
        (("--ssl-certfile", made, "--ssl-keyfile", str(locked)), "without a password"),
        (("--ssl-certfile", key, "--ssl-keyfile", made), "name those that belong together"),
        (("--ssl-certfile", made, "--ssl-keyfile", key, "--ssl-ca-certs", key), "expected certificates in PEM"),
    ):
        with pytest.raises(SettingsError, match=message):
            check(*extra)
