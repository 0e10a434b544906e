"""A server of 6 layers of Qwen3-235B's sizes under vLLM (benchmarks/hybrid/under_vllm.py speed), as planned."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from rows import DEPTH, Compared, Rows, row_of, seconds, with_rates

from moetier.budget import GIB
from moetier.plan import catalog
from moetier.plan.costs import Costs, costs_of, engine_named
from moetier.plan.geometry import Geometry, KvFormat, Parts
from moetier.plan.hardware import Hardware, Known
from moetier.plan.placement import Wanted, place
from moetier.plan.predict import Case, chunk_seconds
from moetier.plan.workload import DEFAULT, Workload

VOCABULARY, STREAMS, KV_BYTES, CHUNK = 8192, (1, 4, 8), 4 * GIB, 8192
"""As there: of the model, and sequences at once."""


def evenly(geometry: Geometry, slots: int, missed: float, rows: int) -> Workload:
    """Routing that misses `missed` distinct experts of a layer in a step of `rows` tokens, each as likely."""
    absent = geometry.experts - slots
    chance = 1 - (1 - min(missed / absent, 1.0)) ** (1 / rows) if absent else 0.0
    held = max(geometry.top_k - absent * chance, 0.0) / max(slots, 1)
    chances = np.r_[np.full(slots, held), np.full(absent, chance)]
    return Workload("counted", f"{missed:.2f} missed experts a layer", chances, DEPTH)


def short_qwen3(layers: int) -> Geometry:
    """As benchmarks/hybrid/qwen3.py makes it: few layers, a small vocabulary."""
    whole = catalog.bundled("qwen3-235b")
    parts = {
        name: size * (VOCABULARY / 151_936 if name in ("embedding", "head") else layers / whole.layers)
        for name, size in whole.parts.model_dump().items()
    }
    share = layers / whole.layers
    row = whole.kv.formats["bf16"].bytes_per_token * share
    kv = {"formats": {"bf16": KvFormat(bytes_per_token=row)}, "pair_macs": round(whole.kv.pair_macs * share)}
    return whole.model_copy(
        update={
            "kv": whole.kv.model_copy(update=kv),
            "name": f"{layers} layers of Qwen3-235B",
            "layers": layers,
            "moe_layers": layers,
            "parts": Parts(**{name: int(size) for name, size in parts.items()}),
        }
    )


def of_engine(costs: Costs, measured: dict[str, float] | None) -> Costs:
    """With what the server itself measured of a miss at its start, instead of the doctor's rates."""
    if not measured or not measured["cpu_expert"]:
        return costs  # nothing can be missed
    return with_rates(costs, short_qwen3(1).record_bytes, measured)


def of_memory(row: dict[str, Any], geometry: Geometry, hardware: Hardware) -> Compared:
    """Of the device after start; the benchmark's KV cache instead of the planned one."""
    wanted = Wanted(context=DEPTH, slots=row["slots"], chunk=CHUNK)
    parts = place(geometry, hardware, wanted).device | {"KV cache": KV_BYTES}
    listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    return Compared(f"{row['what']}, memory", row["device_GiB"], sum(parts.values()) / GIB, "GiB", listed)


def of_prefill(row: dict[str, Any], geometry: Geometry, hardware: Hardware, costs: Costs, slots: int) -> Compared:
    """One prompt of CHUNK tokens in one step, which routes to every expert."""
    wanted = Wanted(context=CHUNK, slots=slots, dram_records=geometry.experts, chunk=CHUNK)
    even = np.full(geometry.experts, geometry.top_k / geometry.experts)
    case = Case(geometry, hardware, place(geometry, hardware, wanted), Workload(DEFAULT, "every expert", even, CHUNK))
    predicted = CHUNK / chunk_seconds(case, of_engine(costs, row.get("costs")), CHUNK)
    return Compared(f"{row['what']}, prefill", row["prefill_tok_s"], predicted, "tok/s")


def under_vllm(rows: Rows, hardware: Hardware, layers: int) -> Iterator[Compared]:
    geometry = short_qwen3(next((row["layers"] for row in rows if "layers" in row), layers))
    costs = costs_of(hardware, engine_named(None, hardware))
    cells = [row for row in rows if row.get("decode_1_tok_s")]
    full = row_of(
        rows,
        lambda row: row["what"].startswith("100%") and "decode_1_tok_s" in row,
        "--vllm",
        "speeds with 100% in slots",
    )
    everything = evenly(geometry, geometry.experts, 0.0, 1)
    sequence, step = costs.sequence.value, costs.step.value
    host = statistics.median(streams * (1 / full[f"decode_{streams}_tok_s"] - sequence) for streams in STREAMS) - step
    yield Compared("the host's time of a step", host * 1e6, costs.host.value * 1e6, "us", "profile")
    costs = replace(costs, host=Known(host, 0.05, "all experts in slots"))
    for row in cells:
        if "device_GiB" in row:
            yield of_memory(row, geometry, hardware)
        slots = row.get("slots", round(float(row["what"].partition("%")[0]) / 100 * geometry.experts))
        yield of_prefill(row, geometry, hardware, costs, slots)
        for streams in STREAMS:
            measured, what = row[f"decode_{streams}_tok_s"], f"{row['what']}, {streams} streams"
            if slots == geometry.experts:
                took = seconds(geometry, hardware, costs, slots, everything, streams)
                yield Compared(what, measured, streams / took, "tok/s", "gave the host's time")
                continue
            even = 1 - (1 - geometry.top_k / geometry.experts) ** streams
            works = {"uniform routing": evenly(geometry, slots, even * (geometry.experts - slots), streams)}
            counted = row.get("counted", {}).get(str(streams), {}).get("misses")
            if counted is not None:
                works["misses as counted"] = evenly(geometry, slots, counted, streams)
            for name, work in works.items():
                for whose, known in (("doctor's rates", costs), ("server's rates", of_engine(costs, row.get("costs")))):
                    took = seconds(geometry, hardware, known, slots, work, streams)
                    note = f"{name}, {work.missed(slots, streams):.1f} a layer; {whose}"
                    yield Compared(what, measured, streams / took, "tok/s", note)
