"""All hybrid layers of a model over one device: its slots, the mailbox and its helper, refilling."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moetier.engine.fetch import Fetcher
from moetier.engine.hybrid.helper import Helper, stuck_ms
from moetier.engine.hybrid.launch import Launch
from moetier.engine.hybrid.layer import HybridLayer, Shared
from moetier.engine.hybrid.rates import DeviceCalls, measure_costs
from moetier.engine.hybrid.refill import Refiller, Told
from moetier.engine.hybrid.stream import Streamer
from moetier.engine.model import TieredModel
from moetier.errors import MoetierError
from moetier.kernels.cpu.mailbox import MailArrays, Mailbox
from moetier.kernels.cuda.base import Sizes
from moetier.kernels.cuda.hybrid import ALL_CPU, Costs, HybridPath, LayerTables, Mail, pinned
from moetier.kernels.cuda.path import CudaPath
from moetier.kernels.protocol import COUNTS
from moetier.settings import Settings
from moetier.tiers.dram import DramTier
from moetier.tiers.policy import POLICIES
from moetier.tiers.registered import Registered
from moetier.tiers.slots import DeviceSlots
from moetier.tiers.step import UNKNOWN, Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotPlan:
    """Room on the device: slots for resident experts and spare slots of each layer, and staging slots for all.

    tokens: the most tokens of a call that the device plans by itself (the others are streamed by the host).
    """

    layers: int
    resident: int
    spare: int
    staging: int = 64
    tokens: int = 64
    fills: int = 4
    """Records that are copied into spare slots after one step, at most."""

    @classmethod
    def of(cls, settings: Settings, layers: int, slots: int, experts: int) -> SlotPlan:
        """`slots` for each layer of `experts`."""
        spare = settings.spare_of(slots, experts)
        staging, tokens = settings.staging_slots, settings.planned_tokens
        return cls(layers, slots - spare, spare, staging, tokens, settings.fills_per_step)

    @property
    def per_layer(self) -> int:
        return self.resident + self.spare

    @property
    def slots(self) -> int:
        return self.layers * self.per_layer + self.staging


class HybridModel:
    """Layers of a store on one device over the tiers of `tiers`, whose kernel takes `plan.tokens` tokens at least.

    One stream computes; `forward` of the layers, `before_step` and `after_step` are called by one thread.
    """

    def __init__(
        self,
        tiers: TieredModel,
        plan: SlotPlan,
        max_tokens: int,
        device: torch.device,
        patience_seconds: float = 60.0,
        on_failure: Callable[[MoetierError], None] = lambda error: None,
    ) -> None:
        """max_tokens: the most tokens of a call. patience_seconds: after which the device stops waiting for the CPU.

        on_failure: told, on a thread of its own, why the device had to stop; CUDA then fails, and with it the process.
        """
        self.tiers, self.plan, self.device = tiers, plan, device
        part = tiers.part
        sizes = Sizes(part.narrow, tiers.store.manifest.layer_family)
        self._bytes = min(part.bytes, sizes.layout.stride)
        self.slots = torch.zeros((plan.slots, sizes.layout.stride), dtype=torch.uint8, device=device)
        staging = range(plan.layers * plan.per_layer, plan.slots)
        self.path = HybridPath(sizes, plan.tokens, self.slots, staging, self._bytes, ALL_CPU, patience_seconds)
        streamer = None
        if len(staging) >= 2:
            many = CudaPath(sizes, max_tokens, device)
            check = tiers.settings.check_staging
            streamer = Streamer(sizes, max_tokens, self.slots, staging, self._bytes, many, check=check)
        self._shared = Shared(self.path, streamer, tiers.kernel, self._bytes, tiers.lock, tiers.context)
        self._registered = Registered()
        self._registered.add(*tiers.staging.arena.extent)
        experts, layers = part.geometry.experts, len(tiers.store.manifest.layers)
        self._may_miss = plan.per_layer < experts
        self._heat = torch.zeros((plan.layers, experts), dtype=torch.int32, device=device)
        self._counts = torch.zeros((plan.layers, len(COUNTS)), dtype=torch.int64, device=device)
        self._records = pinned(layers, experts, dtype=torch.int64)
        self.layers: list[HybridLayer] = []
        self._refiller: Refiller | None = None
        tables = [self._addresses(i) for i in range(layers)]
        alone = tiers.reader.alone(stuck_ms(patience_seconds))
        self._mailbox = Mailbox(tiers.kernel, tiers.pool, mail_arrays(self.path.mail), tables, alone)
        self._helper = Helper(self._mailbox, self.path.mail, self.layers, patience_seconds, on_failure)
        self._closed = False

    def _addresses(self, index: int) -> NDArray[np.uint64]:
        """Where the records of a layer lie in DRAM: pinned, so that the device reads it too."""
        return self._records[index].numpy().view(np.uint64)

    def attach(self, number: int) -> HybridLayer:
        """The layer with this number in the checkpoint: its hottest records on the device, the next ones in DRAM."""
        tiers, index = self.tiers, self.tiers.store.layer_index(number)
        for layer in self.layers:
            if layer.index == index:
                return layer
        row, experts = len(self.layers), tiers.part.geometry.experts
        assert row < self.plan.layers, f"the plan has {self.plan.layers} layers"
        hottest = tiers.heat.hottest(index, experts)
        resident, others = hottest[: self.plan.resident], hottest[self.plan.resident :]
        first = row * self.plan.per_layer
        slots = DeviceSlots(experts, resident.tolist(), self.slots[first : first + self.plan.per_layer], first)
        policy = POLICIES[tiers.settings.policy](experts)
        tier = DramTier(
            experts,
            min(tiers.records, others.size),
            tiers.part.room,
            policy,
            tiers.part.shift,
            addresses=self._addresses(index),
        )
        self._registered.add(*tier.arena.extent)
        fetcher = Fetcher(index, tier, tiers.staging, tiers.reader)
        tables = LayerTables(index, slots.table, self._records[index], self._heat[row], self._counts[row])
        layer = HybridLayer(tables, slots, fetcher, self._shared, tiers.layer_counters[index])
        self._load_slots(layer, resident)
        fetcher.load(others[: tier.slots])
        policy.place(others[: tier.slots])
        if self.layers and not tiers.drafts(number):  # a drafter may be called in a graph, or not at all
            self.layers[-1].following = layer
        self.layers.append(layer)
        tiers.dram[index] = tier
        return layer

    def _load_slots(self, layer: HybridLayer, resident: NDArray[np.int32]) -> None:
        """Residents go from disk over staging into their slots: they never take room in DRAM."""
        tiers = self.tiers
        for at in range(0, resident.size, tiers.staging.slots):
            experts = resident[at : at + tiers.staging.slots].tolist()
            taken = [tiers.staging.take() for _ in experts]
            rooms = [slot for slot in taken if slot is not None]
            assert len(rooms) == len(experts), "staging is in use while a layer is attached"
            reads = [
                tiers.reader.submit(layer.index, e, tiers.staging.view(s)) for e, s in zip(experts, rooms, strict=True)
            ]
            try:
                for expert, room, read in zip(experts, rooms, reads, strict=True):
                    read.result()
                    layer.slots.fill(expert, layer.record_at(tiers.staging.address(room)))
                layer.slots.publish(wait=True)
                torch.cuda.synchronize(self.device)
            finally:
                wait(reads)
                for room in rooms:
                    tiers.staging.give_back(room)

    @property
    def streams(self) -> bool:
        """Whether the host can have a call streamed."""
        return self._shared.streamer is not None

    def measure(self) -> None:
        """Measure what a miss costs here, once all layers are attached, and plan by that."""
        self.set_costs(self._measure())

    def before_step(self, launch: Launch, step: Step = UNKNOWN) -> None:
        """A step is about to be launched on the current stream."""
        if self._refiller is None:
            self._refiller = self._make_refiller()
        by_host = launch.scheduled > self.path.tokens
        if self._may_miss and (launch.drafts or not (by_host and step.prefill)):
            self._mailbox.wake()  # else the device asks the CPU for nothing, and its threads may rest
        self.path.live.fill_(launch.live)
        if self._shared.streamer is None:
            return
        self._shared.streamer.forget()
        self._shared.streamer.ledger.begin_step(replayed=not by_host)
        if by_host and step.prefill and self.layers[0].all_in_memory:
            self.layers[0].stream_ahead(launch.scheduled)

    def after_step(self, step: Step = UNKNOWN) -> None:
        """The step's model was launched, its drafter not: learn from an earlier step, start copies into spare slots."""
        assert self._refiller is not None, "before_step comes first"
        if self._shared.streamer is not None:
            self._shared.streamer.forget()  # a drafter's graphs use the staging slots and tell nobody
            self._shared.streamer.ledger.end_step()
        self._refiller.after_step(step)

    def set_costs(self, costs: Costs) -> None:
        """Plan by these from now on."""
        self.costs = costs
        self.path.set_costs(costs)

    def _measure(self) -> Costs:
        """The costs of this machine, while no call is under way."""
        torch.cuda.synchronize(self.device)
        tiers = [layer.tier for layer in self.layers if layer.tier.slots]
        if not tiers:
            return ALL_CPU
        there = np.concatenate([tier.addresses[tier.addresses != 0] for tier in tiers])
        records = [self.layers[0].record_at(int(address)) for address in there[: self.plan.staging]]
        heat, counts = torch.zeros_like(self._heat[0]), torch.zeros_like(self._counts[0])

        def device_call(
            x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, table: torch.Tensor, out: torch.Tensor
        ) -> None:
            self.path.forward(LayerTables(0, table, self._records[0], heat, counts), x, ids, weights, out)

        room = self.slots[-self.plan.staging :]
        return measure_costs(
            self.tiers.kernel, there, records, room, DeviceCalls(device_call, self.path.staging, self.path.tokens)
        )

    def _make_refiller(self) -> Refiller:
        tiers, experts = self.tiers, self.tiers.part.geometry.experts
        policies = [POLICIES[tiers.settings.policy](experts) for _ in self.layers]
        rows = slice(len(self.layers))
        told = Told(self._heat[rows], self._counts[rows], self._mailbox.layer_nanoseconds)
        return Refiller(self.layers, policies, told, tiers.heat, self.plan.fills if self.plan.spare else 0)

    def tell_if_late(self) -> None:
        """Say why the device stopped, if it gave up waiting for the CPU; from any thread."""
        self._helper.tell_if_late()

    def check_integrity(self) -> None:
        """Slots, tables, tiers and the store's bytes agree. Waits for the device; between steps."""
        for layer in self.layers:
            layer.check_integrity(self.tiers.reader, self.tiers.staging)
            self.tiers.check_records(layer.index, layer.tier)

    def counts(self) -> dict[str, int]:
        """Return what the device and the mailbox counted. Waits for the device."""
        calls, nanoseconds, helps, alone = self._mailbox.counts()
        device = dict(zip(COUNTS, map(int, self._counts.sum(0).cpu()), strict=True))
        return device | {"cpu_calls": calls, "cpu_ns": nanoseconds, "helped": helps, "alone": alone}

    def close(self) -> None:
        """End the threads and release pinned memory; the layers cannot be called any more. Leaves `tiers` open."""
        if self._closed:
            return
        self._closed = True
        try:
            torch.cuda.synchronize(self.device)  # the helper still answers: nobody waits for it afterwards
        except RuntimeError as error:  # the device has trapped
            logger.warning("the device had stopped: %s", error)
        self._helper.stop()
        self._mailbox.close()
        self._helper.join()
        self._registered.close()


def mail_arrays(mail: Mail) -> MailArrays:
    """The mailbox's memory as the CPU's end sees it."""
    return MailArrays(
        mail.box.numpy(),
        mail.ids.numpy(),
        mail.weights.numpy(),
        mail.x.view(torch.uint16).numpy(),
        mail.streamed.numpy(),
        mail.rows.numpy(),
    )
