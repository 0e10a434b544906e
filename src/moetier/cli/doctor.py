"""`moetier doctor`: what this machine is, what it can do, and what holds it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from moetier.decision.decide import Decision
from moetier.doctor.examine import examine, examine_and_measure
from moetier.errors import SettingsError
from moetier.launch.decide import REFUSED, decided_here
from moetier.machine.facts import CPU, Answer, Machine, Verdict
from moetier.plan import catalog

COLOURS = {Verdict.FINE: "green", Verdict.SLOW: "yellow", Verdict.BROKEN: "red"}
ANSWERS = {Answer.WORKS: "green", Answer.UNKNOWN: "yellow", Answer.FAILS: "red"}
WORDS = {Verdict.FINE: "fine", Verdict.SLOW: "slow because", Verdict.BROKEN: "broken because"}


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Also say whether this model can be served here: as in `moetier plan`."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the rates now (half a minute or more, on a quiet machine).")
    ] = False,
    disk: Annotated[
        Path, typer.Option(help="Folder whose disk is examined: the store's, or where it will be.")
    ] = Path(),
    shape: Annotated[
        str, typer.Option(help="Whose records are read and computed: as in `moetier bench kernel`.")
    ] = "v4-flash",
    rates: Annotated[
        Path | None, typer.Option(help="Take the rates from this file instead of those kept here.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what `moetier plan --machine` reads, on stdout.")
    ] = False,
) -> None:
    """Examine this machine; each finding is fine, slow or broken, with the remedy. Exit 1 if something is broken.

    With MODEL, say first whether and how it can be served here; exit 2 if it cannot.
    """
    console = Console(stderr=True)
    unsaved = None
    if measure and rates is not None:
        raise SettingsError("--measure or --rates: either measures, or takes rates from a file; leave one out")
    decision = _decided(model) if model is not None else None
    if measure:
        found, unsaved = examine_and_measure(
            disk, shape, lambda line: console.print(f"measuring: {line}", markup=False, highlight=False)
        )
    else:
        found = examine(disk, rates)
    if as_json:
        print(found.to_json() if decision is None else _both(decision, found))
    else:
        if decision is not None:
            _show_decision(decision, Console())
        _show(found, Console())
    if unsaved is not None:
        raise unsaved
    if decision is not None and decision.refusals():
        raise typer.Exit(REFUSED)
    if any(finding.verdict is Verdict.BROKEN for finding in found.findings):
        raise typer.Exit(1)


def _decided(model: str) -> Decision:
    """The decision; an error where `store build` would stop at headers that config.json contradicts."""
    found = catalog.look(model)
    decision = decided_here(found.facts)
    if not decision.refusals():
        found.check()
    return decision


def _both(decision: Decision, found: Machine) -> str:
    return json.dumps({"decision": decision.to_json(), "machine": json.loads(found.to_json())})


def _show_decision(decision: Decision, console: Console) -> None:
    """Print the decision about the model, before anything about the machine."""
    lines = list(decision.lines())
    if not decision.refusals():
        formats = ", ".join(f"{group} {name}" for group, name in decision.formats)
        clamp = "" if decision.clamp is None else f" clamped at {decision.clamp:g}"
        lines.insert(0, f"{decision.name} can be {decision.answer}: experts {formats}; {decision.activation}{clamp}")
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _show(found: Machine, console: Console) -> None:
    for finding in found.findings:
        colour, word = COLOURS[finding.verdict], WORDS[finding.verdict]
        console.print(
            f"[bold]{escape(finding.about)}[/]: [{colour}]{word}[/]: {escape(finding.text)}",
            highlight=False,
            soft_wrap=True,
        )
        if finding.remedy:
            console.print(f"    remedy: {escape(finding.remedy)}", highlight=False, soft_wrap=True)
    if found.support:
        console.print("[bold]support[/]", "(--json has the sources)", highlight=False)
    for support in found.support:
        on = "" if support.device == CPU else f" on compute capability {support.device or '?'}"
        colour = ANSWERS[support.answer]
        console.print(
            f"    {support.model_type} under vLLM {support.vllm}{on}: [{colour}]{support.answer}[/]: "
            f"{escape(support.because)}",
            highlight=False,
            soft_wrap=True,
        )
