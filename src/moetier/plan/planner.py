"""The plan: a placement, what it will do, how sure that is, and what another choice would change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moetier.budget import GIB
from moetier.decision.support import check, devices_of
from moetier.machine.facts import Machine, Support
from moetier.plan import workload as workloads
from moetier.plan.calibration import Calibration
from moetier.plan.costs import Costs, Engine, costs_of, engine_named
from moetier.plan.geometry import Geometry
from moetier.plan.hardware import Hardware, hardware_of
from moetier.plan.placement import Placement, Wanted, kv_bytes, nearest, place
from moetier.plan.predict import Case, Draft, band, decode_rate

OVERHEAD_SPREAD = 0.35
"""Spread of what processes take beside weights, records and KV cache: most of it is assumed or from one machine."""
TRACED_SPREAD, FOREIGN_SPREAD = 0.04, 0.16
"""Spread of a curve's skew: of a trace of the traffic itself; of another model (twice that of its own)."""
RECORD_SPREAD = 0.03
"""Spread of records in DRAM: pages of tables, alignment, pinning."""
OVERHEADS = ("processes", "rank", "workspace", "staging", "context and graphs", "rows of tables")


@dataclass(frozen=True)
class Question:
    """A question to the planner."""

    geometry: Geometry
    machine: Machine
    wanted: Wanted
    workload: str = workloads.DEFAULT
    engine: str | None = None
    draft: Draft | None = None
    calibration: Calibration | None = None
    vllm: str | None = None
    """Version for the support check; None: the installed one is not known."""


@dataclass(frozen=True)
class Exchange:
    """One slot of each layer more or less, in tokens of context and in tokens a second."""

    context_tokens: int
    decode_tok_s: float


@dataclass(frozen=True)
class Other:
    """One other choice: a KV format or a workload, all else as asked."""

    slots: int
    decode_tok_s: float


@dataclass(frozen=True)
class Plan:
    """The answer. Where something does not fit, `nearest` is a plan that does, or None if nothing does."""

    question: Question
    hardware: Hardware
    engine: Engine
    costs: Costs
    case: Case
    metrics: dict[str, tuple[float, float, float]]
    """Value, low and high."""
    support: tuple[Support, ...]
    exchange: Exchange | None
    kv_formats: dict[str, Other]
    workloads: dict[str, Other]
    nearest: Plan | None

    @property
    def placement(self) -> Placement:
        return self.case.placement

    @property
    def fits(self) -> bool:
        return not self.placement.problems


def make_plan(question: Question) -> Plan:
    """Answer; SettingsError where the question cannot be understood. What does not fit is part of the answer."""
    g = question.geometry
    hardware = hardware_of(question.machine, g.record)
    engine = engine_named(question.engine, hardware)
    costs = costs_of(hardware, engine)
    if question.calibration is not None:
        costs = question.calibration.apply(costs)
    work = workloads.of(question.workload, g)
    costs = _with_skew(costs, work, g)
    placement = place(g, hardware, question.wanted)
    case = Case(g, hardware, placement, work, question.draft)
    metrics = _sizes(case) | band(case, costs, question.wanted.streams)
    other = None
    if placement.problems and (fitting := nearest(g, hardware, question.wanted)) is not None:
        other = make_plan(replace(question, wanted=fitting.wanted))
    support = tuple(
        check(g.model_type, question.vllm, device) for device in dict.fromkeys(devices_of(question.machine.gpus))
    )
    formats = {
        name: _other(replace(case, placement=place(g, hardware, replace(question.wanted, kv_format=name))), costs)
        for name in g.kv.formats
    }
    named = {name: _other(replace(case, workload=workloads.of(name, g)), costs) for name in workloads.NAMED}
    exchange = exchange_of(case, costs)
    return Plan(question, hardware, engine, costs, case, metrics, support, exchange, formats, named, other)


def _with_skew(costs: Costs, work: workloads.Workload, geometry: Geometry) -> Costs:
    """How sure the workload's curve is: a trace's more, that of another model less."""
    if work.trace is not None:
        return costs.scaled({"skew": 1.0}, "counted in a trace", TRACED_SPREAD)
    if geometry.model_type != workloads.PUBLISHED_FOR:
        return costs.scaled({"skew": 1.0}, "assumed: another model's curve", FOREIGN_SPREAD)
    return costs


def _other(case: Case, costs: Costs) -> Other:
    return Other(case.placement.slots, decode_rate(case, costs))


