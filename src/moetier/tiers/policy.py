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
        candidates = self.allowed(candidates)
        if candidates.size == 0:
            return None
        weakest = self.weakest(candidates)
        return weakest if self.enter(np.array([expert], np.int32), weakest)[0] else None

    def allowed(self, candidates: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those that the rules common to all let go, in their order."""
        unlearnt = self._prefill & self._known[candidates]
        return candidates[~(self._current[candidates] | unlearnt)]

    @abstractmethod
    def _learn(self, experts: NDArray[np.int32]) -> None:
        """A decode step routes to these."""

    @abstractmethod
    def _expect(self, experts: NDArray[np.int32]) -> None:
        """See `place`."""

    @abstractmethod
    def weakest(self, candidates: NDArray[np.int32]) -> int:
        """Which of `candidates`, at least one, gives way first."""

    @abstractmethod
    def enter(self, experts: NDArray[np.int32], weakest: int) -> NDArray[np.bool_]:
        """Bool [D]: of each of `experts`, int32 [D], whether `weakest` makes room for it."""


class Lru(Policy):
    """Least recently used. Equally recent ones go by id; those that heat placed go coldest first, before any used."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self._last: NDArray[np.int64] = np.full(experts, NEVER)

    def _learn(self, experts: NDArray[np.int32]) -> None:
        self._last[experts] = self._step

    def _expect(self, experts: NDArray[np.int32]) -> None:
        self._last[experts] = -np.arange(1, experts.size + 1)

    def weakest(self, candidates: NDArray[np.int32]) -> int:
        return int(candidates[np.argmin(self._last[candidates])])

    def enter(self, experts: NDArray[np.int32], weakest: int) -> NDArray[np.bool_]:
        return np.ones(experts.size, np.bool_)


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

    def enter(self, experts: NDArray[np.int32], weakest: int) -> NDArray[np.bool_]:
        later: NDArray[np.bool_] = self._before[experts] > self._last[weakest]
        return later if self._last[weakest] != NEVER else np.ones_like(later)


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

    def weakest(self, candidates: NDArray[np.int32]) -> int:
        return int(candidates[np.argmin(self._weight[candidates])])

    def enter(self, experts: NDArray[np.int32], weakest: int) -> NDArray[np.bool_]:
        ahead: NDArray[np.bool_] = self._weight[experts] >= self._weight[weakest] + self.MARGIN
        return ahead if self._known[weakest] else np.ones_like(ahead)


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
    swaps = [Swap(int(expert), None) for expert in missed[: min(free, limit)]]
    rest, left = missed[len(swaps) :], policy.allowed(spares)
    while rest.size and left.size and len(swaps) < limit:
        weakest = policy.weakest(left)
        entering = np.flatnonzero(policy.enter(rest, weakest))
        if not entering.size:
            break
        first = int(entering[0])
        swaps.append(Swap(int(rest[first]), weakest))
        rest, left = rest[first + 1 :], left[left != weakest]
    return swaps
