"""Many tokens: nearly every expert of the layer is routed to, so all that lack a slot go over the link, in rounds.

The staging slots are a ring of groups. A side stream fills one group after the other; the device computes a group's
experts when they are there, and its slots are free again behind that. The link does not wait for the router either:
while a layer's last rounds and the next layer's attention are computed, `ahead` has it fill the groups with what the
next layer will most likely miss. What the router then did not ask for is not used, what is not there comes after it.

The host drives all this, so such a call cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from moetier.engine.hybrid.lane import Lane, Mark
from moetier.engine.hybrid.ledger import StagingLedger, Writer
from moetier.kernels.cuda.base import Call, DevicePath, Sizes

GROUPS = 4


class Source(Protocol):
    """Where the records of one layer come from."""

    def records(self, experts: Sequence[int]) -> Iterator[tuple[int, int, object]]:
        """Each expert with its record's address, in any order, and a token (or None) that `copied` takes back."""

    def copied(self, token: object, done: Mark) -> None:
        """The copy of the record ends at `done`: its bytes must stay until then."""


@dataclass(frozen=True)
class Round:
    """Records on their way into a group of the ring.

    table: their slots, int32 [experts] on the device, -1 for all others. arrived: behind their copies.
    """

    experts: tuple[int, ...]
    group: int
    table: torch.Tensor
    arrived: Mark


@dataclass(frozen=True)
class Started:
    """A call of which everything is launched that needs no word of its router.

    staged: experts that were on their way before the call. ids: the call's, on their way to the host.
    """

    call: Call
    staged: frozenset[int]
    ids: torch.Tensor
    routed: Mark

    def ids_on_host(self) -> NDArray[np.int32]:
        """Waits for the router."""
        if self.routed is not None:
            self.routed.synchronize()
        found: NDArray[np.int32] = self.ids.numpy()
        return found


class Tables:
    """Slot tables of the rounds that a ring of groups holds, on the device, sent there on the lane.

    A group's table is free when its slots are. The host writes each into a row of its own, which it takes again after
    SENT rings, when the copy from it has mostly ended long ago.
    """

    SENT = 4

    def __init__(self, groups: int, experts: int, device: torch.device, lane: Lane) -> None:
        self._there = torch.full((groups, experts), -1, dtype=torch.int32, device=device)
        rows = torch.full((self.SENT * groups, experts), -1, dtype=torch.int32)
        self._rows = rows.pin_memory() if device.type == "cuda" else rows
        self._written: NDArray[np.int32] = self._rows.numpy()
        self._sent: list[Mark] = [None] * len(rows)
        self._turn, self._lane = 0, lane

    def send(self, group: int, slots: Mapping[int, int]) -> tuple[torch.Tensor, Mark]:
        """The table of a group, int32 [experts] on the device, and when it is there: slots of experts, else -1."""
        row = self._turn
        self._turn = (row + 1) % len(self._sent)
        if (sent := self._sent[row]) is not None:
            sent.synchronize()
        written = self._written[row]
        written[:] = -1
        written[list(slots)] = list(slots.values())
        there = self._there[group]
        self._lane.copy(there.data_ptr(), written.ctypes.data, written.nbytes)
        self._sent[row] = arrived = self._lane.mark()
        return there, arrived


