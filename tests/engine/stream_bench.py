"""Two layers whose missed records are streamed, on a device without streams: the CPU's kernels over the same slots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch

from moetier.contract import oracle
from moetier.engine.context import Context
from moetier.engine.counters import Counters
from moetier.engine.fetch import Fetcher
from moetier.engine.hybrid.layer import HybridLayer, Shared
from moetier.engine.hybrid.stream import Streamer
from moetier.kernels.cpu import CpuExperts, ThreadPool
from moetier.kernels.cuda.base import Call, Sizes
from moetier.kernels.cuda.hybrid import LayerTables
from moetier.store.store import Store
from moetier.tiers.disk import DiskReader
from moetier.tiers.dram import DramTier
from moetier.tiers.policy import Lru
from moetier.tiers.slots import ABSENT, DeviceSlots
from moetier.tiers.staging import Staging
from tests.engine.late import COMPUTE, COPIES, Streams

TOKENS = 40


class CpuDevice:
    """What a device path does, by the CPU's kernel; records are where the call's table says, and nowhere else."""

    def __init__(self, kernel: CpuExperts) -> None:
        self.kernel, self.sizes = kernel, Sizes(kernel.geometry, kernel.family)

    def rows(self, call: Call) -> None:
        table, g = call.slot_table.numpy(), self.sizes.geometry
        addresses = np.zeros(g.experts, np.uint64)
        for expert in np.flatnonzero(table != ABSENT):
            addresses[expert] = call.slots[int(table[expert])].data_ptr()
        x, ids, weights = call.x.view(torch.int16).numpy().view(np.uint16), call.ids.numpy(), call.weights.numpy()
        self.kernel.rows(x, ids, weights, addresses, call.rows.numpy())

    def combine(self, call: Call, out: torch.Tensor) -> None:
        ids, rows, weights = call.ids.numpy(), call.rows.numpy(), call.weights.numpy()
        acc = np.zeros(call.x.shape, np.float32)
        order = np.argsort(ids, axis=1, kind="stable")
        for token, k in ((t, k) for t in range(ids.shape[0]) for k in order[t]):
            if 0 <= ids[token, k] < self.sizes.geometry.experts:
                acc[token] += oracle.flush(rows[token, k] * weights[token, k])
        out.view(torch.int16).numpy().view(np.uint16)[:] = oracle.to_bf16(acc)


class LateDevice(CpuDevice):
    """The same on a stream. A step that others plan has the staging slots, from `first` on, to itself."""

    def __init__(self, kernel: CpuExperts, streams: Streams, slots: torch.Tensor, first: int) -> None:
        super().__init__(kernel)
        self.streams, self.staging, self.undisturbed = streams, slots[first:], True

    def rows(self, call: Call) -> None:
        self.streams.give(COMPUTE, partial(super().rows, call))

    def combine(self, call: Call, out: torch.Tensor) -> None:
        self.streams.give(COMPUTE, partial(super().combine, call, out))

    def planned_step(self) -> None:
        def step() -> None:
            self.staging[:] = 0xFF
            self.streams.go_on(COPIES)
            self.undisturbed &= bool((self.staging == 0xFF).all())

        self.streams.give(COMPUTE, step)


class Bench:
    """The layers of a store; of each, experts 0 and 1 have slots and `records` are in DRAM."""

    def __init__(
        self,
        store: Store,
        records: int,
        staging: int,
        groups: int = 4,
        streams: Streams | None = None,
        device: Any = None,
        check: bool = False,
    ) -> None:
        """device: what to compute with, made from the kernel, the streams, the slots and the first one for staging."""
        self.store, self.geometry, stride = store, store.manifest.layer_geometry, store.layout.stride
        g, self.pool = self.geometry, ThreadPool(1)
        self.kernel = CpuExperts(g, store.manifest.layer_family, self.pool, max_tokens=TOKENS)
        self.reader, self.rooms = DiskReader(store, 2), Staging(2, stride)
        rooms, number = self.rooms, len(store.manifest.layers)
        first = 2 * number
        self.slots = torch.zeros((first + staging, stride), dtype=torch.uint8)
        self.at_once = CpuDevice(self.kernel)
        make = device or LateDevice
        self.device: Any = make(self.kernel, streams, self.slots, first) if streams else self.at_once
        self.streamer = Streamer(
            self.device.sizes, TOKENS, self.slots, range(first, first + staging), stride, self.device, groups, check
        )
        self.layers = [self._layer(index, records, rooms, stride) for index in range(number)]
        self.layers[0].following = self.layers[1]
        self.everywhere = []
        for index in range(number):
            every = torch.zeros((g.experts, stride), dtype=torch.uint8)
            for expert in range(g.experts):
                self.reader.read(index, expert, rooms.view(0))
                every[expert] = torch.from_numpy(rooms.view(0))
            self.everywhere.append(every)

    def _layer(self, index: int, records: int, rooms: Staging, stride: int) -> HybridLayer:
        g = self.geometry
        tier = DramTier(g.experts, records, stride, Lru(g.experts))
        slots = DeviceSlots(g.experts, [0, 1], self.slots[2 * index : 2 * index + 2], first=2 * index)
        nothing: Any = None
        shared = Shared(self.device, self.streamer, self.kernel, stride, Lock(), Context())
        tables = LayerTables(index, slots.table, nothing, nothing, nothing)
        layer = HybridLayer(tables, slots, Fetcher(index, tier, rooms, self.reader), shared, Counters())
        for expert in (0, 1):
            self.reader.read(index, expert, rooms.view(0))
            slots.fill(expert, torch.from_numpy(rooms.view(0)))
        slots.publish()
        layer._fetcher.load(np.arange(2, 2 + records, dtype=np.int32))
        return layer

    def call(self, seed: int, experts: Sequence[int], tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
        """x, ids and weights of a call to these experts, with some ids outside the layer."""
        g, rng = self.geometry, np.random.default_rng(seed)
        ids = rng.choice([*experts, -1, g.experts], (tokens, g.top_k)).astype(np.int32)
        ids.ravel()[: len(experts)] = experts[: ids.size]
        x = torch.from_numpy(rng.standard_normal((tokens, g.hidden), np.float32)).bfloat16()
        return x, torch.from_numpy(ids), torch.from_numpy(rng.random((tokens, g.top_k), np.float32))

    def expected(self, layer: int, call: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, ids, weights = call
        rows = torch.zeros((*ids.shape, self.geometry.hidden))
        table = torch.arange(self.geometry.experts, dtype=torch.int32)
        whole, out = Call(x, ids, weights, table, self.everywhere[layer], rows), torch.empty_like(x)
        self.at_once.rows(whole)
        self.at_once.combine(whole, out)
        return out.view(torch.int16)

    def found(self, layer: int, call: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.layers[layer].stream(*call, torch.full_like(call[0], 7)).view(torch.int16)
