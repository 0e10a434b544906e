"""A plan in words: a few lines, and on demand where each number comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from moetier.budget import GIB
from moetier.plan.costs import Engine
from moetier.plan.hardware import NO_GPU
from moetier.plan.planner import Plan
from moetier.plan.predict import chunk_parts, decode_parts, draft_parts
from moetier.plan.workload import PUBLISHED_FOR

LABELS = {
    "decode_tok_s": "decode, one stream",
    "decode_streams_tok_s": "decode, all streams",
    "prefill_tok_s": "prefill",
    "ttft_2k_s": "first token after 2K",
    "ttft_16k_s": "first token after 16K",
    "ttft_128k_s": "first token after 128K",
    "start_s": "start",
}


def unit_of(name: str) -> str:
    """Return the unit of a metric in LABELS."""
    return "tokens/s" if name.endswith("tok_s") else "s"


NAMES = {
    **{name: f"{label} ({unit_of(name)})" for name, label in LABELS.items()},
    "host_gib": "host GiB",
    "device_gib": "device GiB",
    "slots_per_layer": "slots of a layer",
    "dram_records": "experts of a layer in DRAM",
}
SECONDS = {field.name for field in fields(Engine)} | {"cpu_call", "begin", "one", "few", "miss", "read"}
"""Costs that are times: an engine's, and some of the machine's and our kernels'."""


def number(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def lines(plan: Plan) -> Iterator[str]:
    """The plan itself."""
    q, p, work = plan.question, plan.placement, plan.case.workload
    machine = f"{plan.hardware.gpus} x {plan.hardware.gpu_name}" if plan.hardware.gpus else "no GPU"
    yield f"{q.geometry.name} on {machine}, {plan.hardware.ram_bytes / GIB:.0f} GiB of RAM"
    for problem in p.problems:
        yield f"does not fit: {problem}"
    yield from _where(plan)
    yield ""
    yield f"predicted for the workload {work.name} ({work.source})"
    if work.trace is None and q.geometry.model_type != PUBLISHED_FOR:
        yield "  (a curve of another model, assumed for this one: record a trace of yours for better numbers)"
    hit = f"{work.hit_rate(p.slots):.0%} of the experts that a token asks for have a slot; " if p.slots else ""
    yield f"  {hit}decode behind {min(work.depth, p.wanted.context):,} tokens; engine {plan.engine.name}"
    for name, label in LABELS.items():
        if name not in plan.metrics or (name == "decode_streams_tok_s" and p.wanted.streams == 1):
            continue
        value, low, high = plan.metrics[name]
        unit = unit_of(name)
        yield f"  {label:24} {number(value):>10} {unit:9} ({number(low)} to {number(high)})"
    if q.draft is not None:
        value, low, high = plan.metrics["decode_no_draft_tok_s"]
        yield f"  {'without the draft':24} {number(value):>10} {'tokens/s':9} ({number(low)} to {number(high)})"
    if plan.exchange is not None:
        yield (
            f"one slot of each layer is worth {plan.exchange.context_tokens:,} tokens of context and "
            f"{plan.exchange.decode_tok_s:+.2g} tokens/s"
        )
    others = ", ".join(f"{name} {number(other.decode_tok_s)}" for name, other in plan.workloads.items())
    yield f"decode by workload: {others} tokens/s"
    if plan.hardware.gpus:
        others = ", ".join(f"{name} {other.slots}" for name, other in plan.kv_formats.items())
        yield f"slots by KV format: {others}"
    if q.geometry.expert_format != "mxfp4":
        lossy = "re-quantized to MXFP4 in the store, which is lossy (docs/store.md)"
        yield f"experts are {q.geometry.expert_format}: {lossy}"
    yield from (f"support: {support}" for support in plan.support)
    yield from (f"assumed of the model: {fact}" for fact in q.geometry.assumed)
    if q.geometry.unclassified:
        yield (
            f"not classified, counted as dense: {q.geometry.parts.unclassified / GIB:.2f} GiB, such as "
            + ", ".join(q.geometry.unclassified)
        )
    if plan.nearest is not None:
        yield ""
        yield "the nearest settings that fit: " + settings_text(plan.nearest)
        yield from (f"  {line}" for line in lines(plan.nearest))
    elif not plan.fits:
        yield "no settings of this model fit this machine"


def settings_text(plan: Plan) -> str:
    """The options that give this plan."""
    p = plan.placement
    text = f"--dram-records {p.dram_records} --context {p.wanted.context} --streams {p.wanted.streams}"
    text += f" --kv-format {p.kv_format} --chunk {p.wanted.chunk}"
    return text + (f" --slots {p.slots}" if plan.hardware.gpus else "")


def _where(plan: Plan) -> Iterator[str]:
    p, experts = plan.placement, plan.question.geometry.experts
    if plan.hardware.gpus:
        each = f"each of {p.ranks} devices" if p.ranks > 1 else "device"
        if p.ranks < plan.hardware.gpus:
            each += f" ({plan.hardware.gpus - p.ranks} left over: records are cut in powers of two of whole blocks)"
        yield f"{each}: {p.device_bytes / GIB:.1f} of {p.device_limit / GIB:.1f} GiB: " + _listed(p.device)
        yield f"  {p.slots} of {experts} experts of each layer in slots"
    yield f"host: {p.host_bytes / GIB:.0f} of {p.host_limit / GIB:.0f} GiB: " + _listed(p.host)
    yield f"  {p.dram_records} of {experts} experts of each layer in DRAM"
    yield f"disk: {sum(p.disk.values()) / GIB:.0f} GiB: " + _listed(p.disk)


def _listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number(size / GIB)}" for name, size in parts.items())


