"""Speculation and graphs under vLLM: many starts of one configuration, and every way that a step can go, once.

    python benchmarks/hybrid/speculation.py starts MODEL --times 20
    python benchmarks/hybrid/speculation.py ways MODEL [MODEL ...]

`starts`: MTP 3, captured decode, 12 % of the experts in slots and a quarter in DRAM. `ways`: {captured decode, captured
in pieces, eager} x {no guesses, MTP 1 to 3, n-gram}. Each engine is a process of its own, held to one with all experts
in slots under the same schedule: tokens and logprobs that differ, and the share of guesses accepted at each position.

An engine that fails costs a row, not the run; with $OUT its whole output is kept there, beside speculation-PART.json.
`--engine '{"async_scheduling": false}'` tells vLLM's own faults under asynchronous scheduling from ours.
No engine is started that would not end within `--budget` seconds. Exit 1 on a difference, an error, or one left out.
`--cpu`: the same shares of the experts, in DRAM, on vLLM's CPU build, where every step is eager.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpus
from engine import GRAPHS, WORKER, engine, prompts_of

from moetier.launch.failure import read_words
from moetier.store.build import build_store

MODES = ("decode", "pieces", "none")
GUESSES: dict[str, dict[str, Any] | None] = {
    "no guesses": None,
    **{f"MTP {k}": {"method": "mtp", "num_speculative_tokens": k} for k in (1, 2, 3)},
    "n-gram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
}
PLANNED, SEQUENCES, CHUNK = 256, 64, 1024
SLOTS, DRAM = 0.12, "25%"
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
HANGS = 300
"""Seconds after which an engine that does not start, or does not end, is ended."""
COUNTED = ("hits", "misses", "disk_reads", "slot_fills", "dram_fills")


@dataclass(frozen=True)
class Cell:
    """An engine. share: of the experts in slots; chunk: most tokens of a step, or vLLM's default."""

    model: Path
    mode: str
    guesses: str
    share: float
    chunk: int | None
    number: int = 0

    @property
    def name(self) -> str:
        placed = "all in slots" if self.share == 1 else f"{self.share:.0%} in slots, {DRAM} in DRAM"
        return f"{self.model.name}, graphs {self.mode}, {self.guesses}, {placed}" + (
            f", start {self.number}" if self.number else ""
        )

    @property
    def reference(self) -> Cell:
        return Cell(self.model, self.mode, self.guesses, 1.0, self.chunk)


class Bed:
    """Stores of the models, and the engines over them."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder, self.begun = arguments, folder, time.monotonic()
        self.threads = arguments.threads or max(1, cpus.served() // arguments.at_once)
        self.out = Path(os.environ["OUT"]) if os.environ.get("OUT") else folder
        self.stores = {Path(model): folder / f"store-{i}" for i, model in enumerate(arguments.models)}
        for model, store in self.stores.items():
            build_store(model, store)
        self.longest = 0.0
        """Seconds of the slowest engine so far."""
        self._places = threading.local()
        self._taken = iter(range(arguments.at_once))

    def left(self) -> float:
        return float(self.arguments.budget) - (time.monotonic() - self.begun)

    def run(self, cell: Cell) -> dict[str, Any]:
        """Its result, or {"error": ...}."""
        if self.left() < self.longest * 1.2:
            return {"error": f"left out: {self.left():.0f} s of the budget are left"}
        begun, place = time.monotonic(), self._place()
        tag = cell.name.replace(", ", "_").replace(" ", "-").replace("%", "")
        failure = self.folder / f"failure-{tag}"
        runs: list[dict[str, Any]] = [
            {"prompts": prompts_of(cell.model, self.arguments.prompts), "max_tokens": self.arguments.tokens}
        ]
        runs[0]["logprobs"] = 2
        caches = {name: f"{place}/{name}" for name in CACHES}
        try:
            return engine(runs, caches, self.out / f"{tag}.log", HANGS, **self._engine(cell, failure))
        except (RuntimeError, OSError, ValueError) as error:
            words = read_words(failure)
            return {"error": f"{words or 'no words in the failure file'}\n{error}"}
        finally:
            self.longest = max(self.longest, time.monotonic() - begun)

    def _place(self) -> Path:
        """Folder of the caches of this thread's engines, which are one after the other."""
        if not hasattr(self._places, "folder"):
            self._places.folder = self.folder / f"caches-{next(self._taken)}"
        folder: Path = self._places.folder
        return folder

    def _engine(self, cell: Cell, failure: Path) -> dict[str, Any]:
        config = json.loads((cell.model / "config.json").read_text())
        slots = max(1, round(cell.share * config["n_routed_experts"]))
        settings: dict[str, Any] = {
            "store": str(self.stores[cell.model]),
            "heat_file": f"{failure}.heat",
            "failure_file": str(failure),
            "slots": slots,
            "dram_records": "100%" if cell.share == 1 else DRAM,
            "threads": self.threads,
            "planned_tokens": PLANNED,
            "check_staging": True,
        }
        arguments: dict[str, Any] = {
            "model": str(cell.model),
            "quantization": "moetier",
            "load_format": "moetier",
            "kv_cache_memory_bytes": 1 << 30,
            "max_model_len": 1024,
            "max_num_seqs": SEQUENCES,
            "disable_log_stats": False,
        }
        if cell.chunk:
            arguments["max_num_batched_tokens"] = cell.chunk
        if guesses := GUESSES[cell.guesses]:
            arguments["speculative_config"] = guesses
        if self.arguments.cpu:
            settings |= {"slots": 0, "dram_records": slots}
        else:
            arguments |= {"worker_cls": WORKER, "gpu_memory_utilization": 0.02}
            graphs = json.loads(json.dumps(GRAPHS[cell.mode]))
            if "compilation_config" in graphs:
                graphs["compilation_config"]["max_cudagraph_capture_size"] = PLANNED
            arguments |= graphs
        arguments |= self.arguments.engine
        return arguments | {"additional_config": {"moetier": settings}}


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    """The engines that are held to a reference, in an order in which what fails oftenest comes first."""
    models = [Path(model) for model in arguments.models]
    if arguments.part == "starts":
        return [Cell(models[0], "decode", "MTP 3", SLOTS, None, number + 1) for number in range(arguments.times)]
    modes = ("none",) if arguments.cpu else MODES
    chosen = [name for name in GUESSES if not arguments.guesses or name in arguments.guesses.split(",")]
    return [Cell(model, mode, name, SLOTS, CHUNK) for model in models for mode in modes for name in chosen]


