"""Cache policy: which expert of a layer gives up its slot for a missed one. The server and the simulator ask alike.

A policy decides for one layer and never moves bytes. It hears of every step first (`touch`), then is asked. Two rules
are common to all: an expert of the very step is never given up for another of that step (the swap would cost a copy
and gain nothing), and a step with a prompt in it teaches nothing and pushes out nothing that decode has used or that
heat has placed, so a long prompt leaves the working set of the running sequences alone. A step that verifies several
drafted tokens of a sequence is one step, so an expert that it routes to several times is used once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NEVER = np.iinfo(np.int64).min


class Policy(ABC):
    """Experts of one layer, numbered 0..E-1."""

    def __init__(self, experts: int) -> None:
        self._step = 0
        self._prefill = False
        self._current: NDArray[np.bool_] = np.zeros(experts, np.bool_)
        self._known: NDArray[np.bool_] = np.zeros(experts, np.bool_)
        """Placed by heat, or used in decode."""

    def touch(self, experts: NDArray[np.int32], prefill: bool = False) -> None:
        """A step begins that routes to these distinct experts, int32 [D]. prefill: a prompt is in it."""
        self._step += 1
        self._prefill = prefill
        self._current[:] = False
        self._current[experts] = True
        if not prefill:
            self._known[experts] = True
            self._learn(experts)

    def place(self, experts: NDArray[np.int32]) -> None:
        """These, int32 [D], hottest first, lie in slots from the start, on the advice of heat."""
        self._known[experts] = True
        self._expect(experts)

    def victim(self, expert: int, candidates: NDArray[np.int32]) -> int | None:
        """Which of `candidates`, int32 [C], in slots now, makes room for `expert`; None: `expert` stays out."""
        unlearnt = self._prefill & self._known[candidates]
        candidates = candidates[~(self._current[candidates] | unlearnt)]
        if candidates.size == 0:
            return None
        return self._choose(expert, candidates)

    @abstractmethod
    def _learn(self, experts: NDArray[np.int32]) -> None:
        """A decode step routes to these."""

    @abstractmethod
    def _expect(self, experts: NDArray[np.int32]) -> None:
        """See `place`."""

    @abstractmethod
    def _choose(self, expert: int, candidates: NDArray[np.int32]) -> int | None:
        """`victim` among candidates that the common rules allow; there is at least one."""


class Lru(Policy):
    """Least recently used. Equally recent ones go by id; those that heat placed go coldest first, before any used."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self._last: NDArray[np.int64] = np.full(experts, NEVER)

    def _learn(self, experts: NDArray[np.int32]) -> None:
        self._last[experts] = self._step

    def _expect(self, experts: NDArray[np.int32]) -> None:
        self._last[experts] = -np.arange(1, experts.size + 1)

    def _choose(self, expert: int, candidates: NDArray[np.int32]) -> int | None:
        return int(candidates[np.argmin(self._last[candidates])])


class SecondTouch(Lru):
    """LRU that an expert enters only at its second use since the one that gives way was last used.

    An expert that comes once and not again then costs no copy, and moves nobody.
    """

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self._before: NDArray[np.int64] = np.full(experts, NEVER)
        """The use before the last."""

    def _learn(self, experts: NDArray[np.int32]) -> None:
        self._before[experts] = self._last[experts]
        super()._learn(experts)

    def _choose(self, expert: int, candidates: NDArray[np.int32]) -> int | None:
        oldest = super()._choose(expert, candidates)
        assert oldest is not None
        last = self._last[oldest]
        return oldest if last == NEVER or self._before[expert] > last else None


class Frequency(Policy):
    """Least frequently used of late: a use weighs half after HALF_LIFE steps. The rarer one gives way to the commoner.

    What heat placed starts with weights between 1 and 0 use, hottest first.
    """

    HALF_LIFE = 16
    MARGIN = 2.0
    """Uses by which an expert must be ahead: equal ones would swap places for ever.

    Both from recorded traces (docs/trace.md): longer lives hit less, a smaller margin copies more for nothing.
    """

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self._weight: NDArray[np.float64] = np.zeros(experts)

    def _learn(self, experts: NDArray[np.int32]) -> None:
        self._weight *= 0.5 ** (1 / self.HALF_LIFE)
        self._weight[experts] += 1

    def _expect(self, experts: NDArray[np.int32]) -> None:
        self._weight[experts] = np.linspace(1, 0, experts.size, endpoint=False)

    def _choose(self, expert: int, candidates: NDArray[np.int32]) -> int | None:
        rarest = int(candidates[np.argmin(self._weight[candidates])])
        ahead = not self._known[rarest] or self._weight[expert] >= self._weight[rarest] + self.MARGIN
        return rarest if ahead else None


POLICIES: Mapping[str, Callable[[int], Policy]] = {"lru": Lru, "second-touch": SecondTouch, "frequency": Frequency}
"""By the name that settings and the command line use."""


@dataclass(frozen=True)
class Swap:
    """After a step, `expert` gets a slot: that of `victim`, or a free one (None)."""

    expert: int
    victim: int | None


def refills(policy: Policy, missed: NDArray[np.int32], spares: NDArray[np.int32], free: int, limit: int) -> list[Swap]:
    """Which of the experts that a step missed are copied into slots after it.

    Parameters
    ----------
    policy
        Has heard of the step.
    missed
        int32 [M].
    spares
        Experts that hold spare slots now, int32 [S].
    free
        Slots that hold nothing.
    limit
        The most copies.

    """
    swaps: list[Swap] = []
    left = spares
    for expert in map(int, missed):
        if len(swaps) >= limit:
            break
        if free:
            free -= 1
            swaps.append(Swap(expert, None))
        elif (victim := policy.victim(expert, left)) is not None:
            left = left[left != victim]
            swaps.append(Swap(expert, victim))
    return swaps
