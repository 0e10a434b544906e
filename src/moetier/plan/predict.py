"""Seconds from bytes: what each tier needs for a step, and how that adds up.

Decode, layer by layer: the device's own work; meanwhile the missed experts, on the CPU and over the link (misses.py),
after those on disk have arrived.
Prefill, chunk by chunk: experts without a slot cross the links, those without a place in DRAM come from disk before;
arithmetic hides behind both, and they behind each other but for a part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moetier.plan.costs import Costs
from moetier.plan.geometry import Geometry
from moetier.plan.hardware import Hardware
from moetier.plan.kernels import device_seconds, record_seconds
from moetier.plan.misses import FILLS, PLANNED, STAGED, Split, distribution
from moetier.plan.placement import Placement
from moetier.plan.workload import Workload

FORM = 0.12
"""Spread of what the model's form leaves out, whatever its costs: the published rows are met within 18 %, half of them
within 7 % (tests/plan/test_published.py)."""
EVEN = 6
"""Arithmetic and what is moved hide behind each other unless they take as long: then each waits for the other now and
then. This power's norm of both is what one H200 took: 89.4 ms where either alone is 80 (docs/hybrid.md, f27a1e2)."""
MOST_CHUNKS = 32
"""Chunks of a prompt that are looked at one by one; of more, as many evenly spread ones stand for all."""
TTFT = {"ttft_2k_s": 2048, "ttft_16k_s": 16384, "ttft_128k_s": 131072}


@dataclass(frozen=True)
class Draft:
    """Speculation: tokens drafted a step, and tokens that come out of one on average (1: none is accepted)."""

    tokens: int
    accepted: float


@dataclass(frozen=True)
class Case:
    """A case to predict."""

    geometry: Geometry
    hardware: Hardware
    placement: Placement
    workload: Workload
    draft: Draft | None = None

    @property
    def on_cpu(self) -> bool:
        return self.hardware.gpus == 0


def decode_parts(case: Case, costs: Costs, streams: int = 1) -> dict[str, float]:
    """Seconds of one decode step by part, its sum being the step."""
    return _with_host(_target_parts(case, costs, streams, float(streams)), costs, streams)


def _with_host(parts: dict[str, float], costs: Costs, streams: int) -> dict[str, float]:
    """And where the device is done before the host has the next step ready, that time."""
    least = costs.host.value + streams * costs.sequence.value + costs.step.value
    return parts | {"waiting for the host": max(0.0, least - sum(parts.values()))}


def _target_parts(case: Case, costs: Costs, streams: int, rows: float) -> dict[str, float]:
    """Return the parts of a step with `rows` tokens, the drafter's and the host's time left out."""
    g, p, work = case.geometry, case.placement, case.workload.bent(costs.skew.value)
    dense_rate = (costs.dram_rate.value if case.on_cpu else costs.gpu_rate.value * costs.dense_share.value) * p.ranks
    parts = {
        "engine": costs.step.value + g.layers * costs.layer.value,
        "reductions": 2 * g.layers * costs.reduce.value if p.ranks > 1 else 0.0,
        "dense weights": g.parts.read_each_step / dense_rate,
        "context": streams * _context(case, costs),
    }
    parts |= _cpu_experts(case, costs, work, rows) if case.on_cpu else _device_experts(case, costs, work, rows)
    cold, any_cold = work.missed(p.covered, rows), work.any_missed(p.covered, rows)
    parts["experts from disk"] = g.moe_layers * (
        cold * g.record_bytes / costs.disk_rate.value + any_cold * costs.read.value
    )
    return parts


def _device_experts(case: Case, costs: Costs, work: Workload, rows: float) -> dict[str, float]:
    """Experts in slots, and what the missed ones take beyond the time that the device needs for its own.

    With several ranks nothing counts as streamed in decode: published rows of four cards are as if none were, and ours
    were not measured. What is copied into slots after a step is read out of the DRAM that the next step's misses need.
    """
    g, p = case.geometry, case.placement
    chances = work.miss_chances(p.slots, rows)
    device = device_seconds(g, costs, work.held(p.slots), rows, p.ranks)
    likely, split = distribution(chances), _split(case, costs, work, rows, device)
    if p.ranks == 1 and rows > PLANNED:
        times = split.all_streamed(likely.size - 1)
    else:
        times = split.seconds(likely.size - 1, STAGED if p.ranks == 1 else 0)
    beyond = float((likely * (times - device)).sum())
    fills = min(FILLS, g.moe_layers * float(chances.sum()))
    return {
        "experts in slots": g.moe_layers * device,
        "handover": g.moe_layers * float(1 - likely[0]) * costs.miss.value,
        "missed experts": g.moe_layers * beyond,
        "fills of slots": fills * g.record_bytes / costs.dram_rate.value,
    }


