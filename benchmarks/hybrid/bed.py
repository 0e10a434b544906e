"""MoE layers of random records: all of them in DRAM, a share on the device, and the mailbox running."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

import numpy as np
import torch

from moetier.contract import Family, LayerGeometry, RecordLayout
from moetier.engine.hybrid.model import mail_arrays
from moetier.engine.hybrid.rates import DeviceCalls, measure_costs
from moetier.kernels.cpu import CpuExperts, ThreadPool, read_bandwidth
from moetier.kernels.cpu.mailbox import Mailbox
from moetier.kernels.cuda.base import Sizes
from moetier.kernels.cuda.hybrid import Costs, HybridPath, LayerTables, pinned
from moetier.kernels.protocol import COUNTS, word
from moetier.tiers.arena import Arena
from moetier.tiers.registered import Registered
from moetier.tiers.slots import DeviceSlots
from moetier_reference.experts import DeviceExperts

PATTERNS = 16
"""Different records; layers repeat them in an order of their own."""
STAGING, TOKENS, PATIENCE = 64, 64, 20.0
POSTED, ANSWERED = word("posted"), word("answered")


@dataclass(frozen=True)
class Rates:
    """Bytes a second, measured here: DRAM reads with all threads, host to device, and both at once."""

    dram: float
    link: float
    threads: int


def random_record(layout: RecordLayout, rng: np.random.Generator) -> np.ndarray:
    """Random codes, scale bytes from 112 to 123."""
    record = rng.integers(0, 256, layout.stride, np.uint8)
    for index in range(layout.slices):
        for section in layout.sections:
            at = index * layout.slice_bytes + section.scales
            record[at : at + section.scale_bytes] = rng.integers(112, 124, section.scale_bytes, np.uint8)
    return record


def copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes a second of copies from pinned memory to the device: median of five, after one."""
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return source.nbytes / statistics.median(times[1:])


