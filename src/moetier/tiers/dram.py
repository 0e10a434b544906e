"""The DRAM tier of one layer: slots that hold records, and the table that says where each expert is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moetier.tiers.arena import Arena
from moetier.tiers.policy import Policy

ABSENT = -1


class DramTier:
    """`slots` records of one layer of `experts` experts.

    A slot is free, being filled (taken, owned by nobody), or owned by the one expert that `addresses` maps to it. An
    expert is mapped only after its bytes are whole (`publish`), and unmapped before its slot is given away (`take`).
    One whose memory is not trusted any more is out of service for good (`quarantine`).
    """

    def __init__(
        self,
        experts: int,
        slots: int,
        stride: int,
        policy: Policy,
        shift: int = 0,
        addresses: NDArray[np.uint64] | None = None,
    ) -> None:
        """addresses: zeros, uint64 [experts], where the table is to lie in memory that others read too."""
        self.addresses: NDArray[np.uint64] = np.zeros(experts, np.uint64) if addresses is None else addresses
        """Address of each expert's record, 0 where it is not in DRAM."""
        self.policy = policy
        self.arena = Arena(slots, stride, shift)
        self._slot_of: NDArray[np.int32] = np.full(experts, ABSENT, np.int32)
        self._owner: NDArray[np.int32] = np.full(slots, ABSENT, np.int32)
        self._free = list(range(slots - 1, -1, -1))
        self._filling: set[int] = set()
        self._quarantined: set[int] = set()

    @property
    def slots(self) -> int:
        """Slots in service."""
        return self.arena.slots - len(self._quarantined)

    @property
    def resident(self) -> NDArray[np.int32]:
        """Experts that are in DRAM, ascending."""
        return np.flatnonzero(self._slot_of != ABSENT).astype(np.int32)

    def record(self, expert: int) -> NDArray[np.uint8]:
        """The bytes of the slot of `expert`, which is in DRAM: uint8 [stride]."""
        assert self._slot_of[expert] != ABSENT, f"expert {expert} is not in DRAM"
        return self.arena.view(int(self._slot_of[expert]))

    def take(
        self, expert: int, pinned: NDArray[np.bool_], forget: Callable[[int], None] = lambda expert: None
    ) -> int | None:
        """A slot for `expert`: a free one, or that of one which the policy gives up. pinned: bool [E], never given up.

        forget: called with the expert that gives its slot up, before anything changes; what it raises leaves all as it
        was. None where there is no slot to be had.
        """
        if self._free:
            slot = self._free.pop()
        else:
            resident = self.resident
            victim = self.policy.victim(expert, resident[~pinned[resident]])
            if victim is None:
                return None
            forget(victim)
            slot = int(self._slot_of[victim])
            self._slot_of[victim] = ABSENT
            self.addresses[victim] = 0
            self._owner[slot] = ABSENT
        self._filling.add(slot)
        return slot

    def publish(self, expert: int, slot: int) -> None:
        """The record of `expert` lies whole in `slot`, which `take` gave."""
        assert slot in self._filling, f"slot {slot} is not being filled"
        assert self._slot_of[expert] == ABSENT, f"expert {expert} is already in slot {self._slot_of[expert]}"
        self._filling.remove(slot)
        self._owner[slot] = expert
        self._slot_of[expert] = slot
        self.addresses[expert] = self.arena.address(slot)

    def give_back(self, slot: int) -> None:
        """Nothing was read into `slot`, which `take` gave: it is free again."""
        self._filling.remove(slot)
        self._free.append(slot)

    def quarantine(self, expert: int) -> None:
        """Unmap `expert`, and leave its slot to nobody: whoever still reads there reads the same bytes."""
        slot = int(self._slot_of[expert])
        assert slot != ABSENT, f"expert {expert} is not in DRAM"
        self._slot_of[expert] = self._owner[slot] = ABSENT
        self.addresses[expert] = 0
        self._quarantined.add(slot)

    def check_integrity(self) -> None:
        """Slots, owners, table and free list agree; AssertionError says where not."""
        owned = {int(slot) for slot in np.flatnonzero(self._owner != ABSENT)}
        assert len(self._free) == len(set(self._free)), "a slot is free twice"
        assert sorted([*owned, *self._free, *self._filling, *self._quarantined]) == list(range(self.arena.slots)), (
            f"slots are lost or shared: owned {sorted(owned)}, free {sorted(self._free)}, "
            f"being filled {sorted(self._filling)}, in quarantine {sorted(self._quarantined)}"
        )
        for expert in range(self.addresses.size):
            slot = int(self._slot_of[expert])
            expected = 0 if slot == ABSENT else self.arena.address(slot)
            assert int(self.addresses[expert]) == expected, f"address of expert {expert} is not that of its slot {slot}"
            assert slot == ABSENT or int(self._owner[slot]) == expert, f"slot {slot} is not owned by expert {expert}"
        assert len(owned) == int((self._slot_of != ABSENT).sum()), "a slot is owned by an expert that is not mapped"
