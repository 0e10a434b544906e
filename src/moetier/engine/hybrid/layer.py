"""One hybrid layer: its records on the device, in DRAM and on disk, and a call over all three."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from moetier.engine.context import Context
from moetier.engine.counters import Counters
from moetier.engine.fetch import Fetcher, Read
from moetier.engine.hybrid.lane import Mark
from moetier.engine.hybrid.stream import Streamer
from moetier.kernels.cpu import CpuExperts
from moetier.kernels.cpu.mailbox import Request
from moetier.kernels.cuda.hybrid import HybridPath, LayerTables
from moetier.tiers.disk import DiskReader
from moetier.tiers.slots import ABSENT, DeviceSlots
from moetier.tiers.staging import Staging

MANY_PAIRS = 8
"""Pairs an expert of a call, from which on nearly all experts of a layer are taken to be routed to."""


@dataclass(frozen=True)
class Shared:
    """State that the layers of a model share. lock: held by whoever changes what is in DRAM."""

    path: HybridPath
    streamer: Streamer | None
    kernel: CpuExperts
    bytes: int
    """Bytes of this rank's part of a record."""
    lock: Lock
    context: Context


@dataclass(frozen=True)
class Copied:
    """A record read from disk and copied to the device, until the copy ends."""

    read: Read
    done: Mark


class OpenRequest(Protocol):
    """Interface of the mailbox to whoever helps with a request."""

    def forget(self, request: Request, expert: int) -> None:
        """Called before the DRAM of an expert is overwritten; OvertakenError where others may be reading it."""

    def progress(self) -> None:
        """Called whenever the request gets on."""


class HybridLayer:
    """A layer of a store over device slots, the DRAM tier and the disk.

    Few tokens, or a graph that is being captured: the device plans the call (kernels/cuda/hybrid.py). Many tokens: the
    host has all missed records streamed (stream.py). Which it is changes no bit.
    """

    def __init__(
        self, tables: LayerTables, slots: DeviceSlots, fetcher: Fetcher, shared: Shared, counters: Counters
    ) -> None:
        self.counters = counters
        self.tables, self.slots, self.tier, self._fetcher, self._shared = tables, slots, fetcher.tier, fetcher, shared
        self.busy: set[int] = set()
        """Experts whose records in DRAM are being copied into spare slots."""
        self.helped_reads = 0
        """Records read from disk by `help`."""
        self.following: HybridLayer | None = None
        """The layer that the model calls after this one, in the same way; None where that is not certain."""
        self._streamed: NDArray[np.int32] = np.zeros(slots.mirror.size, np.int32)
        self._last: NDArray[np.int64] = np.ones(slots.mirror.size, np.int64)
        """Pairs of each expert in the last call that the host had streamed."""

    @property
    def index(self) -> int:
        """Return the layer's index in the store."""
        return self.tables.index

    @property
    def lock(self) -> Lock:
        """Held by whoever changes what is in DRAM."""
        return self._shared.lock

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer: x bf16 [T, hidden], ids int32 and weights float32 [T, top_k] -> bf16 [T, hidden].

        All contiguous, x from a multiple of 16 bytes on.
        """
        out = torch.empty_like(x) if out is None else out
        tokens, path, streamer = x.shape[0], self._shared.path, self._shared.streamer
        if tokens == 0:
            return out
        planned = streamer is None or path.decodes(tokens) or streamer.captures
        if planned and tokens <= path.tokens:
            self.forget_ahead()
            return path.forward(self.tables, x, ids, weights, out)
        assert streamer is not None, f"{tokens} tokens, and the mailbox takes {path.tokens}"
        for start in range(0, tokens, streamer.max_tokens):
            part = slice(start, start + streamer.max_tokens)
            self.stream(x[part], ids[part], weights[part], out[part])
        if self.following is not None and self._shared.context.real and not streamer.ledger.replayed:
            self.following.stream_ahead(tokens)
        else:
            streamer.forget()  # the next call may be a graph
        return out

    def stream_ahead(self, tokens: int) -> None:
        """The next call is this layer's, of so many tokens: if they are many, have streamed what it will likely miss.

        No call may be under way of which a record of this layer must be read: reading moves records in DRAM.
        """
        streamer = self._shared.streamer
        if streamer is None or tokens * self._shared.path.sizes.geometry.top_k < MANY_PAIRS * self._last.size:
            return
        with self._shared.lock:
            likely = (self.slots.mirror == ABSENT) & (self.tier.addresses != 0) & (self._last > 0)
            hottest = np.argsort(-self._last, kind="stable")
            experts = hottest[likely[hottest]][: streamer.room].tolist()
            streamer.ahead(self.index, list(zip(experts, self.tier.addresses[experts].tolist(), strict=True)))

    def forget_ahead(self) -> None:
        """Drop what was streamed ahead: the current stream may go on with calls that the device plans."""
        if self._shared.streamer is not None:
            self._shared.streamer.forget()

    @property
    def all_in_memory(self) -> bool:
        """Nothing is ever read from disk: records keep their places."""
        return self.tier.slots + len(self.slots.resident) >= self.slots.mirror.size

    def stream(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`forward` with every missed record streamed, of up to the streamer's `max_tokens` tokens."""
        streamer = self._shared.streamer
        assert streamer is not None, "nothing is streamed"
        call = streamer.start(self.index, x, ids, weights, self.slots.table)
        found = call.ids_on_host()  # the device is past all calls before: what it asked of the CPU is answered
        pairs = np.bincount(found[(found >= 0) & (found < self.slots.mirror.size)], minlength=self.slots.mirror.size)
        self._streamed += pairs.astype(np.int32)
        self._last = pairs
        routed = np.flatnonzero(pairs).astype(np.int32)
        missed = routed[self.slots.mirror[routed] == ABSENT]
        late = [expert for expert in missed.tolist() if expert not in call.staged]
        with self._shared.lock:
            source = _Records(self, routed)
            try:
                streamer.finish(call, late, source, out)
            finally:
                source.close()
        if self._shared.context.real:
            self._count_streamed(routed.size - missed.size, missed.size, source.read, len(call.staged) + len(late))
        return out

    def _count_streamed(self, hits: int, misses: int, read: int, streamed: int) -> None:
        counters = self.counters
        counters.calls += 1
        counters.hits += hits
        counters.device_reads += hits
        counters.misses += misses
        counters.dram_reads += misses - read
        counters.disk_reads += read
        counters.streamed_bytes += streamed * self.record_bytes

    def take_streamed(self) -> NDArray[np.int32]:
        """Pairs of each expert, int32 [experts], of calls that the host had streamed since the last time."""
        taken, self._streamed = self._streamed, np.zeros_like(self._streamed)
        return taken

    @property
    def record_bytes(self) -> int:
        """Return the bytes of this rank's part of a record."""
        return self._shared.bytes

    def record_at(self, address: int) -> torch.Tensor:
        """The bytes of a record (this rank's part) at a host address, uint8."""
        return torch.frombuffer((ctypes.c_uint8 * self._shared.bytes).from_address(address), dtype=torch.uint8)

    def help(self, request: Request, mailbox: OpenRequest) -> None:
        """Write the rows of a request of which some records must be read; RecordReadError where one cannot be had.

        OvertakenError where the mailbox answered it meanwhile.
        """
        forget = partial(mailbox.forget, request)
        with self._shared.lock:
            routed = np.unique(request.ids)
            routed = routed[(routed >= 0) & (routed < self.tier.addresses.size)]
            pinned = self.pins([*routed.tolist(), *request.streamed.tolist()])
            here = self.tier.addresses.copy()
            here[np.setdiff1d(np.arange(here.size), routed)] = 0
            missing = [int(e) for e in routed if here[e] == 0]
            read_from_disk = len(missing)
            reads: list[Read] = []
            try:
                while True:
                    while missing and (read := self._fetcher.start(missing[0], pinned, forget)):
                        reads.append(read)
                        missing.pop(0)
                    if here.any():
                        self._shared.kernel.rows(request.x, request.ids, request.weights, here, request.rows)
                    for read in [r for r in reads if here[r.expert]]:
                        reads.remove(read)
                        self._fetcher.settle(read)
                    if not reads and not missing:
                        self.helped_reads += read_from_disk
                        return
                    here[:] = 0
                    wait([read.future for read in reads], return_when=FIRST_COMPLETED)
                    mailbox.progress()
                    for read in [r for r in reads if r.future.done()]:
                        read.future.result()
                        here[read.expert] = read.address
            except BaseException:
                self._fetcher.abandon(reads)
                raise

    def pins(self, experts: Sequence[int]) -> NDArray[np.bool_]:
        """Bool [experts]: these, and those whose records are being copied."""
        pinned = np.zeros(self.tier.addresses.size, np.bool_)
        pinned[[*experts, *self.busy]] = True
        return pinned

    def check_integrity(self, reader: DiskReader, staging: Staging) -> None:
        """Device slots and DRAM tier agree with themselves, the slots' bytes with the store. Waits for the device."""
        room = staging.take()
        assert room is not None, "staging is in use between steps"

        def record(expert: int) -> NDArray[np.uint8]:
            reader.read(self.index, expert, staging.view(room))
            whole = np.zeros(self.slots.slots.shape[1], np.uint8)
            whole[: self.record_bytes] = self.record_at(staging.address(room)).numpy()
            return whole

        try:
            self.slots.check_integrity(record)
        finally:
            staging.give_back(room)
        self.tier.check_integrity()


