"""The two streams of a device, on a CPU: what they are given runs some time later, in any order that they allow."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

COPIES, COMPUTE = 0, 1


@dataclass
class Mark:
    """A point of a stream; waiting for it has run what it needs, and nothing else."""

    streams: Streams
    stream: int
    passed: bool = False

    def set_passed(self) -> None:
        self.passed = True

    def synchronize(self) -> None:
        self.streams.run_until(self)


class Streams:
    """copies, compute: how likely either stream takes one more step on its own whenever the host gives one something.

    0: it does nothing before somebody waits for it. 1: it always does all it can.
    """

    def __init__(self, copies: float, compute: float, seed: int = 0) -> None:
        self._likely, self._random = (copies, compute), Random(seed)
        self._given: tuple[deque[tuple[Callable[[], object], Mark | None]], ...] = (deque(), deque())

    def give(self, stream: int, work: Callable[[], object], after: Mark | None = None) -> None:
        """The stream waits for `after`, then does `work`."""
        self._given[stream].append((work, after))
        for each, likely in enumerate(self._likely):
            self.go_on(each, likely)

    def go_on(self, stream: int, likely: float = 1) -> None:
        """Step by step, with that likelihood each, as far as the stream can."""
        given = self._given[stream]
        while given and self._random.random() < likely and (given[0][1] is None or given[0][1].passed):
            given.popleft()[0]()

    def mark(self, stream: int) -> Mark:
        mark = Mark(self, stream)
        self.give(stream, mark.set_passed)
        return mark

    def wait(self, stream: int, mark: Mark | None) -> None:
        self.give(stream, lambda: None, mark)

    def run_until(self, mark: Mark) -> None:
        while not mark.passed:
            work, after = self._given[mark.stream][0]
            if after is not None:
                self.run_until(after)
            self._given[mark.stream].popleft()
            work()

    def finish(self) -> None:
        for stream in (COMPUTE, COPIES):
            self.mark(stream).synchronize()


class LateLane:
    """What `moetier.engine.hybrid.lane.Lane` is on a GPU."""

    captures = False

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.mark, self.compute_mark = partial(streams.mark, COPIES), partial(streams.mark, COMPUTE)
        self.after, self.compute_after = partial(streams.wait, COPIES), partial(streams.wait, COMPUTE)

    def copy(self, target: int, source: int, size: int) -> None:
        self._streams.give(COPIES, lambda: ctypes.memmove(target, source, size))

    def wait(self) -> None:
        self.mark().synchronize()
