"""The hybrid step under vLLM: identity of every tier with a trained model, a soak, and speed with one of a real shape.

    python benchmarks/hybrid/under_vllm.py identity MODEL [--graphs none,decode,pieces,all] [--at-once 4]
    python benchmarks/hybrid/under_vllm.py batches MODEL [--at-once 4]
    python benchmarks/hybrid/under_vllm.py soak MODEL --seconds 300
    python benchmarks/hybrid/under_vllm.py speed MODEL_OF_THE_SAME_FORMAT --layers 6
    python benchmarks/hybrid/under_vllm.py ranks MODEL

Needs vLLM with CUDA and moetier installed beside it (`--cpu`: identity and soak without device slots, on vLLM's
CPU build). Prints a table and, where $OUT names a folder, writes JSON there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cpus
import ranks
import speed
from engine import GRAPHS, WORKER, engine, prompts_of

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Cell:
    """One engine: `settings` are moetier's. Compared with the first cell of its `group`."""

    name: str
    group: str
    settings: dict[str, Any]
    arguments: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


class Bed:
    """A model with its store, and the engines over it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        from moetier.store.build import build_store

        self.arguments, self.model, self.folder, self.store = arguments, Path(arguments.model), folder, folder / "store"
        build_store(self.model, self.store)
        self.experts = json.loads((self.model / "config.json").read_text())["n_routed_experts"]

    def slots(self, share: float) -> int:
        return max(1, round(share * self.experts))

    def cell(self, name: str, group: str, graphs: str, share: float, **more: Any) -> Cell:
        """An engine with a share of the experts in slots. more: settings, and "engine" and "environment"."""
        engine, environment = more.pop("engine", {}), more.pop("environment", {})
        settings = {"slots": self.slots(share), "dram_records": "100%", "threads": self.arguments.threads, **more}
        return Cell(f"{name}, graphs {graphs}", group, settings, GRAPHS[graphs] | engine, environment)

    def run(self, cell: Cell, runs: list[dict[str, Any]]) -> dict[str, Any]:
        """Its result, or {"error": ...}."""
        settings = {"store": str(self.store), "heat_file": str(self.folder / f"{id(cell)}"), **cell.settings}
        common = {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 1024, "max_num_seqs": 64}
        common |= {"model": str(self.model), "quantization": "moetier", "load_format": "moetier"}
        if self.arguments.cpu:
            settings |= {"slots": 0, "dram_records": settings["slots"]}
        else:
            common |= {"worker_cls": WORKER, "gpu_memory_utilization": 0.02}
        common["additional_config"] = {"moetier": settings}
        environment = {"VLLM_CACHE_ROOT": str(self.folder / f"cache-{id(cell)}"), **cell.environment}
        try:
            return engine(runs, environment, **common | cell.arguments)
        except RuntimeError as error:
            return {"error": str(error)}

    def run_all(self, cells: Sequence[Cell], runs: list[dict[str, Any]]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """In their order, `at_once` of them beside each other."""
        with ThreadPoolExecutor(self.arguments.at_once) as pool:
            yield from zip(cells, pool.map(lambda cell: self.run(cell, runs), cells), strict=True)


def compare(bed: Bed, cells: Sequence[Cell], runs: list[dict[str, Any]], show: Report) -> bool:
    """Run the cells, each against the first of its group; whether one failed or differs."""
    references: dict[str, dict[str, Any]] = {}
    failed = False
    for cell, found in bed.run_all(cells, runs):
        row: dict[str, Any] = {"what": cell.name, "group": cell.group}
        if "error" in found:
            show(row | found)
            failed = True
            continue
        run = found["runs"][0]
        reference = references.setdefault(cell.group, run)
        for key in ("tokens", "logprobs"):
            row[f"{key} differ"] = sum(a != b for a, b in zip(run[key], reference[key], strict=True))
            failed |= bool(row[f"{key} differ"])
        counts = run["counts"]
        chosen = ("hits", "misses", "disk_reads", "slot_fills", "dram_fills", "streamed_bytes")
        row |= {key: counts.get(key) for key in chosen}
        row |= {key: counts.get(f"device_{key}") for key in ("pairs_cpu", "streamed", "helped")}
        show(row | {"seconds": run["seconds"], "start_s": found["start_s"], "log": found["log"]})
    return failed


def identity(bed: Bed, show: Report) -> bool:
    """All prompts queued at once, greedy; every placement against all-resident."""
    arguments = bed.arguments
    runs = [{"prompts": prompts_of(bed.model, arguments.prompts), "max_tokens": arguments.tokens, "logprobs": 2}]
    shares = {"43 %": 0.43, "25 %": 0.25, "12 %": 0.12, "4 %": 0.04}
    cells = []
    for graphs in arguments.graphs.split(","):
        few = graphs != "decode"
        cells.append(bed.cell("all resident", graphs, graphs, 1.0))
        cells += [bed.cell(name, graphs, graphs, share) for name, share in shares.items() if not few or share == 0.25]
        cells.append(bed.cell("12 %, a quarter in DRAM", graphs, graphs, 0.12, dram_records="25%"))
    return compare(bed, cells, runs, show)


def batches(bed: Bed, show: Report) -> bool:
    """VLLM_BATCH_INVARIANT=1: what vLLM alone keeps between batches and chunks, then the tiers in the same batch.

    In the groups "vLLM" all experts are resident, so that a difference is vLLM's; in the others batch and chunk are the
    same, so that a difference is ours. Only the latter count as a failure.
    """
    invariant = {"VLLM_BATCH_INVARIANT": "1"}
    runs = [{"prompts": prompts_of(bed.model, 32), "max_tokens": bed.arguments.tokens, "logprobs": 2}]
    sizes = [(1, 1024), (8, 1024), (32, 1024), (32, 64)]
    alone, ours = [], []
    for graphs in bed.arguments.graphs.split(","):
        for sequences, chunk in sizes if graphs == "none" else sizes[1:2]:
            name = f"batches of {sequences}, chunks of {chunk}"
            engine = {"max_num_seqs": sequences, "max_num_batched_tokens": chunk}
            more: dict[str, Any] = {"engine": engine, "environment": invariant}
            alone.append(bed.cell(f"all resident, {name}", "vLLM", graphs, 1.0, **more))
            ours.append(bed.cell(f"12 %, {name}", f"{graphs}, {name}", graphs, 0.12, **more))
    found = dict[str, dict[str, Any]]()
    failed = False
    for cell, one in bed.run_all([*alone, *ours], runs):
        row: dict[str, Any] = {"what": cell.name}
        if "error" in one:
            show(row | one)
            failed = True
            continue
        run = one["runs"][0]
        found[cell.name] = run
        first = found.get(alone[0].name)
        same = found.get(cell.name.replace("12 %", "all resident"))
        for what, other in (("batches of 1", first), ("all resident", same)):
            if other is not None:
                pairs = [(run[key], other[key]) for key in ("tokens", "logprobs")]
                row[f"differ from {what}"] = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in pairs]
        failed |= any(row.get("differ from all resident", ()))
        show(row | {"seconds": run["seconds"], "start_s": one["start_s"], "log": one["log"]})
    return failed


def soak(bed: Bed, show: Report) -> bool:
    """Four streams for `--seconds`: the same prompts again and again, every answer against the first round's."""
    seconds = bed.arguments.seconds
    runs = [{"prompts": prompts_of(bed.model, 24), "max_tokens": 48, "logprobs": 2, "repeat_seconds": seconds}]
    four = {"engine": {"max_num_seqs": 4}, "dram_records": "40%", "fills_per_step": 8, "check_at_end": True}
    found = bed.run(bed.cell("soak", "soak", bed.arguments.graphs, 0.25, **four), runs)
    if "error" in found:
        show({"what": "soak"} | found)
        return True
    run = found["runs"][0]
    kept = ("hits", "misses", "disk_reads", "slot_fills", "dram_fills", "streamed_bytes", "device_helped")
    row = {"what": "soak", "rounds": run["rounds"], "different": run["different"]}
    row |= {key: run["counts"].get(key) for key in kept} | {"memory": memory_row(run["memory"])}
    wanted = "have the right bytes" if bed.arguments.cpu else "slots agree, every record in them"
    checked = any(wanted in line for line in found["log"])
    show(row | {"checked at the end": checked, "start_s": found["start_s"], "log": found["log"]})
    return bool(run["different"]) or not checked