class Bed:
    """Layers of one geometry; `patterns` are the different records, on the device."""

    def __init__(self, geometry: LayerGeometry, family: Family, layers: int, threads: int | None = None) -> None:
        self.geometry, self.family, self.count = geometry, family, layers
        self.layout = RecordLayout.of(geometry)
        self.sizes = Sizes(geometry, family)
        g, rng = geometry, np.random.default_rng(0)
        self.pool = ThreadPool(threads)
        self.arena = Arena(layers * g.experts, self.layout.stride)
        patterns = [random_record(self.layout, rng) for _ in range(PATTERNS)]
        self.which = rng.integers(0, PATTERNS, (layers, g.experts))
        with ThreadPoolExecutor(self.pool.threads) as workers:
            for slot, pattern in enumerate(self.which.ravel()):
                workers.submit(np.copyto, self.arena.view(slot), patterns[pattern])
        self.registered = Registered()
        self.registered.add(*self.arena.extent)
        self.kernel = CpuExperts(geometry, family, self.pool, max_tokens=TOKENS)
        self.records = pinned(layers, g.experts, dtype=torch.int64)
        addresses = np.array([self.arena.address(slot) for slot in range(layers * g.experts)], np.uint64)
        self.records.numpy().view(np.uint64)[:] = addresses.reshape(layers, -1)
        self.patterns = torch.stack([torch.from_numpy(p) for p in patterns]).cuda()
        self.pattern_tables = torch.from_numpy(self.which.astype(np.int32)).cuda()
        self.experts = DeviceExperts(geometry, family, TOKENS)

    def rates(self) -> Rates:
        """Medians of five."""
        flat = np.frombuffer(memoryview(self.arena._map), np.uint8)[: 8 << 30]
        dram = statistics.median(read_bandwidth(self.pool, flat) for _ in range(5))
        size = min(64, self.geometry.experts)
        target = torch.empty((size, self.layout.stride), dtype=torch.uint8, device="cuda")
        source = torch.from_numpy(flat[: size * self.layout.stride]).view(size, -1)
        return Rates(dram, copy_rate(target, source), self.pool.threads)

    def costs(self) -> Costs:
        """As a server measures them at its start."""
        addresses = self.records.numpy().view(np.uint64).ravel()
        records = [torch.from_numpy(self.arena.view(slot)) for slot in range(min(8, self.arena.slots))]
        room = torch.empty_like(self.patterns)

        def device_call(
            x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, table: torch.Tensor, out: torch.Tensor
        ) -> None:
            self.experts.forward(x, ids, weights, table, room, out)

        return measure_costs(self.kernel, addresses, records, room, DeviceCalls(device_call, range(len(room)), TOKENS))

    def compute_until(self, ended: Event) -> None:
        """Calls of one token each to the CPU, of any layer's records."""
        g, rng = self.geometry, np.random.default_rng(2)
        x, weights = np.zeros((1, g.hidden), np.uint16), np.ones((1, g.top_k), np.float32)
        rows = np.empty((1, g.top_k, g.hidden), np.float32)
        while not ended.is_set():
            ids = rng.choice(g.experts, (1, g.top_k), replace=False).astype(np.int32)
            self.kernel.rows(x, ids, weights, self.table(int(rng.integers(self.count))), rows)

    def table(self, layer: int) -> np.ndarray:
        return self.records[layer].numpy().view(np.uint64)

    def place(self, residents: Sequence[Sequence[int]], spare: int, costs: Costs) -> Hybrid:
        """The hybrid side with these experts of each layer resident."""
        return Hybrid(self, residents, spare, costs)

    def from_patterns(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One call with every record on the device; equal records share a slot, so it is for bits, not for speed."""
        self.experts.forward(x, ids, weights, self.pattern_tables[layer], self.patterns, out)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.registered.close()


class Hybrid:
    """Slots, mailbox and tables over a bed."""

    def __init__(self, bed: Bed, residents: Sequence[Sequence[int]], spare: int, costs: Costs) -> None:
        g, count = bed.geometry, bed.count
        per_layer = max(map(len, residents)) + spare
        self.bed, self.costs = bed, costs
        self.memory = torch.zeros((count * per_layer + STAGING, bed.layout.stride), dtype=torch.uint8, device="cuda")
        staging = range(count * per_layer, count * per_layer + STAGING)
        self.path = HybridPath(bed.sizes, TOKENS, self.memory, staging, bed.layout.stride, costs, PATIENCE)
        self.mailbox = self._open_mailbox()
        self.heat = torch.zeros((count, g.experts), dtype=torch.int32, device="cuda")
        self._counts = torch.zeros((count, len(COUNTS)), dtype=torch.int64, device="cuda")
        self.slots: list[DeviceSlots] = []
        for layer in range(count):
            first = layer * per_layer
            slots = DeviceSlots(g.experts, residents[layer], self.memory[first : first + per_layer], first)
            for expert in residents[layer]:
                slots.fill(expert, self.record(layer, expert))
            slots.publish(wait=True)
            self.slots.append(slots)
        torch.cuda.synchronize()
        self.tables = [
            LayerTables(i, self.slots[i].table, bed.records[i], self.heat[i], self._counts[i]) for i in range(count)
        ]

    def _open_mailbox(self) -> Mailbox:
        tables = [self.bed.table(layer) for layer in range(self.bed.count)]
        return Mailbox(self.bed.kernel, self.bed.pool, mail_arrays(self.path.mail), tables)

    @contextmanager
    def answered_ahead(self, computing: bool = False) -> Iterator[None]:
        """Inside, no call waits for the CPU: every answer counts as given, with the rows that happen to be there.

        computing: meanwhile the CPU's threads compute, one call after the other, what nobody asked for.
        """
        torch.cuda.synchronize()
        self.mailbox.close()
        box = self.path.mail.box
        box[ANSWERED] = box[POSTED] + (1 << 20)
        ended = Event()
        with ThreadPoolExecutor(1) as beside:
            busy = beside.submit(self.bed.compute_until, ended) if computing else None
            try:
                yield
            finally:
                ended.set()
        if busy:
            busy.result()
        torch.cuda.synchronize()
        box[ANSWERED] = box[POSTED]
        self.mailbox = self._open_mailbox()

    def record(self, layer: int, expert: int) -> torch.Tensor:
        return torch.from_numpy(self.bed.arena.view(layer * self.bed.geometry.experts + expert))

    def forward(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        self.path.forward(self.tables[layer], x, ids, weights, out)

    def counts(self) -> dict[str, int]:
        """What all layers counted. Waits for the device."""
        return dict(zip(COUNTS, map(int, self._counts.sum(0).cpu()), strict=True))

    def all_resident(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One call by the kernels that know no other tier; every expert must have a slot."""
        self.bed.experts.forward(x, ids, weights, self.slots[layer].table, self.memory, out)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.mailbox.close()
