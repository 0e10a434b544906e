"""After a step: learn what it routed to, and copy experts that keep being missed into spare slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from moetier.engine.hybrid.layer import HybridLayer
from moetier.kernels.protocol import COUNTS
from moetier.tiers.heat import Heat
from moetier.tiers.policy import Policy, refills
from moetier.tiers.slots import ABSENT
from moetier.tiers.step import Step


@dataclass(frozen=True)
class Told:
    """Counts of the steps since the start, a row a layer.

    heat int32 [layers, experts] and counts int64 [layers, COUNTS] on the device; cpu_ns: the CPU's nanoseconds of a
    layer, by its index.
    """

    heat: torch.Tensor
    counts: torch.Tensor
    cpu_ns: Callable[[int], int]


@dataclass(frozen=True)
class Snapshot:
    """Counts of a step on their way to the host, with the slots that the step ran with."""

    heat: torch.Tensor
    counts: torch.Tensor
    mirrors: NDArray[np.int32]
    streamed: NDArray[np.int32]
    """Pairs of each expert of calls that the host had streamed."""
    helped: list[int]
    step: Step
    arrived: torch.cuda.Event


class Refiller:
    """Follows the steps one behind, so that the host never waits for the device.

    policies: of the spare slots, by layer. total: the heat that is kept across restarts. fills: the most records that
    are copied after one step.
    """

    def __init__(
        self, layers: Sequence[HybridLayer], policies: Sequence[Policy], told: Told, total: Heat, fills: int
    ) -> None:
        self._layers, self._policies, self._told, self._total, self._fills = layers, policies, told, total, fills
        # What was routed until now was no request's (warm-up).
        self._seen = told.heat.cpu().numpy().view(np.uint32).copy()
        self._counted = told.counts.cpu().numpy().copy()
        self._cpu_ns = [told.cpu_ns(layer.index) for layer in layers]
        for layer in layers:
            layer.take_streamed()
        self._helped = [layer.helped_reads for layer in layers]
        self._indices = np.array([layer.index for layer in layers])
        self._turn = 0
        self._waiting: list[Snapshot] = []

    def after_step(self, step: Step) -> None:
        """A step was launched on the current stream. Publishes finished copies, learns, and starts new ones."""
        for layer in self._layers:
            if layer.busy:
                layer.busy.difference_update(layer.slots.publish())
        mirrors = np.stack([layer.slots.mirror for layer in self._layers])
        heat, counts = _to_host(self._told.heat), _to_host(self._told.counts)
        arrived = torch.cuda.current_stream(self._told.heat.device).record_event()
        streamed = np.stack([layer.take_streamed() for layer in self._layers])
        helped = [layer.helped_reads for layer in self._layers]
        self._waiting.append(Snapshot(heat, counts, mirrors, streamed, helped, step, arrived))
        while self._waiting and self._waiting[0].arrived.query():  # type: ignore[no-untyped-call]
            self._learn(self._waiting.pop(0))

    def _learn(self, snapshot: Snapshot) -> None:
        now, counts, step = snapshot.heat.numpy().view(np.uint32), snapshot.counts.numpy(), snapshot.step
        pairs, counted = (now - self._seen).astype(np.int32), counts - self._counted
        self._seen, self._counted = now.copy(), counts.copy()
        pairs += snapshot.streamed
        rows, columns = np.nonzero(pairs)
        self._total.add(self._indices[rows], columns, pairs[rows, columns], step.sequences)
        left, count = self._fills, len(self._layers)
        absent = snapshot.mirrors[rows, columns] == ABSENT
        used, missed = _by_row(rows, columns, count), _by_row(rows[absent], columns[absent], count)
        sums, counts_of = pairs.sum(1).tolist(), counted.tolist()
        self._turn += 1  # another layer is first to get copies every time
        for row in ((self._turn + i) % count for i in range(count)):
            layer, experts = self._layers[row], used[row]
            if not experts.size:
                continue
            self._count(row, layer, dict(zip(COUNTS, counts_of[row], strict=True)), sums[row], snapshot.helped[row])
            self._policies[row].touch(experts, step.prefill)
            if not layer.all_in_memory:  # else nothing gives way in DRAM
                layer.tier.policy.touch(missed[row], step.prefill)
            if left and missed[row].size:
                left -= self._refill(layer, self._policies[row], missed[row], left)

    def _count(self, row: int, layer: HybridLayer, counts: Mapping[str, int], pairs: int, helped: int) -> None:
        """The device's counts of planned calls; streamed ones were counted when they were made."""
        counters, cpu_ns = layer.counters, self._told.cpu_ns(layer.index)
        counters.calls += counts["calls"]
        counters.pairs += pairs
        counters.hits += counts["hits"]
        counters.device_reads += counts["hits"]
        counters.misses += counts["misses"]
        read = helped - self._helped[row]
        self._helped[row] = helped
        counters.disk_reads += read
        counters.dram_reads += counts["misses"] - read
        counters.streamed_bytes += counts["streamed"] * layer.record_bytes
        counters.cpu_us += (cpu_ns - self._cpu_ns[row]) / 1e3
        counters.wait_us += counts["waited_ns"] / 1e3
        self._cpu_ns[row] = cpu_ns

    def _refill(self, layer: HybridLayer, policy: Policy, missed: NDArray[np.int32], limit: int) -> int:
        slots, lock = layer.slots, layer.lock
        if not lock.acquire(blocking=False):
            return 0  # a request is being helped with: the next step will do
        try:
            absent = missed[(slots.mirror[missed] == ABSENT) & (layer.tier.addresses[missed] != 0)]
            wanted = absent[~np.isin(absent, list(layer.busy))] if layer.busy else absent
            swaps = refills(policy, wanted, slots.spares, slots.free, limit)
            for swap in swaps:
                if swap.victim is not None:
                    slots.retire(swap.victim)
                address = int(layer.tier.addresses[swap.expert])
                assert address, "a record left DRAM while nobody else may move records"
                slots.fill(swap.expert, layer.record_at(address))
                layer.busy.add(swap.expert)
        finally:
            lock.release()
        layer.counters.slot_fills += len(swaps)
        return len(swaps)


def _by_row(rows: NDArray[np.intp], columns: NDArray[np.intp], count: int) -> list[NDArray[np.int32]]:
    """Return the columns of each of `count` rows, int32; rows [D] ascending, as np.nonzero gives both."""
    bounds = np.searchsorted(rows, np.arange(count + 1)).tolist()
    experts: NDArray[np.int32] = columns.astype(np.int32)
    return [experts[begin:end] for begin, end in pairwise(bounds)]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, there when the stream has come so far."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
