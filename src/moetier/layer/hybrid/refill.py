"""After a step: learn what it routed to, and copy experts that keep being missed into spare slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moetier.layer.counters import Counters
from moetier.layer.hybrid.layer import HybridLayer
from moetier.residency import Heat, Policy, Step
from moetier.residency.device import ABSENT
from moetier.residency.policy import refills


@dataclass(frozen=True)
class Snapshot:
    """Heat as a step left it, on its way to the host, with the slots that the step ran with."""

    heat: torch.Tensor
    mirrors: NDArray[np.int32]
    step: Step
    arrived: torch.cuda.Event


class Refiller:
    """Follows the steps one behind, so that the host never waits for the device.

    heat: int32 [layers, experts] on the device, pairs so far, row i for layers[i]. policies: of the spare slots, by
    layer. fills: the most records that are copied after one step.
    """

    def __init__(
        self,
        layers: Sequence[HybridLayer],
        policies: Sequence[Policy],
        heat: torch.Tensor,
        total: Heat,
        counters: Sequence[Counters],
        fills: int,
    ) -> None:
        self._layers, self._policies, self._counters = layers, policies, counters
        self._heat, self._total, self._fills = heat, total, fills
        self._seen = heat.cpu().numpy().view(np.uint32).copy()
        self._waiting: list[Snapshot] = []

    def forget(self) -> None:
        """What was routed until now was no request's (warm-up): learn nothing from it. Waits for the device."""
        self._waiting.clear()
        self._seen = self._heat.cpu().numpy().view(np.uint32).copy()

    def after_step(self, step: Step) -> None:
        """A step was launched on the current stream. Publishes finished copies, learns, and starts new ones."""
        for layer in self._layers:
            if layer.busy:
                layer.busy.difference_update(layer.slots.publish())
        heat = torch.empty(self._heat.shape, dtype=torch.int32, pin_memory=True)
        heat.copy_(self._heat, non_blocking=True)
        mirrors = np.stack([layer.slots.mirror for layer in self._layers])
        arrived = torch.cuda.current_stream(self._heat.device).record_event()
        self._waiting.append(Snapshot(heat, mirrors, step, arrived))
        while self._waiting and self._waiting[0].arrived.query():  # type: ignore[no-untyped-call]
            self._learn(self._waiting.pop(0))

    def _learn(self, snapshot: Snapshot) -> None:
        now = snapshot.heat.numpy().view(np.uint32)
        pairs = now - self._seen
        self._seen = now.copy()
        left = self._fills
        for row in np.flatnonzero(pairs.any(1)):
            layer, experts = self._layers[row], np.flatnonzero(pairs[row]).astype(np.int32)
            missed = experts[snapshot.mirrors[row][experts] == ABSENT]
            self._total.add(layer.index, experts, pairs[row][experts].astype(np.int32), snapshot.step.sequences)
            self._count(self._counters[row], pairs[row], experts.size, missed.size)
            self._policies[row].touch(experts, snapshot.step.prefill)
            layer.tier.policy.touch(missed, snapshot.step.prefill)
            if left and missed.size:
                left -= self._refill(layer, self._policies[row], missed, left, self._counters[row])

    @staticmethod
    def _count(counters: Counters, pairs: NDArray[np.uint32], distinct: int, missed: int) -> None:
        counters.calls += 1
        counters.pairs += int(pairs.sum())
        counters.hits += distinct - missed
        counters.misses += missed

    def _refill(
        self, layer: HybridLayer, policy: Policy, missed: NDArray[np.int32], limit: int, counters: Counters
    ) -> int:
        slots, lock = layer.slots, layer.lock
        if not lock.acquire(blocking=False):
            return 0  # a request is being helped with: the next step will do
        try:
            absent = missed[(slots.mirror[missed] == ABSENT) & (layer.tier.addresses[missed] != 0)]
            wanted = [expert for expert in absent if expert not in layer.busy]
            swaps = refills(policy, np.array(wanted, np.int32), slots.spares, slots.free, limit)
            for swap in swaps:
                if swap.victim is not None:
                    slots.retire(swap.victim)
                record = layer.record_in_dram(swap.expert)
                assert record is not None, "a record left DRAM while nobody else may move records"
                slots.fill(swap.expert, record)
                layer.busy.add(swap.expert)
        finally:
            lock.release()
        counters.slot_fills += len(swaps)
        return len(swaps)
