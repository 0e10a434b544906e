"""A program of its own that outlives the launcher: if that is killed, it ends the server, so that none is left behind.

A signal at the parent's death is not enough: while vLLM starts its engine it is deaf to SIGTERM, and its processes do
not look after each other. Only the standard library, so that it costs few milliseconds and megabytes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_SECONDS = 0.2
END_SECONDS = 10
"""How long those that are told to end may take: to save heat, and to unlink the memory that they share. vLLM's
executor alone gives its workers 5.
"""
GONE_SECONDS = 60
"""How long the kernel may take over processes that were killed: it first unpins and frees what they hold."""


@contextlib.contextmanager
def guarded(server: int, drain_seconds: float) -> Iterator[Callable[[], None]]:
    """Guard the session whose leader is process `server`. What is yielded tells the guard that the server answers.

    If we die inside the block, or leave it by an exception, the server is ended: if it answered, it first gets
    drain_seconds for its requests.
    """
    command = [sys.executable, "-I", "-S", str(Path(__file__)), str(server), str(drain_seconds)]
    try:
        guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, bufsize=0
        )
    except OSError:
        end_group(server)
        raise
    with guard:
        pipe = guard.stdin
        assert pipe is not None

        def tell_ready() -> None:
            with contextlib.suppress(BrokenPipeError):  # a guard that was killed is no reason to stop
                pipe.write(b"r")

        yield tell_ready
        guard.kill()


def main(server: int, drain_seconds: float) -> None:
    """Wait for the end of the launcher, which closes the pipe; a byte before it says that the server answers."""
    patience = 0.0
    while os.read(0, 1):
        patience = drain_seconds
    deadline = time.monotonic() + patience
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGTERM)
    while time.monotonic() < deadline and server in running(server):
        time.sleep(POLL_SECONDS)
    end_group(server)


def end_group(group: int) -> list[int]:
    """End a process group: told to, then killed. Returns once it is gone, its memory, devices and port free for the
    next; with the processes that the kernel keeps longer, if any.

    Killed as a whole and whatever was seen of it: those that fork and exit outrun who lists them.
    """
    left: list[int] = []
    for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, GONE_SECONDS)):
        deadline = time.monotonic() + seconds
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
            while (left := running(group)) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS / 10)
    return left


def running(group: int) -> list[int]:
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


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
