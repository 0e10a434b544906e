"""How a server ends, and what the launcher says of it: the launcher alone, over a stand-in for vLLM's server."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moetier.errors import MoetierError
from moetier.launch import drain, guard
from moetier.launch import process as launcher
from moetier.launch.command import ServeRequest
from moetier.launch.failure import write_ended
from moetier.launch.process import RequestsCutError, ServerFailedError
from moetier.launch.scratch import scratch
from moetier.settings import Settings
from tests.serve.server import free_port

SERVER = """
import json, os, pathlib, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
port, job, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        open(folder / "asked", "w").close()
    def log_message(self, *arguments): pass
def fail():
    while not (folder / "asked").exists():
        time.sleep(0.05)
    exec(job)
def report(running, cut=0):
    text = json.dumps({"pid": os.getpid(), "asked": True, "running": running, "cut": cut})
    (folder / f"requests-{os.getpid()}.json").write_text(text)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
threading.Thread(target=fail, daemon=True).start()
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""Answers, then does a job, such as dying. It reports requests as vLLM's frontend does with our layer."""

UNTIL_ASKED = "while not json.loads((folder / 'drain.json').read_text())['until']: time.sleep(0.01)"


class Launched:
    """A launcher of the stand-in with a job."""

    def __init__(self, folder: Path, lock: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.port = free_port()
        settings = Settings.parse({"store": folder, "failure_file": folder / "failure.json"})
        self.request = ServeRequest(
            folder,
            settings,
            port=self.port,
            log_file=folder / "log",
            scratch=folder,
            scratch_lock=lock,
            drain_seconds=1,
        )
        self._patch = monkeypatch

    def run(self, job: str = "", ready: Callable[[], object] = lambda: None) -> float | None:
        """Run it to its end. ready: what happens once it answers."""
        command = [sys.executable, "-c", SERVER, str(self.port), job, str(self.folder)]
        self._patch.setattr(launcher, "arguments", lambda *_: command)
        return launcher.run(self.request, (0,), lambda _: None, lambda _: ready() and None)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(guard, "END_SECONDS", 1)
    monkeypatch.setattr(drain, "REPORT_SECONDS", 0.5)
    with scratch(tmp_path) as (folder, lock):
        yield Launched(folder, lock, monkeypatch)


def stop(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def once_reported(launched: Launched, number: int = signal.SIGTERM) -> None:
    """Signal the launcher, which we are, once the server has reported its requests."""
    deadline = time.monotonic() + 60
    while not drain.reports(launched.folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    stop(number)


def failure(launched: Launched, job: str) -> str:
    """What the launcher says of a server that nobody told to end."""
    with pytest.raises(ServerFailedError) as raised:
        launched.run(job)
    assert not isinstance(raised.value, RequestsCutError)
    assert raised.value.exit_code == 1
    return str(raised.value)


def test_drained(launched: Launched) -> None:
    begun = time.time()
    told = launched.run("report(0)\ntime.sleep(600)", lambda: once_reported(launched))
    assert told is not None
    assert told >= begun


def test_the_reason_is_the_last_thing_said(launched: Launched) -> None:
    job = "sys.stderr.write('Traceback (most recent call last):\\n  File x\\nOSError: 5\\nnoise\\n'); os._exit(3)"
    said = failure(launched, job)
    assert "ended by itself with code 3; its log is " in said
    assert said.endswith("the reason:\nOSError: 5\nnoise"), "an exception's words may have several lines"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGBUS", "SIGSEGV"])
def test_a_signal_is_a_reason(name: str, launched: Launched) -> None:
    said = failure(launched, f"os.kill(os.getpid(), signal.{name})")
    assert said.splitlines()[-1].startswith(f"vLLM's server was killed by {name}, ")


def test_an_engine_that_was_killed_comes_before_its_server(launched: Launched) -> None:
    write_ended(launched.folder, [("EngineCore", -signal.SIGKILL)])
    said = failure(launched, "os._exit(0)")
    assert said.splitlines()[-1].startswith("EngineCore was killed by SIGKILL, ")


def test_without_a_reason_the_end_of_the_log_is_shown(launched: Launched) -> None:
    assert failure(launched, "print('last words', flush=True); os._exit(0)").endswith("the end of it:\nlast words")


def test_the_engines_own_words_are_all_that_is_said(launched: Launched) -> None:
    state = {"message": "a record is bad", "exit_code": 1}
    job = f"(folder / 'failure.json').write_text({json.dumps(json.dumps(state))}); os._exit(0)"
    with pytest.raises(MoetierError, match=r"^a record is bad$"):
        launched.run(job)


def test_requests_that_are_cut_off_are_counted(launched: Launched) -> None:
    job = f"report(3)\n{UNTIL_ASKED}\nreport(0, 3)"
    with pytest.raises(RequestsCutError) as raised:
        launched.run(job + "\ntime.sleep(600)", lambda: once_reported(launched))
    assert raised.value.exit_code == 1
    assert str(raised.value).startswith("cut off 3 requests in flight, for --drain-seconds 1 were over; ")


def test_more_drain_seconds_help(launched: Launched) -> None:
    """What the message says is done: the same request, which takes some seconds more, comes to its end."""
    job = f"report(1)\n{UNTIL_ASKED}\ntime.sleep(2)\nreport(0)\ntime.sleep(600)"
    with pytest.raises(RequestsCutError, match="give more --drain-seconds"):
        launched.run(job, lambda: once_reported(launched))
    for path in (*launched.folder.glob("requests-*"), launched.folder / "asked"):
        path.unlink()
    launched.request = replace(launched.request, drain_seconds=600)
    assert launched.run(job, lambda: once_reported(launched)) is not None


def test_requests_of_a_frontend_that_hangs_are_counted_too(launched: Launched) -> None:
    with pytest.raises(RequestsCutError, match="cut off 1 request in flight, for --drain-seconds 1 were over"):
        launched.run("report(1)\ntime.sleep(600)", lambda: once_reported(launched))


def test_a_second_signal_does_not_wait(launched: Launched) -> None:
    def twice() -> None:
        once_reported(launched, signal.SIGINT)
        stop(signal.SIGTERM)

    launched.request = replace(launched.request, drain_seconds=86_400)
    with pytest.raises(RequestsCutError, match="cut off 2 requests in flight, for a second signal came"):
        launched.run("report(2)\ntime.sleep(600)", twice)


def test_a_server_that_dies_while_it_drains_has_failed(launched: Launched) -> None:
    job = f"report(1)\n{UNTIL_ASKED}\nos._exit(7)"
    with pytest.raises(ServerFailedError, match="ended by itself with code 7"):
        launched.run(job, lambda: once_reported(launched))


def test_an_engine_that_dies_while_it_drains_has_failed(launched: Launched) -> None:
    """VLLM's frontend then exits with 0."""
    ended = json.dumps([["EngineCore", -signal.SIGKILL]])
    job = f"report(1)\n{UNTIL_ASKED}\n(folder / 'ended.json').write_text({ended!r})\nos._exit(0)"
    with pytest.raises(ServerFailedError, match="EngineCore was killed by SIGKILL"):
        launched.run(job, lambda: once_reported(launched))


def test_a_server_that_was_told_beside_us_has_not_failed(launched: Launched) -> None:
    """As a service manager does that signals all processes."""
    job = f"report(0)\n{UNTIL_ASKED}\nos._exit(0)"
    assert launched.run(job, lambda: once_reported(launched)) is not None


def test_a_server_that_does_not_end_is_killed(launched: Launched) -> None:
    """And what was asked of it was done: no request was lost."""
    job = "report(0)\nos.kill(os.getpid(), signal.SIGSTOP)"
    assert launched.run(job, lambda: once_reported(launched)) is not None


def test_a_guard_that_was_killed_is_replaced(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    start = guard.Guard._start

    def noting(self: guard.Guard):  # type: ignore[no-untyped-def]
        process = start(self)
        started.append(process.pid)
        return process

    monkeypatch.setattr(guard.Guard, "_start", noting)

    def kill_guard_then_stop() -> None:
        os.kill(started[0], signal.SIGKILL)
        signal.setitimer(signal.ITIMER_REAL, 2)

    previous = signal.signal(signal.SIGALRM, lambda *_: stop())
    try:
        assert launched.run("report(0)\ntime.sleep(600)", kill_guard_then_stop) is not None
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert len(started) == 2