def _cpu_experts(case: Case, costs: Costs, work: Workload, rows: float) -> dict[str, float]:
    """All routed experts, where there is no device."""
    likely = distribution(work.miss_chances(0, rows))
    times = _split(case, costs, work, rows, 0.0).seconds(likely.size - 1, staged=0)
    return {"experts on the CPU": case.geometry.moe_layers * float((likely * times).sum())}


def _split(case: Case, costs: Costs, work: Workload, rows: float, device: float) -> Split:
    """Return what one missed record costs by each way; with several tokens an expert, arithmetic may bound the CPU.

    device: seconds of a layer's experts in slots.
    """
    g, p = case.geometry, case.placement
    pairs = rows * work.top_k * (1 - work.hit_rate(p.slots)) / max(work.missed(p.slots, rows), 1e-9)
    ops = max(pairs, 1.0) * 6 * g.hidden * g.intermediate / costs.cpu_ops.value
    streamed = 0.0 if case.on_cpu else record_seconds(g, costs, pairs, rows, p.ranks)
    return Split(
        device,
        costs.cpu_call.value,
        max(g.record_bytes / costs.cpu_rate.value, ops),
        g.record_bytes / costs.link_rate.value,
        g.record_bytes / (costs.dram_rate.value * costs.together.value),
        min(costs.slowed.value, 0.9),
        streamed,
    )


def _context(case: Case, costs: Costs) -> float:
    """Attention over the context of one sequence."""
    g, p = case.geometry, case.placement
    depth = min(case.workload.depth, p.wanted.context)
    rate = costs.dram_rate.value if case.on_cpu else costs.gpu_rate.value
    if g.kv.sparse:
        return depth * g.kv.scan_bytes_per_token / (rate * costs.scan_share.value)
    return depth * g.kv.formats[p.kv_format].bytes_per_token / min(p.ranks, g.kv.heads) / (rate * costs.kv_share.value)


def decode_rate(case: Case, costs: Costs, streams: int = 1) -> float:
    """Tokens a second of all streams together."""
    if case.draft is None:
        return streams / sum(decode_parts(case, costs, streams).values())
    return streams * case.draft.accepted / sum(draft_parts(case, costs, streams, case.draft).values())


def draft_parts(case: Case, costs: Costs, streams: int, draft: Draft) -> dict[str, float]:
    """A step that verifies drafted tokens, and the drafter's own: its layers, each once for the whole block (DSpark) or
    once a token (MTP). Its experts are on the device or, without one, in DRAM.
    """
    g, p = case.geometry, case.placement
    parts = _target_parts(case, costs, streams, float(streams * (1 + draft.tokens)))
    if g.drafter is None:
        return _with_host(parts, costs, streams)
    passes = 1 if g.drafter.kind == "dspark" else draft.tokens
    layers = g.drafter.layers * passes
    rate = costs.dram_rate.value if case.on_cpu else costs.gpu_rate.value * costs.one_share.value
    picked = min(g.drafter.experts, g.drafter.top_k * streams) * g.record_bytes if g.drafter.experts else 0
    reads = passes * (g.parts.drafter + g.parts.head) + layers * picked
    reduced = 2 * layers * costs.reduce.value if p.ranks > 1 else 0.0
    drafter = layers * costs.layer.value + reduced + reads / (rate * p.ranks)
    return _with_host(parts | {"drafter": drafter}, costs, streams)