class _Records:
    """The records that a streamed call misses: those in DRAM first, then the others as the disk gives them."""

    def __init__(self, layer: HybridLayer, routed: NDArray[np.int32]) -> None:
        self._layer, self._pinned = layer, layer.pins(routed.tolist())
        self._reads: list[Read] = []
        self._copied: list[Copied] = []
        self.read = 0
        """Records that came from disk."""

    def records(self, experts: Sequence[int]) -> Iterator[tuple[int, int, object]]:
        addresses = self._layer.tier.addresses[list(experts)].tolist()  # they stay while the layer's lock is held
        yield from ((e, address, None) for e, address in zip(experts, addresses, strict=True) if address)
        absent = [e for e, address in zip(experts, addresses, strict=True) if not address]
        fetcher = self._layer._fetcher
        while absent or self._reads:
            while absent and (read := fetcher.start(absent[0], self._pinned)):
                self._reads.append(read)
                absent.pop(0)
            if not self._reads:
                self._settle_oldest()
                continue
            wait([read.future for read in self._reads], return_when=FIRST_COMPLETED)
            read = next(r for r in self._reads if r.future.done())
            read.future.result()
            self._reads.remove(read)
            self.read += 1
            yield read.expert, read.address, read

    def copied(self, token: object, done: Mark) -> None:
        if isinstance(token, Read):
            self._copied.append(Copied(token, done))

    def _settle_oldest(self) -> None:
        oldest = self._copied.pop(0)
        if oldest.done is not None:
            oldest.done.synchronize()
        self._layer._fetcher.settle(oldest.read)

    def close(self) -> None:
        """Every copy has ended and every slot is given back."""
        while self._copied:
            self._settle_oldest()
        self._layer._fetcher.abandon(self._reads)