def memory_row(samples: list[dict[str, int]]) -> dict[str, str]:
    """MiB after the first fifth, the half, and at the end."""
    at = [samples[len(samples) // 5], samples[len(samples) // 2], samples[-1]]
    return {key: " ".join(str(sample[key]) for sample in at) for key in at[0]}


def main() -> int:
    """Exit 1 on a difference or an error."""
    parts: dict[str, Callable[[Bed, Report], bool]] = {
        "identity": identity,
        "batches": batches,
        "soak": soak,
        "ranks": ranks.ranks,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*parts, "speed"))
    parser.add_argument("model")
    parser.add_argument(
        "--graphs",
        help=f"{', '.join(GRAPHS)}; several for identity and batches; if not given: decode for speed, else none",
    )
    parser.add_argument("--at-once", type=int, default=1, help="engines beside each other")
    parser.add_argument("--threads", type=cpus.threads, help="CPU threads that compute, of each engine")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300, help="soak: how long")
    parser.add_argument("--layers", type=int, default=6, help="speed: of the model that is made")
    parser.add_argument("--folder", help="where stores and models are made")
    parser.add_argument("--cpu", action="store_true", help="without a GPU: the same shares of the experts, in DRAM")
    arguments = parser.parse_args()
    arguments.graphs = arguments.graphs or ("decode" if arguments.part == "speed" else "none")
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        hidden = ("what", "log", "error", "counted")
        cells = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k not in hidden]
        print(f"{row['what']:52} {'  '.join(cells)}{row.get('error', '')}", flush=True)
        rows.append(row)
        if os.environ.get("OUT"):
            Path(os.environ["OUT"], f"vllm-{arguments.part}.json").write_text(json.dumps(rows, indent=1))

    try:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            if arguments.part == "speed":
                return int(speed.speed(arguments, Path(folder), show))
            return int(parts[arguments.part](Bed(arguments, Path(folder)), show))
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())
