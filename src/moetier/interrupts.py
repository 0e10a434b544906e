"""Ctrl-C, kept while the main thread is amid locks of Python's own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[list[int]]:
    """Keep Ctrl-C until the end, and yield the list of those that came.

    Raised amid a lock of Python's own (a pool takes several), KeyboardInterrupt leaves it locked: the pool's threads
    then wait for it, and the pool for them, for ever. Only the main thread is interrupted.
    """
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield came
        return
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
