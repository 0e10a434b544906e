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

READY, DONE = b"r", b"d"
"""What the launcher writes to the guard's standard input: the server answers; it has ended, go."""
POLL_SECONDS = 0.2


@contextlib.contextmanager
def guarded(server: int, drain_seconds: float, abandon_seconds: float) -> Iterator[Callable[[], None]]:
    """Guard the session whose leader is process `server`. What is yielded tells the guard that the server answers.

    If we die inside the block, or leave it by an exception, the server gets a SIGTERM, and what is left of its session
    after drain_seconds (abandon_seconds, if it did not answer yet) is killed.
    """
    command = [sys.executable, "-I", "-S", str(Path(__file__)), str(server), str(drain_seconds), str(abandon_seconds)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, bufsize=0
    ) as guard:
        pipe = guard.stdin
        assert pipe is not None

        def tell(message: bytes) -> None:
            with contextlib.suppress(BrokenPipeError):  # a guard that was killed is no reason to stop
                pipe.write(message)

        yield lambda: tell(READY)
        tell(DONE)


def main(server: int, drain_seconds: float, abandon_seconds: float) -> None:
    """Wait for DONE, or for the end of the launcher, which closes the pipe."""
    patience = abandon_seconds
    while message := os.read(0, 1):
        if message == DONE:
            return
        patience = drain_seconds
    deadline = time.monotonic() + patience
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGTERM)
        while time.monotonic() < deadline:
            os.kill(server, 0)
            time.sleep(POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
