"""Paired evaluation of tasks and held-out text per variant: `python benchmarks/quality/tasks.py --model nano`.

Every result is appended to WORK/MODEL/VARIANT.jsonl, and an item that is there is not asked again: a run may be cut and
repeated, with another --variant, --task or --limit too. The tables, over what the files hold, are printed at the end of
each run (or alone with --table) and written to WORK/MODEL/tasks.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from common import folder, items, machine, open_model, parser
from rich.console import Console
from rich.table import Table

from moetier_bench.eval import EvalError
from moetier_bench.eval.compare import Comparison, compare
from moetier_bench.eval.quality_log import ResultLog, same_answers, verdict
from moetier_bench.eval.quality_numerics import REFERENCE, VARIANTS
from moetier_bench.eval.quality_tasks import evaluate, groups
from moetier_bench.eval.report import Report

TASKS = ("arithmetic", "copy", "json", "toolcalls", "needle", "heldout_text")
COMPARED = ("reference", "ours", "bf16", "fp8")


def main() -> None:
    """Evaluate what is not there yet, then print the tables."""
    arguments = parser(__doc__)
    arguments.add_argument("--variant", action="append", choices=VARIANTS, help=f"default: {', '.join(COMPARED)}")
    arguments.add_argument("--task", action="append", choices=TASKS, help="default: all")
    arguments.add_argument("--table", action="store_true", help="evaluate nothing")
    asked = arguments.parse_args()
    if not asked.table:
        run(asked)
    reports = {
        path.stem: ResultLog(path).report() for v in VARIANTS if (path := folder(asked) / f"{v}.jsonl").is_file()
    }
    show(reports, asked)


def run(asked: argparse.Namespace) -> None:
    """All variants on one set after the other, so that what is there can be paired at any time."""
    with open_model(asked) as model:
        about = {"model": asked.model, "checkpoint": model.identity}
        logs = {
            variant: ResultLog(folder(asked) / f"{variant}.jsonl", {**about, "variant": variant})
            for variant in asked.variant or COMPARED
        }
        for task in asked.task or TASKS:
            questions = items(task, asked.limit)
            for variant, log in logs.items():
                model.use(variant)
                start = time.monotonic()
                todo = [item for item in questions if not log.has(item)]
                for group in groups(model, todo):
                    for result in evaluate(model, group):
                        log.add(result)
                print(f"{task} {variant}: {len(todo)} items, {time.monotonic() - start:.0f} s", file=sys.stderr)


def show(reports: dict[str, Report], asked: argparse.Namespace) -> None:
    """Scores and losses per variant; each variant against the reference."""
    if REFERENCE not in reports:
        raise EvalError(f"no results of the reference in {folder(asked)}; run it with --variant reference")
    console = Console(width=140)
    console.print(score_table(reports, asked.model))
    pairs = {name: compare(reports[REFERENCE], report) for name, report in reports.items() if name != REFERENCE}
    console.print(pair_table(pairs))
    same = {name: same_answers(reports[REFERENCE], reports[name]) for name in pairs}
    console.print("same answer as the reference:", ", ".join(f"{name} {count}" for name, count in same.items()))
    for table in text_tables(reports, pairs):
        console.print(table)
    state: dict[str, Any] = {**machine(), "model": asked.model, "variants": {}}
    for name, report in reports.items():
        state["variants"][name] = report.summary()
        if name in pairs:
            found = verdict(pairs[name])
            state["variants"][name]["against_reference"] = pairs[name].as_dict()
            state["variants"][name]["same_answers"] = asdict(same[name])
            state["variants"][name]["verdict"] = found and {**asdict(found), "not_worse": found.not_worse}
    path = folder(asked) / "tasks.json"
    path.write_text(json.dumps(state, indent=1) + "\n")
    print(path)


def score_table(reports: dict[str, Report], model: str) -> Table:
    """Correct items by set and variant."""
    scores = {name: {score.task: score for score in report.scores()} for name, report in reports.items()}
    table = Table("set", *scores, title=f"Correct of {model}'s items (too long for its positions: left out)")
    for task in dict.fromkeys(task for found in scores.values() for task in found):
        table.add_row(task, *(str(found[task].all) if task in found else "" for found in scores.values()))
    return table


def pair_table(pairs: dict[str, Comparison]) -> Table:
    """Each variant against the reference, set by set: discordant items and p."""
    table = Table(
        "variant", "set", "items", "reference", "variant", "only the reference is right", "only the variant", "p"
    )
    for name, pair in pairs.items():
        for paired in pair.tasks:
            only = (" ".join(ids) if paired.task != "all" else str(len(ids)) for ids in (paired.only_a, paired.only_b))
            counts = (str(paired.items), str(paired.correct_a), str(paired.correct_b))
            table.add_row(name, paired.task, *counts, *only, f"{paired.p:.3g}")
        if found := verdict(pair):
            outcome = "not worse" if found.not_worse else "WORSE"
            table.add_row(name, f"{outcome}: {found.points_lost:+.2f} points lost, p {found.p:.3g}")
        table.add_section()
    return table


def text_tables(reports: dict[str, Report], pairs: dict[str, Comparison]) -> list[Table]:
    """Losses of the texts, and their paired difference from the reference."""
    losses = Table("texts", "variant", "read", "tokens", "nats/token", "perplexity", "bits/byte", title="Held-out text")
    for name, report in reports.items():
        for loss in report.losses():
            numbers = (f"{loss.loss:.5f}", f"{loss.perplexity:.4f}", f"{loss.bits_per_byte:.5f}")
            losses.add_row(loss.task, name, str(loss.texts), f"{loss.tokens:,}", *numbers)
    paired = Table("texts", "variant", "pairs", "variant - reference, nats/token, mean over texts", "standard error")
    for name, pair in pairs.items():
        for text in pair.texts:
            paired.add_row(
                text.task, name, str(text.texts), f"{text.difference:+.6f}", f"{text.standard_error or 0:.6f}"
            )
    return [table for table in (losses, paired) if table.row_count]


if __name__ == "__main__":
    main()