class Streamer:
    """Calls of up to `max_tokens` tokens over the slots of all layers, `staging` of them for records on their way.

    While records are on their way for a coming call (`ahead`), nothing else may use the staging slots before `forget`;
    `ledger` says who may when.
    """

    def __init__(
        self,
        sizes: Sizes,
        max_tokens: int,
        slots: torch.Tensor,
        staging: range,
        record_bytes: int,
        path: DevicePath,
        groups: int = GROUPS,
        check: bool = False,
    ) -> None:
        """record_bytes: of a record, up to a slot's stride. path: kernels for calls of that many tokens. check: see
        StagingLedger.
        """
        assert len(staging) >= 2, "streaming wants two staging slots at least"
        assert record_bytes <= slots.shape[1], "a record longer than a slot"
        g, device = sizes.geometry, slots.device
        number = min(groups, len(staging))
        size = len(staging) // number
        self._groups = [staging[i * size : (i + 1) * size] for i in range(number)]
        self._slots, self._bytes, self.max_tokens, self.path = slots, record_bytes, max_tokens, path
        self._lane = Lane(device)
        self._tables = Tables(number, g.experts, device, self._lane)
        self._free: list[Mark] = [None] * number
        self._turn = 0
        self._coming: list[Round] = []
        self.ledger = StagingLedger(staging, check)
        self._rows = torch.zeros((max_tokens, g.top_k, g.hidden), dtype=torch.float32, device=device)
        ids = torch.zeros((max_tokens, g.top_k), dtype=torch.int32)
        self._ids = ids.pin_memory() if device.type == "cuda" else ids

    @property
    def room(self) -> int:
        """Records that `ahead` can take."""
        return sum(map(len, self._groups))

    @property
    def captures(self) -> bool:
        """Whether a graph is being captured, so that the host cannot drive a call."""
        return self._lane.captures

    def ahead(self, layer: int, records: Sequence[tuple[int, int]]) -> None:
        """Start copying records for the next call, which will be of `layer`: experts and addresses, at most `room`.

        They lie in memory that the device can read and stay as they are until that call, or `forget`.
        """
        assert len(records) <= self.room, "more records than staging slots"
        if self.ledger.writer is not Writer.HOST:
            self._begin()
        self.ledger.ahead(layer)
        size = len(self._groups[0])
        for start in range(0, len(records), size):
            self._coming.append(self._fill((expert, at, None) for expert, at in records[start : start + size]))

    def forget(self) -> None:
        """Nothing is for a coming call; what the current stream is given from now on may use the staging slots."""
        if self._coming:
            self._lane.compute_after(self._coming[-1].arrived)
        self._coming = []
        self.ledger.called()
        self.ledger.device_takes()

    def start(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, slot_table: torch.Tensor
    ) -> Started:
        """Launch a call of `layer` as far as its experts have slots or are coming; `finish` must follow.

        x bf16 [T, hidden], ids int32 and weights float32 [T, top_k], T up to `max_tokens`; slot_table int32 [experts].
        """
        if self.ledger.coming != layer:
            self.forget()
        if not self._coming:
            self._begin()
        self.ledger.called()
        tokens = x.shape[0]
        on_host = self._ids[:tokens]
        on_host.copy_(ids, non_blocking=True)
        routed = self._lane.compute_mark()
        call = Call(x, ids, weights, slot_table, self._slots, self._rows[:tokens])
        coming, self._coming = self._coming, []
        early = (len(coming) + 1) // 2  # they came first and their slots are wanted; the resident experts can wait
        for one in coming[:early]:
            self._compute(call, one)
        self.path.rows(call)
        for one in coming[early:]:
            self._compute(call, one)
        return Started(call, frozenset(e for one in coming for e in one.experts), on_host, routed)

    def finish(self, started: Started, missed: Sequence[int], source: Source, out: torch.Tensor) -> None:
        """Stream what the call still lacks, and combine: out bf16 [T, hidden].

        missed: its routed experts that have no slot and were not staged.
        """
        records, size = source.records(missed), len(self._groups[0])
        try:
            for _ in range(0, len(missed), size):
                self._compute(started.call, self._fill(islice(records, size), source.copied))
        except BaseException:
            self._lane.wait()  # of a round that compute does not wait for: whoever has the slots next must not meet it
            raise
        self.path.combine(started.call, out)

    def _begin(self) -> None:
        """Take all staging slots, once the current stream is past what it was given so far."""
        self._free = [self._lane.compute_mark()] * len(self._groups)
        self.ledger.host_takes()

    def _fill(
        self,
        records: Iterable[tuple[int, int, object]],
        copied: Callable[[object, Mark], None] = lambda token, done: None,
    ) -> Round:
        """Start the copies of up to a group of records into the next group of the ring."""
        group, there = self._turn, dict[int, int]()
        self._turn = (group + 1) % len(self._groups)
        self._lane.after(self._free[group])
        first, stride = self._slots.data_ptr(), self._slots.stride(0)
        for slot, (expert, address, token) in zip(self._groups[group], records, strict=False):
            self.ledger.copied(slot)
            self._lane.copy(first + slot * stride, address, self._bytes)
            if token is not None:
                copied(token, self._lane.mark())
            there[expert] = slot
        return Round(tuple(there), group, *self._tables.send(group, there))

    def _compute(self, call: Call, one: Round) -> None:
        self._lane.compute_after(one.arrived)
        self.path.rows(Call(call.x, call.ids, call.weights, one.table, self._slots, call.rows))
        self._free[one.group] = self._lane.compute_mark()