def explanation(plan: Plan) -> Iterator[str]:
    """The model behind each number: seconds by part, and every cost with its source and spread."""
    p, case, costs = plan.placement, plan.case, plan.costs
    g = plan.question.geometry
    yield f"model: {g.source}; experts {g.expert_format}"
    yield f"  checkpoint {g.parts.total / GIB:.1f} GiB: " + _listed(
        {k: v for k, v in g.parts.model_dump().items() if v}
    )
    yield f"  record {g.record_bytes:,} bytes; KV " + ", ".join(
        f"{name} {size.bytes_per_token:,.0f} bytes a token" for name, size in g.kv.formats.items()
    )
    step = decode_parts(case, costs) if case.draft is None else draft_parts(case, costs, 1, case.draft)
    yield f"one decode step, {sum(step.values()) * 1e3:.2f} ms:"
    for name, seconds in step.items():
        yield f"  {name:20} {seconds * 1e3:8.3f} ms"
    work = case.workload.bent(costs.skew.value)
    yield (
        f"  a layer misses {work.missed(p.slots, 1):.2f} of {work.top_k:.0f} experts "
        f"({work.any_missed(p.slots, 1):.0%} of layers miss one), {work.missed(p.covered, 1):.2f} come from disk"
    )
    yield f"one step with {p.wanted.chunk:,} tokens of a prompt: the slowest of"
    for name, seconds in chunk_parts(case, costs, p.wanted.chunk, 0).items():
        yield f"  {name:20} {seconds * 1e3:8.0f} ms"
    yield "costs (relative spread, source); each moves low and high by its effect, added as squares:"
    for name, known in costs.items():
        if known.why == NO_GPU:
            continue  # what stands in is no rate of anything
        yield f"  {name:15} {_amount(name, known.value):>12}  +-{known.spread:4.0%}  {known.why}"


def _amount(name: str, value: float) -> str:
    """A cost with its unit; shares and counts have none."""
    if name.endswith("_rate"):
        return f"{value / 1e9:.4g} GB/s"
    if name in ("gpu_ops", "cpu_ops"):
        return f"{value / 1e12:.4g} TOP/s"
    if name not in SECONDS or value == 0:
        return f"{value:.4g}"
    return f"{value * 1e6:.4g} us" if value < 1e-3 else f"{value * 1e3:.4g} ms" if value < 1 else f"{value:.4g} s"


def compared(first: Plan, second: Plan, names: tuple[str, str]) -> Iterator[str]:
    """Two plans side by side."""
    yield f"{'':24} {names[0]:>14} {names[1]:>14}  ratio"
    for name in first.metrics:
        if name in second.metrics:
            a, b = first.metrics[name][0], second.metrics[name][0]
            yield f"{name:24} {a:14.4g} {b:14.4g}  " + (f"{b / a:.2f}" if a else "")


def change(plan: Plan, other: Plan) -> Iterator[str]:
    """Yield what differs from `plan` in `other`, as of an override; one speed of decode where there is but one."""
    wanted = other.placement.wanted
    same = {"decode_streams_tok_s"} if wanted.streams == 1 else set()
    same |= set() if wanted.draft else {"decode_no_draft_tok_s"}
    for name, (value, _, _) in other.metrics.items():
        before = plan.metrics.get(name, (value, 0, 0))[0]
        if name not in same and before and abs(value / before - 1) > 0.005:
            yield f"{NAMES.get(name, name)} {number(before)} -> {number(value)} ({value / before - 1:+.0%})"
