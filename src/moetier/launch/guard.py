"""A program of its own that outlives the launcher: if that is killed, it ends the server, so that none is left behind.

A signal at the parent's death is not enough: while vLLM starts its engine it is deaf to SIGTERM, and its processes do
not look after each other. Only the standard library, so that it costs few milliseconds and megabytes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # with -I -S nothing of ours is found by itself
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from moetier.launch import drain
from moetier.launch.scratch import note_shared_memory, remove

POLL_SECONDS = 0.2
NOTE_SECONDS = {False: 1.0, True: 30.0}
"""Between two looks at what memory the server shares: while it starts, and once it answers."""
END_SECONDS = 10
"""How long those that are told to end may take: to save heat, and to unlink the memory that they share. vLLM's
executor alone gives its workers 5.
"""
GONE_SECONDS = 60
"""How long the kernel may take over processes that were killed: it first unpins and frees what they hold."""


class Guard:
    """The guard of the session whose leader is process `server`.

    If we die, the guard ends the server: if that answered, it first gets drain_seconds for its requests. Then it
    removes the scratch folder, whose lock it holds too.
    """

    def __init__(self, server: int, drain_seconds: float, folder: Path | None = None, lock: int | None = None) -> None:
        self._command = [sys.executable, "-I", "-S", str(Path(__file__)), str(server), str(drain_seconds)]
        self._command += [str(folder)] if folder else []
        self._passed = () if lock is None else (lock,)
        self._ready = False
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
            pass_fds=self._passed,
        )

    def tell_ready(self) -> None:
        """Tell it that the server answers."""
        self._ready = True
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a guard that was killed is no reason to stop
            self._process.stdin.write(b"r")

    def replace_if_dead(self) -> bool:
        """Start another where it was killed; whether it was."""
        if self._process.poll() is None:
            return False
        self._close()
        self._process = self._start()
        if self._ready:
            self.tell_ready()
        return True

    def end(self) -> None:
        """End the guard: the server is gone."""
        self._process.kill()
        self._close()

    def abandon(self) -> None:
        """Leave the server to it."""
        self._close()

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def guarded(server: int, drain_seconds: float, folder: Path | None = None, lock: int | None = None) -> Iterator[Guard]:
    """A guard for the time of the block. If it is left by an exception, the server is ended."""
    try:
        guard = Guard(server, drain_seconds, folder, lock)
    except OSError:
        end_group(server)
        raise
    try:
        yield guard
    except BaseException:
        guard.abandon()
        raise
    guard.end()


def main(server: int, drain_seconds: float, folder: Path | None) -> None:
    """Wait for the end of the launcher, which closes the pipe; a byte before it says that the server answers."""
    ready = False
    while True:
        if select.select([0], [], [], NOTE_SECONDS[ready])[0]:
            if not os.read(0, 1):
                break
            ready = True
        if folder:
            note_shared_memory(folder, running(server))
    if ready:
        _drain(server, drain_seconds, folder)
    end_group(server, folder)
    if folder:
        remove(folder)


def _drain(server: int, drain_seconds: float, folder: Path | None) -> None:
    """Let the requests end, then the server."""
    now = time.monotonic()
    if folder:
        with contextlib.suppress(OSError):
            until = now + drain.time_for_requests(drain_seconds)
            drain.drain(folder, until, lambda: server in running(server), lambda: False)
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGTERM)
    while time.monotonic() < now + drain_seconds and server in running(server):
        time.sleep(POLL_SECONDS)


def end_group(group: int, folder: Path | None = None) -> list[int]:
    """End a process group: told to, then killed. Returns once it is gone, its memory, devices and port free for the
    next; with the processes that the kernel keeps longer, if any. folder: where to note what memory they share.

    Killed as a whole and whatever was seen of it: those that fork and exit outrun who lists them.
    """
    left: list[int] = running(group)
    if folder and left:
        note_shared_memory(folder, left)
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
    main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
