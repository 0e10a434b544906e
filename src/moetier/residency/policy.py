"""Cache policy: which expert of a layer gives up its slot for a missed one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Policy(Protocol):
    """Decides for one layer. Experts are numbered 0..E-1; the tier asks, the policy never moves bytes."""

    def touch(self, experts: NDArray[np.int32]) -> None:
        """A step begins that routes to these experts, int32 [D]."""

    def victim(self, candidates: NDArray[np.int32]) -> int | None:
        """Which of the resident `candidates`, int32 [C], makes room; None: none of them, keep the missed one out."""


class Lru:
    """Least recently used; experts of one step are equally recent, and the lower id goes first.

    An expert used in this very step is never given up for another of this step: they are equally recent, so the swap
    would cost a read and gain nothing. That also keeps a long prompt, which routes to nearly every expert, from
    sweeping the slots.
    """

    def __init__(self, experts: int) -> None:
        self._step = 0
        self._last_used = np.zeros(experts, np.int64)

    def touch(self, experts: NDArray[np.int32]) -> None:
        """See `Policy.touch`."""
        self._step += 1
        self._last_used[experts] = self._step

    def victim(self, candidates: NDArray[np.int32]) -> int | None:
        """See `Policy.victim`."""
        if candidates.size == 0:
            return None
        oldest = int(candidates[np.argmin(self._last_used[candidates])])
        return None if self._step and self._last_used[oldest] == self._step else oldest
