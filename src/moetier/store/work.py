"""Work over all records of a layer on a few threads, with progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TypeVar

from moetier.interrupts import interrupts_held

T = TypeVar("T")
R = TypeVar("R")

GLANCE_SECONDS = 0.2
"""Between looks for Ctrl-C while no item ends."""


@dataclass(frozen=True)
class Progress:
    """How far a verb is. done and total count records."""

    stage: str
    done: int
    total: int


Report = Callable[[Progress], None]


class Meter:
    """Counts records and tells whoever asked."""

    def __init__(self, stage: str, total: int, report: Report | None) -> None:
        self.stage, self.done, self.total, self.report = stage, 0, total, report
        self.add(0)

    def add(self, records: int) -> None:
        self.done += records
        if self.report is not None:
            self.report(Progress(self.stage, self.done, self.total))


def default_threads() -> int:
    """The CPUs that this process may use, at most 8: past that the disk is the limit."""
    return min(8, len(os.sched_getaffinity(0)))


class Workers:
    """Threads that work on items, as a context. Ctrl-C is heard in `map`, between items, and where the context ends."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads, self._name = threads, name
        self._open = ExitStack()

    def __enter__(self) -> Workers:
        self._interrupts = self._open.enter_context(interrupts_held())
        self._pool = self._open.enter_context(ThreadPoolExecutor(self._threads, self._name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is KeyboardInterrupt:
            self._interrupts.clear()  # it is under way already
        self._open.close()

    def map(self, job: Callable[[T], R], items: Iterable[T], meter: Meter | None = None) -> list[R]:
        """Results of `job` in the order of the items; after the first error the others are not started."""
        ended: SimpleQueue[Future[R]] = SimpleQueue()
        futures = [self._pool.submit(job, item) for item in items]
        try:
            for future in futures:
                future.add_done_callback(ended.put)
            left = len(futures)
            while left:
                if self._interrupts:
                    raise KeyboardInterrupt
                with suppress(Empty):
                    ended.get(timeout=GLANCE_SECONDS).result()
                    left -= 1
                    if meter is not None:
                        meter.add(1)
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
