"""The planner beside our own measurements: what it gives for the very machine, shape and slots, and what was measured.

    python benchmarks/plan/against.py --machine DOCTOR.json [--vllm vllm-speed.json] [--stack hybrid.json]

DOCTOR.json: `moetier doctor --measure --json` of the machine; vllm-speed.json: `benchmarks/hybrid/under_vllm.py speed`;
hybrid.json: `benchmarks/hybrid/run.py`, whose layers are predicted without an engine. Of under_vllm's rows, those with
all experts in slots give the host's time of a step, the median of the three; nothing else is fitted.
Where $OUT names a folder, the table goes to plan.json there too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moetier.doctor.machine_file import read_machine
from moetier.errors import MoetierError
from moetier.formats import LayerGeometry
from moetier.plan import catalog
from moetier.plan.costs import Costs, costs_of, engine_named
from moetier.plan.geometry import Geometry, KvFormat, Parts
from moetier.plan.hardware import GIB, Hardware, Known, hardware_of
from moetier.plan.kv import stated
from moetier.plan.placement import Wanted, place
from moetier.plan.predict import Case, chunk_seconds, decode_parts
from moetier.plan.workload import DEFAULT, Workload

STACK = LayerGeometry(4096, 2048, 256, 6)
"""As in benchmarks/hybrid/stack.py."""
VOCABULARY, DEPTH, STREAMS = 8192, 64, (1, 4, 8)
"""As in benchmarks/hybrid/under_vllm.py: of the model, tokens of context on average, and sequences at once."""
KV_BYTES, CHUNK = 4 * GIB, 8192
DRAWS = 20_000


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


def evenly(geometry: Geometry, slots: int, missed: float, rows: int) -> Workload:
    """Routing that misses `missed` distinct experts of a layer in a step of `rows` tokens, each as likely."""
    absent = geometry.experts - slots
    chance = 1 - (1 - min(missed / absent, 1.0)) ** (1 / rows) if absent else 0.0
    held = (geometry.top_k - absent * chance) / max(slots, 1)
    chances = np.r_[np.full(slots, held), np.full(absent, chance)]
    return Workload("counted", f"{missed:.2f} missed experts a layer", chances, DEPTH)


# Under vLLM: 6 layers of Qwen3-235B's sizes.


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
    """With what the server itself measured of a miss at its start (nanoseconds), instead of the doctor's rates."""
    if not measured or not measured["cpu_expert"]:
        return costs  # nothing can be missed
    record = short_qwen3(1).record_bytes
    found = {"cpu_call": measured["cpu_call"] / 1e9, "cpu_rate": record / measured["cpu_expert"] * 1e9}
    found |= {
        "link_rate": record / measured["stream_expert"] * 1e9,
        "dram_rate": record / measured["dram_expert"] * 1e9,
    }
    return replace(costs, **{name: Known(value, 0.05, "measured by the server") for name, value in found.items()})


def of_memory(row: dict[str, Any], geometry: Geometry, hardware: Hardware) -> Compared:
    """Of the device after start; the benchmark's KV cache instead of the planned one."""
    wanted = Wanted(context=DEPTH, slots=row["slots"], chunk=CHUNK)
    parts = place(geometry, hardware, wanted).device | {"KV cache": KV_BYTES}
    listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    return Compared(f"{row['what']}, memory", row["device_GiB"], sum(parts.values()) / GIB, "GiB", listed)


def of_prefill(row: dict[str, Any], geometry: Geometry, hardware: Hardware, costs: Costs, slots: int) -> Compared:
    """One prompt of CHUNK tokens in one step, which routes to every expert."""
    wanted = Wanted(context=CHUNK, slots=slots, dram_records=geometry.experts, chunk=CHUNK)
    even = evenly(geometry, slots, geometry.experts - slots, CHUNK)
    case = Case(geometry, hardware, place(geometry, hardware, wanted), replace(even, name=DEFAULT))
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
    host = statistics.median(streams / full[f"decode_{streams}_tok_s"] for streams in STREAMS) - costs.step.value
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


# Without an engine: layers of V4-Flash's sizes in one graph.


def drawn(exponent: float = 1.0) -> np.ndarray:
    """Chances [E] of a token's experts where top-k is drawn without replacement by a Zipf law: counted in draws."""
    rng = np.random.default_rng(0)
    noise = -np.log(np.arange(1, STACK.experts + 1)) * exponent + rng.gumbel(size=(DRAWS, STACK.experts))
    picked = np.argpartition(-noise, STACK.top_k, axis=1)[:, : STACK.top_k]
    return np.sort(np.bincount(picked.ravel(), minlength=STACK.experts) / DRAWS)[::-1].copy()


