"""Identity over a store, in one process: slots, DRAM and disk, with everything that serving does beside the calls.

Steps go through all layers in order, planned by the device (eager, or captured graphs with padding) and streamed by the
host, ahead too; records are read by the helper thread or while a call streams, slots are refilled after the steps.
Every call is compared with the same experts all resident.
"""

from __future__ import annotations

import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moetier.budget import records_that_fit
from moetier.engine.hybrid import HybridLayer, HybridModel, Launch, SlotPlan
from moetier.engine.model import TieredModel
from moetier.identity.device import check_paths
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.store import Store
from moetier.tiers.disk import DiskReader
from moetier.tiers.step import Step
from moetier_reference.experts import DeviceExperts

CELLS: tuple[tuple[float, str], ...] = ((0.04, "0"), (0.12, "25%"), (0.29, "50%"), (0.43, "25%"), (0.12, "100%"))
"""Share of the experts in slots, and of all in DRAM."""
TOKENS = (1, 1, 1, 2, 3, 4, 4, 8, 16, 33, 200, 511)
GRAPHS, MOST = (1, 4), 512
STEPS = 400


class Whole:
    """Every record of the store on the device, and kernels that know no other tier."""

    def __init__(self, store: Store) -> None:
        g, stride = store.manifest.layer_geometry, store.layout.stride
        layers, reader = len(store.manifest.layers), DiskReader(store, 4)
        self.experts = DeviceExperts(g, store.manifest.layer_family, MOST)
        self.slots = torch.zeros((layers * g.experts, stride), dtype=torch.uint8, device="cuda")
        self.tables = torch.arange(layers * g.experts, dtype=torch.int32, device="cuda").view(layers, -1)
        room = np.zeros(stride + 4096, np.uint8)
        room = room[-room.ctypes.data % 4096 :][:stride]
        for layer in range(layers):
            for expert in range(g.experts):
                reader.read(layer, expert, room)
                self.slots[layer * g.experts + expert] = torch.from_numpy(room).cuda()
        reader.close()

    def forward(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.experts.forward(x, ids, weights, self.tables[layer], self.slots)


class Captured:
    """One layer's calls of a number of tokens in a graph."""

    def __init__(self, layer: HybridLayer, hidden: int, top_k: int, tokens: int) -> None:
        self.x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        self.ids = torch.zeros(tokens, top_k, dtype=torch.int32, device="cuda")
        self.weights, self.out = torch.zeros(tokens, top_k, device="cuda"), torch.empty_like(self.x)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            layer.forward(self.x, self.ids, self.weights, self.out)

    def run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.x.copy_(x), self.ids.copy_(ids), self.weights.copy_(weights)
        self.graph.replay()
        return self.out.clone()


def check(store: Store, whole: Whole, share: float, dram: str, arguments: Namespace) -> dict[str, Any]:
    """Steps at one placement."""
    g, checkpoint = store.manifest.layer_geometry, Checkpoint.open(arguments.model)
    slots = max(2, round(share * g.experts))
    settings = Settings(
        store=store.path,
        slots=slots,
        dram_records=dram,
        threads=arguments.threads,
        heat_file=store.path.parent / f"heat-{share}-{dram}",
    )
    layers = len(store.manifest.layers)
    tiers = TieredModel(settings, store, records_that_fit(settings, store, layers), settings.planned_tokens, checkpoint)
    plan = SlotPlan.of(settings, layers, slots, g.experts)
    hybrid = HybridModel(tiers, plan, MOST, torch.device("cuda", torch.cuda.current_device()), patience_seconds=30)
    tiers.at_close(hybrid.close)
    served = [hybrid.attach(layer.number) for layer in store.manifest.layers]
    tiers.context.real = False
    check_paths(hybrid.layers, hybrid.path, hybrid.streams, 8)
    hybrid.measure()
    graphs = {(i, n): Captured(layer, g.hidden, g.top_k, n) for i, layer in enumerate(served) for n in GRAPHS}
    tiers.context.real = True
    rng, pick = torch.Generator("cuda").manual_seed(11), random.Random(11)
    differ, calls, padded = torch.zeros((), dtype=torch.int64, device="cuda"), 0, 0
    end = time.monotonic() + arguments.seconds
    skew = torch.rand(layers, 1, g.experts, device="cuda", generator=rng) * 3  # hot experts, so that slots are refilled
    for number in range(60 if arguments.quick else STEPS):
        if time.monotonic() > end:
            break
        captured = number % 3 == 0
        tokens = pick.choice(GRAPHS if captured else TOKENS)
        live = pick.randint(1, tokens) if captured else tokens
        padded += live < tokens
        step = Step(min(live, 8), prefill=tokens > 16)
        hybrid.before_step(Launch.plain(live), step)
        for index, layer in enumerate(served):
            x = torch.randn(tokens, g.hidden, device="cuda", generator=rng).bfloat16()
            scores = skew[index] - torch.log(-torch.log(torch.rand(tokens, g.experts, device="cuda", generator=rng)))
            ids = scores.topk(g.top_k, 1).indices.to(torch.int32).contiguous()
            weights = torch.rand(tokens, g.top_k, device="cuda", generator=rng) + 0.1
            wanted = whole.forward(index, x, ids, weights)
            found = graphs[index, tokens].run(x, ids, weights) if captured else layer.forward(x, ids, weights)
            differ += (wanted[:live].view(torch.int16) != found[:live].view(torch.int16)).sum()
            calls += 1
        hybrid.after_step(step)
    hybrid.check_integrity()
    counts, counters = hybrid.counts(), tiers.counters
    row = {"what": f"store, {share:.0%} in slots, {dram} in DRAM", "calls": calls, "padded steps": padded}
    row |= {"cpu_rows": counts["pairs_cpu"], "helped": counts["helped"], "disk_reads": counters.disk_reads}
    row |= {"slot_fills": counters.slot_fills, "streamed_MB": counters.streamed_bytes >> 20, "differ": int(differ)}
    tiers.close()
    return row


def run(arguments: Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        build_store(arguments.model, path)
        rows = []
        with Store.open(path) as store:
            whole = Whole(store)
            for share, dram in CELLS:
                rows.append(check(store, whole, share, dram, arguments))
                yield rows[-1]
        summed = ("calls", "cpu_rows", "helped", "disk_reads", "slot_fills", "differ")
        yield {"what": "store in all", **{key: sum(row[key] for row in rows) for key in summed}}