def rows(bed: Bed, cells: list[Cell]) -> Iterator[dict[str, Any]]:
    """One of each cell, against its reference."""
    every = list(dict.fromkeys(each for cell in cells for each in (cell.reference, cell)))
    with ThreadPoolExecutor(bed.arguments.at_once) as pool:
        coming = {cell: pool.submit(bed.run, cell) for cell in every}
        for cell in cells:
            reference, found = coming[cell.reference].result(), coming[cell].result()
            row: dict[str, Any] = {"what": cell.name}
            for name, one in (("reference: ", reference), ("", found)):
                if "error" in one:
                    row["error"] = name + one["error"]
            if "error" not in row:
                row |= compared(reference["runs"][0], found["runs"][0])
                row |= {"start_s": found["start_s"], "seconds": found["runs"][0]["seconds"]}
            yield row | {"elapsed": time.monotonic() - bed.begun}


def compared(reference: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Of the prompts, how many have other tokens or logprobs; what the tiers did meanwhile."""
    row: dict[str, Any] = {}
    for key in ("tokens", "logprobs"):
        row[f"{key} differ"] = sum(a != b for a, b in zip(found[key], reference[key], strict=True))
    for name, one in (("accepted", found), ("accepted, all in slots", reference)):
        row[name] = [round(share, 4) for share in one["acceptance"]]
    counts = found["counts"]
    row |= {key: counts.get(key) for key in COUNTED}
    return row | {key: counts.get(f"device_{key}") for key in ("calls", "pairs_cpu", "streamed", "helped", "alone")}


def main() -> int:
    """Exit 1 on a difference, an error, or an engine left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("starts", "ways"))
    parser.add_argument("models", nargs="+")
    parser.add_argument("--times", type=int, default=20, help="starts: how many")
    parser.add_argument("--guesses", help="ways: only these, such as 'MTP 3,n-gram'")
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything")
    parser.add_argument("--at-once", type=int, default=1, help="engines beside each other")
    parser.add_argument(
        "--threads", type=cpus.threads, help="CPU threads that compute, of each engine; default: a share"
    )
    parser.add_argument("--prompts", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--engine", type=json.loads, default={}, help="more of vLLM's arguments, as JSON")
    parser.add_argument("--folder", help="where stores are made")
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    arguments = parser.parse_args()
    failed, shown = False, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(dir=arguments.folder, ignore_cleanup_errors=True) as folder:
        bed = Bed(arguments, Path(folder))
        for row in rows(bed, cells_of(arguments)):
            failed |= "error" in row or any(row[f"{key} differ"] for key in ("tokens", "logprobs"))
            cells = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "error"]
            print("  ".join(cells).removeprefix("what "), row.get("error", ""), flush=True)
            shown.append(row)
            (bed.out / f"speculation-{arguments.part}.json").write_text(json.dumps(shown, indent=1))
    differ = sum(row.get("tokens differ", 0) + row.get("logprobs differ", 0) for row in shown)
    print(f"{len(shown)} engines, {sum('error' in row for row in shown)} errors, {differ} tokens or logprobs differ")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
