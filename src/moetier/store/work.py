"""Work over all records of a layer on a few threads, with progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass


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


def for_each(pool: ThreadPoolExecutor, items: Iterable[int], job: Callable[[int], None], meter: Meter) -> None:
    """Run `job` on every item; after the first error the others are not started, and it is raised."""
    futures = [pool.submit(job, item) for item in items]
    try:
        for future in as_completed(futures):
            future.result()
            meter.add(1)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
