"""`moetier trace`: record which experts real traffic routes to, look at it, and try slots and policies on it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from moetier.amounts import amount_of
from moetier.cli.verbs import TRACE_VERBS, group
from moetier.errors import SettingsError
from moetier.tiers.heat import Heat
from moetier.tiers.policy import POLICIES
from moetier.trace.record import Trace
from moetier.trace.simulate import Plan, Scores, simulate

app = typer.Typer(
    cls=group(TRACE_VERBS),
    no_args_is_help=True,
    help="Routing traces: record them from traffic, show and simulate them.",
)
console = Console()

TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A routing trace.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]


@app.command("show")
def show(trace: TraceFile, as_json: Json = False) -> None:
    """Print what a trace holds."""
    opened = Trace.open(trace)
    calls = tokens = steps = prefill = 0
    for step in opened.steps():
        steps += 1
        prefill += step[0].step.prefill
        calls += len(step)
        tokens += max(call.ids.shape[0] for call in step)
    report: dict[str, Any] = {
        **asdict(opened.header),
        "steps": steps,
        "steps_with_a_prompt": prefill,
        "layer_calls": calls,
        "tokens": tokens,
        "bytes": trace.stat().st_size,
    }
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        print(f"{name.replace('_', ' '):22} {value}")


@app.command("simulate")
def simulate_trace(
    trace: TraceFile,
    slots: Annotated[
        list[str] | None,
        typer.Option(help="Slots of each layer: a number, or a share such as 25% (the default); may be repeated."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(POLICIES)}; may be repeated (default: all).")
    ] = None,
    resident: Annotated[
        str, typer.Option(help="How many of the slots are fixed by heat: a number, or a share of the slots.")
    ] = "0",
    fills: Annotated[int | None, typer.Option(min=0, help="The most copies after a step (default: no limit).")] = None,
    learn: Annotated[float, typer.Option(help="Share of the steps that only teaches, 0 to below 1.")] = 0.2,
    heat: Annotated[Path | None, typer.Option(help="Heat file that teaches instead.")] = None,
    as_json: Json = False,
) -> None:
    """Replay TRACE against slots and policies. A step is scored before anything is learnt from it."""
    opened = Trace.open(trace)
    header = opened.header
    counts = None if heat is None else _heat(heat, opened)
    rows = []
    for size in slots or ["25%"]:
        wanted = _amount("--slots", size, header.experts)
        for name in policy or list(POLICIES):
            plan = Plan(wanted, name, _amount("--resident", resident, wanted), fills, learn)
            rows.append((plan, simulate(opened, plan, None if counts is None else counts.copy())))
    if as_json:
        print(json.dumps({"trace": asdict(header), "runs": [_row(plan, scores) for plan, scores in rows]}))
    else:
        _print(rows, header.experts)


def _row(plan: Plan, scores: Scores) -> dict[str, Any]:
    return {**asdict(plan), "decode": scores.decode.summary(), "prefill": scores.prefill.summary()}


def _print(rows: list[tuple[Plan, Scores]], experts: int) -> None:
    print("a decode step: share of hits, misses, layers with a miss, copies into slots; hits in steps with a prompt")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("slots", "resident", "policy", "hits", "misses", "layers", "copies", "with a prompt"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for plan, scores in rows:
        decode = scores.decode
        table.add_row(
            f"{plan.slots} of {experts}",
            str(plan.resident),
            plan.policy,
            f"{decode.hit_rate:.1%}",
            f"{decode.misses_per_step:.2f}",
            f"{decode.layers_with_miss_per_step:.2f}",
            f"{decode.fills / max(decode.steps, 1):.2f}",
            f"{scores.prefill.hit_rate:.1%}",
        )
    console.print(table, markup=False)


def _amount(option: str, text: str, whole: int) -> int:
    """Return a number or a share of `whole`, and no more than that."""
    count = amount_of(text, option, whole)
    if count is None or count > whole:
        raise SettingsError(f"{option}: expected a number from 0 to {whole}, or a share such as 25%, found {text!r}")
    return count


def _heat(path: Path, trace: Trace) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Counts of a heat file; SettingsError where it is none of the traced model."""
    header = trace.header
    counts = Heat.load(path, header.layers, header.experts, header.identity).counts
    if not counts.any():
        raise SettingsError(
            f"{path}: expected a heat file of the model that was traced, found none that can be used; name heat.json "
            "in its store"
        )
    return counts
