"""What the planner is compared by: rows of a benchmark's JSON, and the seconds of a step with the misses of a row."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moetier.errors import MoetierError
from moetier.plan.costs import Costs
from moetier.plan.geometry import Geometry
from moetier.plan.hardware import Hardware, Known
from moetier.plan.placement import Wanted, place
from moetier.plan.predict import Case, decode_parts
from moetier.plan.workload import Workload

DEPTH = 64
"""Tokens of context on average, as in benchmarks/hybrid/under_vllm.py."""


@dataclass(frozen=True)
class Compared:
    """One figure; unit: tok/s, us or GiB."""

    what: str
    measured: float
    predicted: float
    unit: str
    note: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


Rows = list[dict[str, Any]]


class Incomplete(MoetierError):
    """A file that lacks what it is compared by."""


def read_rows(path: Path, option: str) -> Rows:
    """What a benchmark wrote: a list of rows, each with "what"."""
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Incomplete(f"{option} {path}: expected the JSON of a benchmark, found {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "what" in row for row in rows):
        raise Incomplete(f"{option} {path}: expected a list of rows with 'what'; give the benchmark's own file")
    return rows


def row_of(rows: Rows, wanted: Callable[[dict[str, Any]], bool], option: str, what: str) -> dict[str, Any]:
    """The first such row."""
    for row in rows:
        if wanted(row):
            return row
    found = ", ".join(row["what"] for row in rows) or "nothing"
    raise Incomplete(f"{option}: expected {what}, found {found}. Was the run cut short? Take it again")


def trusted(rows: Rows, cpus: int) -> Rows:
    """Those that stand: with more threads than CPUs, only the rows in which the CPU computed nothing."""
    threads = next((row["threads"] for row in rows if "threads" in row), 0)
    if threads <= cpus:
        return rows
    kept = [row for row in rows if not row.get("cpu_us")]
    print(
        f"left out {len(rows) - len(kept)} rows in which the CPU computes: {threads} threads took turns on "
        f"{cpus} CPUs; take them again with fewer (--threads)",
        file=sys.stderr,
    )
    return kept


def seconds(
    geometry: Geometry, hardware: Hardware, costs: Costs, slots: int, work: Workload, rows: int, fills: bool = True
) -> float:
    """Of one step of decode. fills: whether there are spare slots that are filled meanwhile."""
    wanted = Wanted(context=min(2 * DEPTH, geometry.max_context), slots=slots, dram_records=geometry.experts)
    case = Case(geometry, hardware, place(geometry, hardware, wanted), work)
    parts = decode_parts(case, costs, rows)
    return sum(took for part, took in parts.items() if fills or part != "fills of slots")


def with_rates(costs: Costs, record: int, ns: Mapping[str, float]) -> Costs:
    """With what was measured of a miss by a server, or as one does, instead of the doctor's rates.

    ns: nanoseconds as in kernels.gpu.hybrid.Costs; dram_expert only where it was measured.
    """
    found = {"cpu_call": ns["cpu_call"] / 1e9, "cpu_rate": record / ns["cpu_expert"] * 1e9}
    found["link_rate"] = record / ns["stream_expert"] * 1e9
    if ns.get("dram_expert"):
        found["dram_rate"] = record / ns["dram_expert"] * 1e9
    if ns.get("cpu_expert_beside"):
        found["slowed"] = 1 - ns["cpu_expert"] / ns["cpu_expert_beside"]
    return replace(costs, **{name: Known(value, 0.05, "measured by the server") for name, value in found.items()})
