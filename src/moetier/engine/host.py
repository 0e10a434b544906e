"""A step of one layer: compute what is in DRAM while what is missed is read, and combine in the contract's order."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, wait
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from moetier.contract import oracle
from moetier.engine.context import Context
from moetier.engine.counters import Counters
from moetier.engine.fetch import Fetcher, Read
from moetier.engine.recording import Call
from moetier.kernels.cpu import CpuExperts
from moetier.tiers.disk import DiskReader
from moetier.tiers.dram import DramTier
from moetier.tiers.heat import Heat
from moetier.tiers.staging import Staging


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
        self.fetcher = Fetcher(index, tier, staging, reader)
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
        """X [T, hidden] as bf16 bits, ids and weights [T, top_k] -> out, bf16 bits [T, hidden].

        x in float32 is rounded to bf16 first, as it is for slots: where an expert lies changes no bit of any input.
        RecordReadError where a record cannot be had; `out` is then not written, and the layer can be called again.
        """
        start, waited = perf_counter_ns(), 0
        if x.dtype == np.float32:
            x = oracle.to_bf16(x.astype(np.float32, copy=False))
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
        if context.sampler is not None and context.sampler.wanted:
            context.sampler.sample(Call(self.index, x, ids, weights, out))

    def preload(self, number: int) -> None:
        """Read the `number` hottest experts into free slots."""
        hottest = self._heat.hottest(self.index, min(number, self.tier.slots))
        self.fetcher.load(hottest)
        self.tier.policy.place(hottest[self._heat.counts[self.index, hottest] > 0])

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
                while missed and (read := self.fetcher.start(int(experts[missed[0]]), pinned)):
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
                            self._counters.dram_fills += self._context.real and not reads[i].staged
                            self.fetcher.settle(reads.pop(i))
                    first = end
                elif not ready.size:
                    coming = [reads[i].future for i in reads if addresses[i] == 0]
                    assert coming, "a record is missing, and none is on its way: slots were lost"
                    begun = perf_counter_ns()
                    wait(coming, return_when=FIRST_COMPLETED)
                    waited += perf_counter_ns() - begun
        except BaseException:
            self.fetcher.abandon(reads.values())
            raise
        return waited