def layer_costs(hardware: Hardware, machine: dict[str, Any], rows: Rows, doctors: bool) -> Costs:
    """No engine; rates of a miss by the doctor, or those that the plans were made from."""
    costs = costs_of(hardware, engine_named(None, hardware)).scaled({"layer": 0.0, "step": 0.0, "host": 0.0})
    if doctors:
        return costs
    used = next((row for row in rows if row["what"] == "costs of the plans"), machine)
    record = RECORD.record_bytes
    found = {"cpu_call": used["cpu_call_us"] / 1e6, "cpu_rate": record / used["cpu_expert_us"] * 1e6}
    found |= {"link_rate": record / used["stream_expert_us"] * 1e6, "dram_rate": record / used["dram_expert_us"] * 1e6}
    return replace(costs, **{name: Known(value, 0.05, "measured by the server") for name, value in found.items()})


RECORD = Geometry(
    name="a layer of V4-Flash's sizes", model_type="none", source="benchmarks/hybrid/stack.py", layers=1, moe_layers=1,
    hidden=STACK.hidden, intermediate=STACK.intermediate, experts=STACK.experts, top_k=STACK.top_k,
    max_context=1 << 16, parts=Parts(), kv=stated(1e-9),
)  # fmt: skip


def without_engine(rows: Rows, hardware: Hardware) -> Iterator[Compared]:
    machine = row_of(rows, lambda row: "dram_GB_s" in row, "--stack", "the row with rates of part `stack`")
    zipf = Workload("zipf", "as drawn", drawn(), 1)
    for doctors, whose in ((True, "doctor's rates"), (False, "server's rates")):
        costs = layer_costs(hardware, machine, rows, doctors)
        for row in rows:
            what = row["what"]
            if what in ("M=1, no miss", "M=1, one miss", "M=1, two misses"):
                slots, tokens = 64, 1
                misses = ("no", "one", "two").index(what.split()[1])
                chances = np.zeros(STACK.experts)
                chances[:slots], chances[slots : slots + misses] = (STACK.top_k - misses) / slots, 1.0
                work = Workload(what, "exactly", chances, 1)
            elif "% in slots, M=" in what and "misses" in row:
                slots, tokens = round(float(what.partition("%")[0]) / 100 * STACK.experts), int(what.partition("M=")[2])
                work = zipf
            else:
                continue
            only_cpu = what.startswith("M=1")  # those calls have nothing streamed
            known = costs.scaled({"link_rate": 1e-6}) if only_cpu else costs
            took = seconds(RECORD, hardware, known, slots, work, tokens, fills=False)
            note = f"{work.missed(slots, tokens):.1f} missed" + (f" ({row['misses']:.1f})" if "misses" in row else "")
            yield Compared(f"layer, {what}", row["us"], took * 1e6, "us", f"{note}; {whose}")


def compared(arguments: argparse.Namespace) -> list[Compared]:
    """Of the files named on the command line; MoetierError where one is not what it must be."""
    machine = read_machine(arguments.machine)
    hardware = hardware_of(machine, RECORD.record)
    if not hardware.gpus:
        raise Incomplete(f"{arguments.machine} has no GPU; it must be the machine that the runs were on")
    table: list[Compared] = []
    if arguments.vllm:
        table += under_vllm(read_rows(arguments.vllm, "--vllm"), hardware, arguments.layers)
    if arguments.stack:
        rows = trusted(read_rows(arguments.stack, "--stack"), machine.cpu.threads)
        table += without_engine(rows, hardware)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, required=True)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--stack", type=Path)
    parser.add_argument("--layers", type=int, default=6, help="of under_vllm's model, where its JSON does not say")
    arguments = parser.parse_args()
    if not (arguments.vllm or arguments.stack):
        parser.error("nothing to compare: give --vllm, --stack or both")
    try:
        table = compared(arguments)
    except (MoetierError, OSError) as error:
        parser.error(str(error))
    for row in table:
        figures = f"measured {row.measured:8.1f}  predicted {row.predicted:8.1f} {row.unit:5} {row.error:+5.0%}"
        print(f"{row.what:36} {figures}  {row.note}")
    for whose in ("doctor's rates", "server's rates"):
        errors = [abs(row.error) for row in table if row.note.endswith(whose) and "uniform" not in row.note]
        if errors:
            within = sum(error <= 0.10 for error in errors)
            middle, worst = statistics.median(errors), max(errors)
            print(f"{whose}: error {middle:.0%} (median), {worst:.0%} at worst, {within} of {len(errors)} within 10 %")
    if os.environ.get("OUT"):
        plain = [{**vars(row), "error": row.error} for row in table]
        Path(os.environ["OUT"], "plan.json").write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
