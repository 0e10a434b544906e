"""The device tier of one layer: slots in device memory, the table that the kernels read, and fills beside compute.

Two streams meet here. The compute stream runs the steps; only there does the slot table change, between steps. A side
stream copies records into slots that no step can read. So a slot goes round:

    free -> filling (a copy is on its way) -> live (in the table) -> free

`publish` makes it live once its copy has ended; `retire` takes it out of the table at once, and the next copy into it
first waits for the steps that were launched before. Slots of resident experts are never retired. A slot whose memory is
not trusted any more is out of service for good (`quarantine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moetier.tiers.link import copy_to_device

ABSENT = -1


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind what `stream` has been given so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@dataclass(frozen=True)
class Filling:
    """A copy on its way: the expert, and the event behind the copy (None: it was made at once)."""

    expert: int
    done: torch.cuda.Event | None


class DeviceSlots:
    """`resident` experts fixed in slots, and `spare` slots that a policy may refill.

    On a CPU device there are no streams and copies happen at once; the state machine is the same.
    """

    def __init__(self, experts: int, resident: Iterable[int], slots: torch.Tensor, first: int = 0) -> None:
        """Over the memory `slots`, uint8 [capacity, stride]; those that `resident` does not take are spare.

        first: the number of its first slot where it is part of memory that layers share, of which the table tells.
        """
        self.device = slots.device
        self.resident = frozenset(resident)
        assert all(0 <= expert < experts for expert in self.resident), "a resident expert does not exist"
        self._fixed: NDArray[np.bool_] = np.isin(np.arange(experts), list(self.resident))
        capacity = slots.shape[0]
        assert capacity >= len(self.resident), "fewer slots than resident experts"
        self.first = first
        self.slots = slots
        self.table = torch.full((experts,), ABSENT, dtype=torch.int32, device=self.device)
        """`first` plus the slot of each expert, or -1, int32 [experts]: what the kernels read."""
        self.mirror: NDArray[np.int32] = np.full(experts, ABSENT, np.int32)
        """The slot of each expert in `slots`, or -1, as the last work launched on the compute stream leaves it."""
        self._owner: NDArray[np.int32] = np.full(capacity, ABSENT, np.int32)
        self._free = list(range(capacity - 1, -1, -1))
        self._filling: dict[int, Filling] = {}
        self._quarantined: set[int] = set()
        self.fills = 0
        """Copies begun by `fill`, of all slots: while it stays, the bytes of every slot do."""
        self._last_use: dict[int, torch.cuda.Event] = {}
        self._stream = _stream(self.device) if self.device.type == "cuda" else None

    @property
    def capacity(self) -> int:
        return self.slots.shape[0]

    @property
    def free(self) -> int:
        """Slots that `fill` can take."""
        return len(self._free)

    @property
    def live(self) -> NDArray[np.int32]:
        """Experts in the table, ascending."""
        return np.flatnonzero(self.mirror != ABSENT).astype(np.int32)

    @property
    def spares(self) -> NDArray[np.int32]:
        """Experts in the table that `retire` may take out, ascending."""
        return np.flatnonzero((self.mirror != ABSENT) & ~self._fixed).astype(np.int32)

    def fill(self, expert: int, record: torch.Tensor) -> int:
        """Start copying `record` into a free slot beside compute; the slot's number.

        record: uint8, contiguous, up to stride bytes, pinned, which stay as they are until `publish` names the expert.
        """
        assert self._free, "no free slot: retire a spare expert first"
        assert self.mirror[expert] == ABSENT, f"expert {expert} has a slot already"
        assert all(filling.expert != expert for filling in self._filling.values()), f"expert {expert} is on its way"
        assert record.dtype == torch.uint8, "a record is bytes"
        assert record.is_contiguous(), "the bytes of a record lie one after the other"
        assert record.numel() <= self.slots.shape[1], "a record longer than a slot"
        self.fills += 1
        slot = self._free.pop()
        used = self._last_use.pop(slot, None)
        if self._stream is not None and used is not None:
            self._stream.wait_event(used)
        target = self.slots.data_ptr() + slot * self.slots.stride(0)
        copy_to_device(target, record.data_ptr(), record.numel(), self._stream)
        self._filling[slot] = Filling(expert, None if self._stream is None else _event(self._stream))
        return slot

    def publish(self, wait: bool = False) -> list[int]:
        """Put the experts whose copies have ended into the table, from the next launch on; which they are.

        Call it between steps with the compute stream current. wait: make the compute stream wait for the copies that
        are still on their way, and publish those too.
        """
        published = []
        for slot, filling in list(self._filling.items()):
            if filling.done is not None and not bool(filling.done.query()):  # type: ignore[no-untyped-call]
                if not wait:
                    continue
                torch.cuda.current_stream(self.device).wait_event(filling.done)
            del self._filling[slot]
            self._owner[slot] = filling.expert
            self._set(filling.expert, slot)
            published.append(filling.expert)
        return published

    def retire(self, expert: int) -> None:
        """Take a spare expert out of the table, from the next launch on. Its slot is free at once for `fill`."""
        slot = int(self.mirror[expert])
        assert slot != ABSENT, f"expert {expert} has no slot"
        assert expert not in self.resident, f"expert {expert} is resident: its slot is not given away"
        self._set(expert, ABSENT)
        self._owner[slot] = ABSENT
        if self._stream is not None:
            self._last_use[slot] = _event(torch.cuda.current_stream(self.device))
        self._free.append(slot)

    def quarantine(self, expert: int) -> None:
        """`retire`, and leave the slot to nobody."""
        slot = int(self.mirror[expert])
        self.retire(expert)
        self._free.remove(slot)
        self._last_use.pop(slot, None)
        self._quarantined.add(slot)

    def rewrite(self, expert: int, record: torch.Tensor) -> None:
        """Put the bytes of an expert that has a slot there again, in stream order: `record`, uint8 on the host."""
        slot = int(self.mirror[expert])
        assert slot != ABSENT, f"expert {expert} has no slot"
        used = min(record.numel(), self.slots.shape[1])
        self.slots[slot, :used].copy_(record[:used])

    def _set(self, expert: int, slot: int) -> None:
        """One entry of the table, in stream order: the value travels with the launch, no buffer is shared."""
        self.mirror[expert] = slot
        self.table[expert : expert + 1].fill_(slot if slot == ABSENT else self.first + slot)

    def check_integrity(self, record: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        """Mirror, device table, owners and free list agree; with `record`, so do the bytes of every live expert.

        Reads the table back, so it waits for the device. record: the right bytes of an expert, uint8 [stride].
        """
        slots = self.mirror[self.live]
        table = np.where(self.mirror == ABSENT, ABSENT, self.mirror + self.first)
        assert np.array_equal(self.table.cpu().numpy(), table), "the device's slot table is not its mirror"
        assert len(set(slots.tolist())) == slots.size, "two experts share a slot"
        assert np.array_equal(self._owner[slots], self.live), "a slot's owner is not the expert that the table names"
        assert (self._owner != ABSENT).sum() == slots.size, "a slot is owned by an expert that the table does not name"
        states = sorted([*slots.tolist(), *self._free, *self._filling, *self._quarantined])
        assert states == list(range(self.capacity)), "a slot is in no state, or in two"
        assert set(self._last_use) <= set(self._free), "a slot that is not free waits for its last use"
        coming = [filling.expert for filling in self._filling.values()]
        assert len(set(coming)) == len(coming), "an expert is on its way to two slots"
        assert all(self.mirror[expert] == ABSENT for expert in coming), "an expert in the table is on its way again"
        if record is not None:
            for expert in self.live:
                found = self.slots[int(self.mirror[expert])].cpu().numpy()
                assert np.array_equal(found, record(int(expert))), f"the slot of expert {expert} holds other bytes"
