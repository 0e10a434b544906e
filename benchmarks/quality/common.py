"""What both quality benchmarks take: a model by name, its store, the evaluation sets, and a folder for results."""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from moetier import __version__
from moetier_bench.eval import EvalError
from moetier_bench.eval.items import Item, Text, load_set
from moetier_bench.eval.quality_model import QualityModel

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("MOETIER_SHARED_MODELS") or ROOT.parent / "shared" / "models")
"""Models and sets that are not distributed with the code."""
MODELS = {"nano": ROOT / "models" / "nano-mxfp4", "base": SHARED / "base-mxfp4"}
SETS = (ROOT / "models" / "eval", SHARED / "eval")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every quality benchmark has."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--model", default="nano", help="nano, base, or a checkpoint folder (default: nano)")
    arguments.add_argument("--limit", type=int, help="only the first so many items of each set")
    arguments.add_argument("--work", type=Path, default=ROOT / "build" / "quality", help="folder of stores and results")
    arguments.add_argument("--threads", type=int, default=1, help="threads of torch and of moetier each (default: 1)")
    return arguments


def folder(arguments: argparse.Namespace) -> Path:
    """Where a model's store and results are."""
    work: Path = arguments.work
    return work / Path(arguments.model).name


def open_model(arguments: argparse.Namespace) -> QualityModel:
    """The model that was asked for; its store is built if it is not there."""
    torch.set_num_threads(arguments.threads)
    checkpoint = MODELS.get(arguments.model) or Path(arguments.model)
    return QualityModel(checkpoint, folder(arguments) / "store", arguments.threads)


def items(task: str, limit: int | None) -> list[Item | Text]:
    """The first `limit` items of a set, of all if None."""
    for sets in SETS:
        if (path := sets / f"{task}.jsonl").is_file():
            return load_set(path)[:limit]
    raise EvalError(f"there is no set {task}.jsonl in {' or '.join(map(str, SETS))}; set MOETIER_SHARED_MODELS")


def machine() -> dict[str, Any]:
    """What figures depend on, for the result files."""
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu.partition(":")[2].strip(),
        "moetier": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