def chunk_parts(case: Case, costs: Costs, tokens: int, before: int = 0) -> dict[str, float]:
    """Seconds of one step with `tokens` of a prompt behind `before` others, by tier; they overlap."""
    g, p, work = case.geometry, case.placement, case.workload.prompts.bent(costs.skew.value)
    dense = tokens * g.parts.read_each_step + 2 * g.kv.pair_ops(
        tokens, before
    )  # a byte: half a bf16 or an fp8 at twice
    missed = work.missed(p.slots, tokens) * g.moe_layers * g.record_bytes
    cold = work.missed(p.covered, tokens) * g.moe_layers * g.record_bytes
    if case.on_cpu:
        experts = tokens * g.moe_layers * g.top_k * 6 * g.hidden * g.intermediate
        arithmetic = max((experts + dense) / costs.cpu_ops.value, missed / costs.dram_rate.value)
        return {"arithmetic": arithmetic, "link": 0.0, "disk": cold / costs.disk_rate.value}
    on_device = g.moe_layers * device_seconds(g, costs, work.chances, tokens, p.ranks)
    return {
        "launching": g.layers * costs.launch.value,
        "arithmetic": on_device + dense / (costs.dense_ops_share.value * costs.gpu_ops.value * p.ranks),
        "link": missed / min(costs.link_rate.value * p.ranks, costs.dram_rate.value),
        "disk": cold / costs.disk_rate.value,
    }


def chunk_seconds(case: Case, costs: Costs, tokens: int, before: int = 0) -> float:
    """The slower of arithmetic and tiers, what does not hide behind the other, and the engine's own; or launching."""
    parts = chunk_parts(case, costs, tokens, before)
    moved = max(parts["link"], parts["disk"]) + (1 - costs.overlap.value) * min(parts["link"], parts["disk"])
    reduced = 2 * costs.reduce.value if case.placement.ranks > 1 else 0.0
    beside: float = (parts["arithmetic"] ** EVEN + moved**EVEN) ** (1 / EVEN)
    device = beside + case.geometry.layers * (costs.layer.value + reduced)
    return costs.step.value + max(device, parts.get("launching", 0.0))


def ttft(case: Case, costs: Costs, prompt: int) -> float:
    """Seconds to the first token of a prompt that nothing of is cached."""
    chunk = case.placement.wanted.chunk
    whole, rest = divmod(prompt, chunk)
    total = chunk_seconds(case, costs, rest, whole * chunk) if rest else 0.0
    looked = min(whole, MOST_CHUNKS)
    for index in range(looked):
        middle = (index + 0.5) * whole / looked - 0.5
        total += whole / looked * chunk_seconds(case, costs, chunk, int(middle * chunk))
    return total


def start_seconds(case: Case, costs: Costs) -> float:
    """From the command to the first answer: the engine's own, and what is read from disk."""
    p = case.placement
    read = case.geometry.parts.resident + p.dram_records * case.geometry.moe_layers * case.geometry.record_bytes
    read += p.slots * case.geometry.moe_layers * case.geometry.record_bytes if p.slots > p.dram_records else 0
    read += case.geometry.parts.tables if p.tables == "dram" else 0
    return costs.start.value + read / costs.disk_rate.value


def metrics(case: Case, costs: Costs, streams: int = 1) -> dict[str, float]:
    """Every predicted number by name."""
    alone = replace(case, draft=None)
    found = {
        "decode_tok_s": decode_rate(case, costs),
        "decode_streams_tok_s": decode_rate(case, costs, streams),
        "decode_no_draft_tok_s": decode_rate(alone, costs),
    }
    chunk = case.placement.wanted.chunk
    found["prefill_tok_s"] = chunk / chunk_seconds(case, costs, chunk, chunk)
    found |= {name: ttft(case, costs, tokens) for name, tokens in TTFT.items() if tokens <= case.geometry.max_context}
    return found | {"start_s": start_seconds(case, costs)}


def band(case: Case, costs: Costs, streams: int = 1) -> dict[str, tuple[float, float, float]]:
    """(value, low, high) of each metric: every cost moved by its spread, and FORM, as squares of logarithms."""
    middle = metrics(case, costs, streams)
    form = math.log(1 + FORM) ** 2
    up, down = dict.fromkeys(middle, form), dict.fromkeys(middle, form)
    for name, known in costs.items():
        if known.spread == 0:
            continue
        moved = [metrics(case, costs.scaled({name: f}), streams) for f in (1 + known.spread, 1 / (1 + known.spread))]
        for metric, value in middle.items():
            logs = [math.log(other[metric] / value) for other in moved]
            up[metric] += max(0.0, *logs) ** 2
            down[metric] += min(0.0, *logs) ** 2
    return {
        metric: (value, value * math.exp(-math.sqrt(down[metric])), value * math.exp(math.sqrt(up[metric])))
        for metric, value in middle.items()
    }
