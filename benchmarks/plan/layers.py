"""Layers of V4-Flash's sizes in one graph (benchmarks/hybrid/run.py stack), as planned, without an engine."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
from rows import Compared, Rows, row_of, seconds, with_rates

from moetier.plan.catalog import layer_of
from moetier.plan.costs import COMMON, Costs, costs_of, engine_named
from moetier.plan.geometry import Geometry, Parts
from moetier.plan.hardware import Hardware
from moetier.plan.kv import stated
from moetier.plan.workload import Workload

STACK = layer_of("deepseek-v4-flash")
"""As in benchmarks/hybrid/stack.py."""
DRAWS = 20_000
EXACT = {"M=1, no miss": 0, "M=1, one miss": 1, "M=1, two misses": 2}
"""Calls of one token with so many misses, all computed by the CPU, over EXACT_SLOTS slots."""
EXACT_SLOTS = 64
RECORD = Geometry(
    name="a layer of V4-Flash's sizes", model_type="none", source="benchmarks/hybrid/stack.py", layers=1, moe_layers=1,
    hidden=STACK.hidden, intermediate=STACK.intermediate, experts=STACK.experts, top_k=STACK.top_k,
    max_context=1 << 16, parts=Parts(), kv=stated(1e-9),
)  # fmt: skip


def drawn(exponent: float = 1.0) -> np.ndarray:
    """Chances [E] of a token's experts where top-k is drawn without replacement by a Zipf law: counted in draws."""
    rng = np.random.default_rng(0)
    noise = -np.log(np.arange(1, STACK.experts + 1)) * exponent + rng.gumbel(size=(DRAWS, STACK.experts))
    picked = np.argpartition(-noise, STACK.top_k, axis=1)[:, : STACK.top_k]
    return np.sort(np.bincount(picked.ravel(), minlength=STACK.experts) / DRAWS)[::-1].copy()


def layer_costs(hardware: Hardware, rows: Rows, doctors: bool) -> Costs:
    """No engine; rates of a miss by the doctor, or those that the plans were made from."""
    costs = costs_of(hardware, engine_named(None, hardware)).scaled(
        {"layer": 0.0, "step": 0.0, "host": 0.0, "sequence": 0.0}
    )
    return costs if doctors else with_rates(costs, RECORD.record_bytes, plans_ns(rows))


def plans_ns(rows: Rows) -> dict[str, float]:
    """Nanoseconds that the plans of the run were made from."""
    machine = row_of(rows, lambda row: "dram_GB_s" in row, "--stack", "the row with rates of part `stack`")
    used = next((row for row in rows if row["what"] == "costs of the plans"), machine)
    return {name.removesuffix("_us"): us * 1e3 for name, us in used.items() if name.endswith("_us")}


def routing(row: dict[str, Any], zipf: Workload) -> tuple[Workload, int, int] | None:
    """How a row's calls were routed, slots, and tokens; None for a row of something else."""
    what = row["what"]
    if what in EXACT:
        misses, chances = EXACT[what], np.zeros(STACK.experts)
        chances[:EXACT_SLOTS] = (STACK.top_k - misses) / EXACT_SLOTS
        chances[EXACT_SLOTS : EXACT_SLOTS + misses] = 1.0
        return Workload(what, "exactly", chances, 1), EXACT_SLOTS, 1
    if "% in slots, M=" not in what or "misses" not in row:
        return None
    slots, tokens = round(float(what.partition("%")[0]) / 100 * STACK.experts), int(what.partition("M=")[2])
    return zipf.with_misses(slots, tokens, row["misses"]), slots, tokens


def without_engine(rows: Rows, hardware: Hardware) -> Iterator[Compared]:
    """Each row twice: by the doctor's rates, and by those of the run. Misses as they were counted."""
    zipf = Workload("zipf", "as drawn", drawn(), 1)
    for doctors, whose in ((True, "doctor's rates"), (False, "server's rates")):
        costs = layer_costs(hardware, rows, doctors)
        for row in rows:
            routed = routing(row, zipf)
            if routed is None:
                continue
            work, slots, tokens = routed
            known = costs.scaled({"link_rate": 1e-6}) if row["what"] in EXACT else costs  # nothing is streamed there
            took = seconds(RECORD, hardware, known, slots, work, tokens, fills=False)
            note = f"{work.missed(slots, tokens):.1f} missed; {whose}"
            yield Compared(f"layer, {row['what']}", row["us"], took * 1e6, "us", note)


def constants(rows: Rows) -> dict[str, dict[str, float]]:
    """What the run gives for costs that src/moetier/plan/costs.py has from another one, by their names there."""
    found: dict[str, float] = {}
    more = [row["more_us"] for row in rows if row["what"] == "M=1, no miss"]
    if more:
        found["begin"] = more[0] / 1e6
    ns, slowed = plans_ns(rows), []
    for row in rows:
        if row.get("streamed", 0) >= 1 and ns["cpu_expert"] and row["misses"] > row["streamed"] + 1:
            alone = ns["cpu_call"] + (row["misses"] - row["streamed"]) * ns["cpu_expert"]
            slowed.append((row["cpu_us"] * 1e3 - alone) / (row["streamed"] * ns["stream_expert"]))
    if slowed:
        found["slowed"] = statistics.median(slowed)
    return {name: {"this run": value, "costs.py": COMMON[name].value} for name, value in found.items()}
