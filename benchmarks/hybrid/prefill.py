"""Long prompts through layers of Qwen3-235B's shape, attention and router with them: what streams, against the link.

Each layer: norm, attention (64 heads of 128, 4 for keys and values), norm, router, routed experts; random weights. The
missed experts are streamed by the very classes that serve. `share of link`: streamed bytes over the step's time, over
the link's own rate here; `over floor`: the step over the larger of the link's time for these bytes and the step with
all experts resident.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from bed import Bed

from moetier.contract import Family
from moetier.engine.context import Context
from moetier.engine.counters import Counters
from moetier.engine.fetch import Fetcher
from moetier.engine.hybrid.layer import HybridLayer, Shared
from moetier.engine.hybrid.stream import Streamer
from moetier.kernels.cuda.base import Call
from moetier.kernels.cuda.hybrid import ALL_STREAM, HybridPath, LayerTables
from moetier.kernels.cuda.path import CudaPath
from moetier.plan.catalog import layer_of
from moetier.tiers.disk import DiskReader
from moetier.tiers.dram import DramTier
from moetier.tiers.policy import Lru
from moetier.tiers.slots import DeviceSlots
from moetier.tiers.staging import Staging

GEOMETRY, FAMILY = layer_of("qwen3-235b"), Family()
HEADS, KV_HEADS, HEAD = 64, 4, 128
TOKENS, SHARES = (8192, 4096), (0.43, 0.25)
WAYS: dict[str, dict[str, Any]] = {
    "64 staging": {},
    "32 staging": {"staging": 32},
    "64 staging, 8 groups": {"groups": 8},
    "64 staging, 2 groups": {"groups": 2},
    "64 staging, not ahead": {"ahead": False},
}
"""How the staging slots are used; "not ahead": a layer's records start when its router has spoken."""
MOST_STAGING, WARM, STEPS = 64, 2, 7

Moe = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Model:
    """The layers without their experts. Every layer has the same dense weights, and a router of its own."""

    def __init__(self, layers: int) -> None:
        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

        g = GEOMETRY
        self.qkv, self.o = weight((HEADS + 2 * KV_HEADS) * HEAD, g.hidden), weight(g.hidden, HEADS * HEAD)
        self.routers = [weight(g.experts, g.hidden) for _ in range(layers)]
        self.ones = torch.ones(g.hidden, device="cuda", dtype=torch.bfloat16)

    def step(self, x: torch.Tensor, moe: Moe) -> torch.Tensor:
        """A prompt bf16 [T, hidden] through all layers; moe(layer, x, ids, weights) are their experts."""
        for layer, router in enumerate(self.routers):
            x = x + self._attention(self._norm(x))
            h = self._norm(x)
            weights, ids = F.linear(h, router).float().softmax(-1).topk(GEOMETRY.top_k, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            x = x + moe(layer, h, ids.to(torch.int32), weights) * 0.1
        return x

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.ones, 1e-6)

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        parts = F.linear(x, self.qkv).split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], -1)
        q, k, v = (part.view(1, x.shape[0], -1, HEAD).transpose(1, 2) for part in parts)
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(mixed.transpose(1, 2).reshape(x.shape[0], -1), self.o)


