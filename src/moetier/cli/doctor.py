"""`moetier doctor`: what this machine is, what it can do, and what holds it back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from moetier.doctor.examine import examine, examine_and_measure
from moetier.doctor.facts import CPU, Answer, Machine, Verdict

COLOURS = {Verdict.FINE: "green", Verdict.SLOW: "yellow", Verdict.BROKEN: "red"}
ANSWERS = {Answer.WORKS: "green", Answer.UNKNOWN: "yellow", Answer.FAILS: "red"}
WORDS = {Verdict.FINE: "fine", Verdict.SLOW: "slow because", Verdict.BROKEN: "broken because"}


def doctor(
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
    """Examine this machine; each finding is fine, slow or broken, with the remedy. Exit 1 if something is broken."""
    console = Console(stderr=True)
    unsaved = None
    if measure and rates is not None:
        raise typer.BadParameter("measure, or take rates from a file: not both", param_hint="--rates")
    if measure:
        found, unsaved = examine_and_measure(
            disk, shape, lambda line: console.print(f"measuring: {line}", markup=False, highlight=False)
        )
    else:
        found = examine(disk, rates)
    if as_json:
        print(found.to_json())
    else:
        _show(found, Console())
    if unsaved is not None:
        raise unsaved
    if any(finding.verdict is Verdict.BROKEN for finding in found.findings):
        raise typer.Exit(1)


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
        console.print("[bold]support[/] (--json has the sources)", highlight=False)
    for support in found.support:
        on = "" if support.device == CPU else f" on compute capability {support.device or '?'}"
        colour = ANSWERS[support.answer]
        console.print(
            f"    {support.model_type} under vLLM {support.vllm}{on}: [{colour}]{support.answer}[/]: "
            f"{escape(support.because)}",
            highlight=False,
            soft_wrap=True,
        )
