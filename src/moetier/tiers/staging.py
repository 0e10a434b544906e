"""Staging: a few records of DRAM that all layers share, for experts that are read, used once and not kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moetier.tiers.arena import Arena


class Staging:
    """Slots with a free list. At least one, or a layer whose own slots are all in use could not go on."""

    def __init__(self, slots: int, stride: int, shift: int = 0) -> None:
        assert slots >= 1
        self.arena = Arena(slots, stride, shift)
        self._free = list(range(slots))

    @property
    def slots(self) -> int:
        return self.arena.slots

    def take(self) -> int | None:
        """A free slot, or None."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """`slot` is free again."""
        assert slot not in self._free, f"staging slot {slot} was given back twice"
        self._free.append(slot)

    def address(self, slot: int) -> int:
        """Where the kernels find the record of a slot."""
        return self.arena.address(slot)

    def view(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of a slot, uint8 [stride]."""
        return self.arena.view(slot)

    def check_integrity(self) -> None:
        """Between steps every slot is free."""
        assert sorted(self._free) == list(range(self.slots)), "a staging slot was not given back"