class Experts:
    """The hybrid layers over a bed: `share` of the experts of each have slots, all others are in DRAM."""

    def __init__(self, bed: Bed, path: CudaPath, memory: torch.Tensor, share: float) -> None:
        self.bed, self.path, self.memory, g = bed, path, memory, bed.geometry
        self.first_staging = memory.shape[0] - MOST_STAGING
        self.planned = HybridPath(
            bed.sizes, 1, memory, range(self.first_staging, self.first_staging), bed.layout.stride, ALL_STREAM, 20.0
        )
        self.slots = []
        for layer in range(bed.count):
            resident, first = list(range(round(share * g.experts))), layer * g.experts
            slots = DeviceSlots(g.experts, resident, memory[first : first + g.experts], first)
            for expert in resident:
                slots.fill(expert, torch.from_numpy(bed.arena.view(first + expert)))
            slots.publish(wait=True)
            self.slots.append(slots)
        self.rooms = Staging(1, bed.layout.stride)

    def all_resident(self) -> Moe:
        """The kernels that know no other tier."""
        g, rows = self.bed.geometry, torch.zeros((max(TOKENS), GEOMETRY.top_k, GEOMETRY.hidden), device="cuda")
        assert all(slots.live.size == g.experts for slots in self.slots)

        def run(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            call = Call(x, ids, weights, self.slots[layer].table, self.memory, rows[: x.shape[0]])
            self.path.forward(call, out)
            return out

        return run

    def hybrid(self, staging: int = MOST_STAGING, groups: int = 4, ahead: bool = True) -> list[HybridLayer]:
        """The layers, with nothing on the disk."""
        bed, end = self.bed, self.first_staging + staging
        nothing: Any = None
        rooms, stride = range(self.first_staging, end), bed.layout.stride
        streamer = Streamer(bed.sizes, max(TOKENS), self.memory, rooms, stride, self.path, groups)
        shared = Shared(self.planned, streamer, bed.kernel, bed.layout.stride, Lock(), Context())
        made: list[HybridLayer] = []
        for index in range(bed.count):
            tier = DramTier(GEOMETRY.experts, 0, 4096, Lru(GEOMETRY.experts), addresses=bed.table(index))
            reader: DiskReader = nothing
            tables = LayerTables(index, self.slots[index].table, bed.records[index], nothing, nothing)
            fetcher = Fetcher(index, tier, self.rooms, reader)
            made.append(HybridLayer(tables, self.slots[index], fetcher, shared, Counters()))
            if ahead and index:
                made[-2].following = made[-1]
        return made


def rounds(layers: list[HybridLayer], model: Model, x: torch.Tensor) -> Iterator[tuple[float, int, torch.Tensor]]:
    """Steps: milliseconds, streamed bytes, and the step's output."""

    def moe(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return layers[layer].forward(x, ids, weights)

    while True:
        before = sum(layer.counters.streamed_bytes for layer in layers)

        def step() -> torch.Tensor:
            if layers[0].following is not None:
                layers[0]._shared.streamer.forget()
                layers[0].stream_ahead(x.shape[0])
            return model.step(x, moe)

        ms, out = timed(step)
        yield ms, sum(layer.counters.streamed_bytes for layer in layers) - before, out


def timed(run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Milliseconds from the first launch to the end."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    out = run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end), out


def median_ms(run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Of the timed steps, and the last one's output."""
    found = [timed(run) for _ in range(WARM + STEPS)][WARM:]
    return statistics.median(ms for ms, _ in found), found[-1][1]


def cell(
    layers: list[HybridLayer], model: Model, x: torch.Tensor, whole_ms: float, wanted: torch.Tensor, link: float
) -> dict[str, Any]:
    """One placement and way at one length."""
    steps = rounds(layers, model, x)
    found = [next(steps) for _ in range(WARM + STEPS)]
    times = [ms for ms, _, _ in found[WARM:]]
    ms, size = statistics.median(times), statistics.median(size for _, size, _ in found[WARM:])
    floor_ms = size / link * 1e3
    differ = sum(int((out.view(torch.int16) != wanted.view(torch.int16)).sum()) for _, _, out in found)
    return {
        "ms": ms,
        "range_ms": f"{min(times):.1f}..{max(times):.1f}",
        "tok_s": x.shape[0] / ms * 1e3,
        "streamed_GB": size / 1e9,
        "GB_s": size / ms / 1e6,
        "share of link": floor_ms / ms,
        "over floor": ms / max(floor_ms, whole_ms),
        "differ": differ,
    }


def run(arguments: Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the table."""
    torch.manual_seed(0)
    bed = Bed(GEOMETRY, FAMILY, 2 if arguments.quick else min(6, arguments.layers), arguments.threads)
    rates = bed.rates()
    yield {"what": f"{bed.count} layers, record {bed.layout.stride} B", "link_GB_s": rates.link / 1e9}
    path, model = CudaPath(bed.sizes, max(TOKENS), bed.patterns.device), Model(bed.count)
    slots = bed.count * GEOMETRY.experts + MOST_STAGING
    memory = torch.zeros((slots, bed.layout.stride), dtype=torch.uint8, device="cuda")
    prompts = {tokens: torch.randn(tokens, GEOMETRY.hidden, device="cuda").bfloat16() for tokens in TOKENS}
    moe, whole = Experts(bed, path, memory, 1.0).all_resident(), {}
    for tokens, x in prompts.items():
        dense_ms, _ = median_ms(lambda x=x: model.step(x, lambda layer, x, ids, weights: x))
        whole[tokens] = median_ms(lambda x=x: model.step(x, moe))
        ms = whole[tokens][0]
        yield {
            "what": f"all resident, {tokens} tokens",
            "ms": ms,
            "tok_s": tokens / ms * 1e3,
            "without_experts": dense_ms,
        }
    for share in SHARES:
        experts = Experts(bed, path, memory, share)
        for name, way in WAYS.items():
            layers = experts.hybrid(**way)
            for tokens, x in prompts.items():
                yield {"what": f"{share:.0%}, {tokens}, {name}"} | cell(layers, model, x, *whole[tokens], rates.link)
    torch.cuda.synchronize()
    bed.close()
