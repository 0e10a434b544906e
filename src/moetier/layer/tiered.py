"""A step of one layer: compute what is in DRAM while what is missed is read, and combine in the contract's order."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from moetier.kernels.cpu import CpuExperts
from moetier.layer.context import Context
from moetier.layer.counters import Counters
from moetier.layer.recording import Call
from moetier.residency import DiskReader, DramTier, Heat
from moetier.residency.staging import Staging


@dataclass(frozen=True)
class Read:
    """A record on its way: into a slot of the layer (kept), or into staging (used once)."""

    future: Future[None]
    slot: int
    staged: bool
    address: int


class TieredLayer:
    """Layer `index` of a store over its DRAM tier, the shared staging and the disk.

    The down projection takes the experts in ascending id, as the contract combines them; gate and up take them as
    they come. Which tier an expert came from changes when it is computed, never what.
    """

    def __init__(
        self,
        index: int,
        kernel: CpuExperts,
        tier: DramTier,
        staging: Staging,
        reader: DiskReader,
        heat: Heat,
        counters: Counters,
        context: Context | None = None,
    ) -> None:
        self.index = index
        self.tier = tier
        self._kernel = kernel
        self._staging = staging
        self._reader = reader
        self._heat = heat
        self._counters = counters
        self._context = context or Context()

    def forward(
        self,
        x: NDArray[np.uint16] | NDArray[np.float32],
        ids: NDArray[np.int32] | NDArray[np.int64],
        weights: NDArray[np.float32],
        out: NDArray[np.uint16],
    ) -> None:
        """X [T, hidden] as bf16 bits or float32, ids and weights [T, top_k] -> out, bf16 bits [T, hidden].

        RecordReadError where a record cannot be had; `out` is then not written, and the layer can be called again.
        """
        start, waited = perf_counter_ns(), 0
        experts, pairs, missed = self._kernel.try_forward(x, ids, weights, self.tier.addresses, out)
        context = self._context
        if context.real:
            self.tier.policy.touch(experts, context.step.prefill)
        if missed.size:
            self._kernel.begin(x, ids, weights)
            waited = self._run_with_misses(experts, self.tier.addresses[experts])
            self._kernel.finish(out)
        if not context.real:
            return
        self._counters.cpu_us += (perf_counter_ns() - start - waited) / 1000
        self._counters.wait_us += waited / 1000
        self._account(x.shape[0], experts, pairs, missed.size)
        if context.trace is not None:
            context.trace.add(self.index, context.step, ids)
        if context.recorder is not None:
            context.recorder.add(Call(self.index, x, ids, weights, out))

    def preload(self, number: int) -> None:
        """Read the `number` hottest experts into free slots."""
        hottest = self._heat.hottest(self.index, min(number, self.tier.slots))
        self.load(hottest)
        self.tier.policy.place(hottest[self._heat.counts[self.index, hottest] > 0])

    def load(self, experts: NDArray[np.int32]) -> None:
        """Read `experts`, int32 [D], into free slots."""
        nothing_pinned = np.zeros(self.tier.addresses.size, np.bool_)
        reads: dict[int, Read] = {}
        try:
            for expert in map(int, experts):
                read = self._start_read(expert, nothing_pinned)
                assert read is not None
                assert not read.staged, "a layer that is preloaded has free slots"
                reads[expert] = read
            for read in reads.values():
                read.future.result()
        except BaseException:
            self._abandon(reads)
            raise
        for expert, read in reads.items():
            self._settle(expert, read)

    def _account(self, tokens: int, experts: NDArray[np.int32], pairs: NDArray[np.int32], misses: int) -> None:
        self._heat.add(self.index, experts, pairs, self._context.step.sequences)
        counters = self._counters
        counters.calls += 1
        counters.tokens += tokens
        counters.pairs += int(pairs.sum())
        counters.hits += experts.size - misses
        counters.misses += misses
        counters.dram_reads += experts.size - misses
        counters.disk_reads += misses

    def _run_with_misses(self, experts: NDArray[np.int32], addresses: NDArray[np.uint64]) -> int:
        """`addresses` uint64 [D] of `experts` int32 [D], 0 where a record must be read; filled in as they arrive.

        Returns the nanoseconds in which there was nothing to compute.
        """
        reads: dict[int, Read] = {}
        pinned = np.zeros(self.tier.addresses.size, np.bool_)
        pinned[experts] = True  # an expert of this step is never given up before its down projection
        missed = [int(i) for i in np.flatnonzero(addresses == 0)]
        gated = np.zeros(experts.size, np.bool_)
        first = waited = 0
        try:
            while first < experts.size:
                while missed and (read := self._start_read(int(experts[missed[0]]), pinned)):
                    reads[missed.pop(0)] = read
                arrived = [i for i, read in reads.items() if addresses[i] == 0 and read.future.done()]
                for i in arrived:
                    reads[i].future.result()
                    addresses[i] = reads[i].address
                ready = np.flatnonzero((addresses != 0) & ~gated).astype(np.int32)
                if ready.size:
                    self._kernel.gate_up(ready, addresses[ready])
                    gated[ready] = True
                end = first + int(np.argmin(np.append(gated[first:], False)))
                if end > first:
                    self._kernel.down(first, addresses[first:end])
                    for i in range(first, end):
                        pinned[experts[i]] = False
                        if i in reads:
                            self._counters.dram_fills += not reads[i].staged
                            self._settle(int(experts[i]), reads.pop(i))
                    first = end
                elif not ready.size:
                    coming = [reads[i].future for i in reads if addresses[i] == 0]
                    assert coming, "a record is missing, and none is on its way: slots were lost"
                    begun = perf_counter_ns()
                    wait(coming, return_when=FIRST_COMPLETED)
                    waited += perf_counter_ns() - begun
        except BaseException:
            self._abandon(reads)
            raise
        return waited

    def _start_read(self, expert: int, pinned: NDArray[np.bool_]) -> Read | None:
        """Read `expert` into a slot of the layer, else into staging; None while both are in use."""
        slot = self.tier.take(expert, pinned)
        if slot is not None:
            view, address, staged = self.tier.arena.view(slot), self.tier.arena.address(slot), False
        else:
            slot = self._staging.take()
            if slot is None:
                return None
            view, address, staged = self._staging.view(slot), self._staging.address(slot), True
        try:
            return Read(self._reader.submit(self.index, expert, view), slot, staged, address)
        except BaseException:
            (self._staging if staged else self.tier).give_back(slot)
            raise

    def _settle(self, expert: int, read: Read) -> None:
        if read.staged:
            self._staging.give_back(read.slot)
        else:
            self.tier.publish(expert, read.slot)

    def _abandon(self, reads: dict[int, Read]) -> None:
        """A step ends early: wait until nothing writes any more, then free what was taken."""
        wait([read.future for read in reads.values()])
        for read in reads.values():
            if read.staged:
                self._staging.give_back(read.slot)
            else:
                self.tier.give_back(read.slot)
