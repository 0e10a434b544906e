"""The decision on the command line: where the model would be served, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from moetier.decision.decide import Decision, decide
from moetier.decision.facts import Facts
from moetier.decision.installed import installed
from moetier.decision.row import Here
from moetier.decision.support import devices_of
from moetier.errors import MoetierError, RefusedError, SettingsError
from moetier.launch import process as launcher
from moetier.machine.facts import CPU, Answer, Machine
from moetier.machine.probe.gpu import probe_gpus
from moetier.plan.headers import folder_headers

REFUSED = RefusedError.exit_code
"""Exit code of a verb that says that a checkpoint cannot be served."""


def decided_here(facts: Facts, arguments: Sequence[str] = ()) -> Decision:
    """The decision for the installed vLLM and this machine's devices. arguments: those passed on to vLLM."""
    return decide(facts, Here(installed(), _devices(), tuple(arguments)))


def decided_on(facts: Facts, machine: Machine) -> Decision:
    """The decision for another machine, with the vLLM that is installed here."""
    return decide(facts, Here(installed(), devices_of(machine.gpus)))


def _devices() -> tuple[str | None, ...]:
    """Return what the installed vLLM computes on; nothing without vLLM."""
    try:
        return (CPU,) if launcher.runs_on_cpu() else devices_of(probe_gpus())
    except SettingsError:
        return ()


def proceed(decision: Decision, skip: bool, console: Console) -> None:
    """RefusedError where the model is not served; else say what is to be known before hours are spent on it."""
    decision.require(skip)
    for line in decision.lines(skip):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


@contextmanager
def decision_first(folder: str | Path, skip: bool, console: Console, arguments: Sequence[str] = ()) -> Iterator[None]:
    """That a model is not served here is said before anything else that is wrong with it or its settings."""
    try:
        yield
    except MoetierError:
        proceed(decided_here(folder_headers(Path(folder)).facts, arguments), skip, console)
        raise


def unknown_support(decision: Decision, console: Console) -> None:
    """Say what nothing is known of."""
    for support in decision.support:
        if support.answer is Answer.UNKNOWN:
            console.print(f"support: {support}", soft_wrap=True, markup=False, highlight=False)


def refuse(decision: Decision, skip: bool, as_json: bool) -> None:
    """Where the model is not served, the decision is all that is said; ends with `REFUSED`."""
    if not decision.refusals(skip):
        return
    if not as_json:
        for line in decision.lines(skip):
            print(line)
    raise typer.Exit(REFUSED)
