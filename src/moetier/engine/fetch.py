"""Records of one layer on their way from disk: into slots of its DRAM tier, else into staging."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetier.tiers.disk import DiskReader
from moetier.tiers.dram import DramTier
from moetier.tiers.staging import Staging


@dataclass(frozen=True)
class Read:
    """A record on its way: into a slot of the layer (kept), or into staging (used once)."""

    expert: int
    future: Future[None]
    slot: int
    staged: bool
    address: int


class Fetcher:
    """Starts reads for one layer, and settles what they took. One thread at a time."""

    def __init__(self, index: int, tier: DramTier, staging: Staging, reader: DiskReader) -> None:
        self.index, self.tier, self._staging, self._reader = index, tier, staging, reader

    def start(
        self, expert: int, pinned: NDArray[np.bool_], forget: Callable[[int], None] = lambda expert: None
    ) -> Read | None:
        """Read `expert` into a slot of the layer, else into staging; None while both are in use.

        pinned: bool [E], experts whose slots are not given up for it. forget: as in `DramTier.take`.
        """
        slot = self.tier.take(expert, pinned, forget)
        if slot is not None:
            view, address, staged = self.tier.arena.view(slot), self.tier.arena.address(slot), False
        else:
            slot = self._staging.take()
            if slot is None:
                return None
            view, address, staged = self._staging.view(slot), self._staging.address(slot), True
        try:
            return Read(expert, self._reader.submit(self.index, expert, view), slot, staged, address)
        except BaseException:
            (self._staging if staged else self.tier).give_back(slot)
            raise

    def load(self, experts: NDArray[np.int32]) -> None:
        """Read `experts`, int32 [D], into free slots of the layer, and wait for them."""
        nothing_pinned = np.zeros(self.tier.addresses.size, np.bool_)
        reads: list[Read] = []
        try:
            for expert in map(int, experts):
                read = self.start(expert, nothing_pinned)
                assert read is not None
                reads.append(read)
                assert not read.staged, "a layer that is loaded has free slots"
            for read in reads:
                read.future.result()
        except BaseException:
            self.abandon(reads)
            raise
        for read in reads:
            self.settle(read)

    def settle(self, read: Read) -> None:
        """The record was used: keep it where it has a slot of the layer."""
        if read.staged:
            self._staging.give_back(read.slot)
        else:
            self.tier.publish(read.expert, read.slot)

    def abandon(self, reads: Collection[Read]) -> None:
        """A step ends early: wait until nothing writes any more, then free what was taken."""
        wait([read.future for read in reads])
        for read in reads:
            (self._staging if read.staged else self.tier).give_back(read.slot)