def _sizes(case: Case) -> dict[str, tuple[float, float, float]]:
    """Footprints and what is decided, with what the uncertain parts of the footprint leave open."""
    p, g = case.placement, case.geometry
    host, device = _footprint(p.host), _footprint(p.device)
    uncertain = sum(size for part, size in p.device.items() if _is_overhead(part)) * OVERHEAD_SPREAD
    slots = uncertain / (g.moe_layers * g.record_bytes / p.ranks) if case.hardware.gpus else 0.0
    auto = p.wanted.slots is None and case.hardware.gpus > 0
    fewer, more = (max(0.0, p.slots - slots), min(float(g.experts), p.slots + slots)) if auto else (p.slots, p.slots)
    records = 0.0
    if p.wanted.dram_records is None:
        free = sum(size for part, size in p.host.items() if _is_overhead(part)) * OVERHEAD_SPREAD
        records = free / (g.moe_layers * g.record_bytes)
    most = g.experts - p.residents
    fewest = max(0.0, p.dram_records - records) if p.dram_records < most else float(p.dram_records)
    return {
        "host_gib": host,
        "device_gib": device if not auto else (device[0], device[0], device[0]),
        "slots_per_layer": (p.slots, round(fewer), round(more)),
        "dram_records": (p.dram_records, round(fewest), round(min(most, p.dram_records + records))),
    }


def _footprint(parts: dict[str, int]) -> tuple[float, float, float]:
    """GiB; overheads and records are each off in their own way."""
    whole = sum(parts.values())
    overhead = sum(size for part, size in parts.items() if _is_overhead(part)) * OVERHEAD_SPREAD
    off = (overhead**2 + (parts.get("expert records", 0) * RECORD_SPREAD) ** 2) ** 0.5
    return whole / GIB, (whole - off) / GIB, (whole + off) / GIB


def _is_overhead(part: str) -> bool:
    return any(word in part for word in OVERHEADS)


def exchange_of(case: Case, costs: Costs) -> Exchange | None:
    """Return what a slot more costs in context and brings in speed; None without slots to trade."""
    g, p = case.geometry, case.placement
    if not case.hardware.gpus or not 0 < p.slots < g.experts:
        return None
    slot = g.moe_layers * g.record_bytes / p.ranks
    token = (kv_bytes(g, p.kv_format, p.ranks, 1 << 20, 1) - kv_bytes(g, p.kv_format, p.ranks, 0, 1)) / (1 << 20)
    if token <= 0:
        return None
    more, fewer = (replace(case, placement=replace(p, slots=p.slots + one)) for one in (1, -1))
    gain = (decode_rate(more, costs) - decode_rate(fewer, costs)) / 2
    return Exchange(round(slot / token / p.wanted.streams), gain)


def to_json(plan: Plan) -> dict[str, Any]:
    """Plain values: each metric with value, low and high; then what it rests on."""
    q, p = plan.question, plan.placement
    work = plan.case.workload
    return {
        "model": q.geometry.name,
        "fits": plan.fits,
        "problems": list(p.problems),
        **{name: {"value": v, "low": low, "high": high} for name, (v, low, high) in plan.metrics.items()},
        "workload": {"name": work.name, "source": work.source, "hit_rate": work.hit_rate(p.slots), "depth": work.depth},
        "placement": {
            "ranks": p.ranks,
            "context": p.wanted.context,
            "streams": p.wanted.streams,
            "chunk": p.wanted.chunk,
            "kv_format": p.kv_format,
            "kv_bytes_per_token": q.geometry.kv.formats[p.kv_format].bytes_per_token,
            "tables": p.tables if q.geometry.parts.tables else None,
            "residents": p.residents,
            "device_bytes": p.device,
            "device_limit_bytes": p.device_limit if plan.hardware.gpus else 0,
            "host_bytes": p.host,
            "host_limit_bytes": p.host_limit,
            "disk_bytes": p.disk,
        },
        "exchange": None
        if plan.exchange is None
        else {
            "one_slot_is_context_tokens": plan.exchange.context_tokens,
            "one_slot_is_decode_tok_s": plan.exchange.decode_tok_s,
        },
        "kv_formats": {
            name: {"bytes_per_token": size.bytes_per_token, "slots": other.slots, "decode_tok_s": other.decode_tok_s}
            for (name, size), other in zip(q.geometry.kv.formats.items(), plan.kv_formats.values(), strict=True)
        },
        "decode_tok_s_by_workload": {name: other.decode_tok_s for name, other in plan.workloads.items()},
        "engine": {"name": plan.engine.name, "source": plan.engine.source},
        "costs": {name: {"value": k.value, "spread": k.spread, "source": k.why} for name, k in plan.costs.items()},
        "calibration": None if q.calibration is None else q.calibration.model_dump(mode="json"),
        "geometry": {
            "source": q.geometry.source,
            "assumed": list(q.geometry.assumed),
            "unclassified": list(q.geometry.unclassified),
            "parts": q.geometry.parts.model_dump(),
            "record_bytes": q.geometry.record_bytes,
            "expert_format": q.geometry.expert_format,
        },
        "support": [support.model_dump(mode="json") for support in plan.support],
        "nearest": None if plan.nearest is None else to_json(plan.nearest),
    }
