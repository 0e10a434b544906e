"""`moetier calibrate`: after a benchmark, lay what was mispredicted to a cost of this machine, with evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetier.cli.asked import Asked, asking
from moetier.errors import SettingsError
from moetier.plan import calibration, catalog
from moetier.plan import workload as workloads
from moetier.plan.costs import costs_of, engine_named
from moetier.plan.hardware import hardware_of
from moetier.plan.placement import place
from moetier.plan.predict import Case


@asking
def calibrate(
    asked: Asked,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A bundled id (`moetier plan --models`), a checkpoint's folder, hf://ORG/NAME, or a geometry file.",
        ),
    ],
    results: Annotated[
        Path | None, typer.Option(help='A result of `moetier bench run`, or JSON such as {"decode_tok_s": 84}.')
    ] = None,
    measured: Annotated[
        list[str] | None,
        typer.Option("--measured", metavar="METRIC=VALUE", help="One metric, such as decode_tok_s=84."),
    ] = None,
    source: Annotated[str | None, typer.Option(help="Where the measurement is from, kept as evidence.")] = None,
    blame: Annotated[
        str | None, typer.Option(help="Cost to correct (default: the least certain of those at work).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep the corrections in this file (default: this machine's).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the corrections as JSON on stdout.")] = False,
) -> None:
    """Compare a prediction with what was measured under the same settings, and correct this machine's costs."""
    values = _values(results, measured or [], asked.streams)
    geometry, found = catalog.find(model, asked.kv_bytes_per_token), asked.on()
    hardware = hardware_of(found, geometry.record)
    profile = engine_named(asked.engine, hardware)
    placement = place(geometry, hardware, asked.wanted(geometry))
    if placement.problems:
        raise SettingsError(
            f"these settings do not fit this machine, so nothing was measured with them: {placement.problems[0]}"
        )
    path = out or _kept(found.identity, profile.name)
    before = calibration.load(path) if path.exists() else None
    if before is not None and (before.identity, before.engine) != (found.identity, profile.name):
        raise SettingsError(
            f"{path}: corrections of machine {before.identity} with {before.engine}, this is {found.identity} with "
            f"{profile.name}; name another file with --out"
        )
    case = Case(geometry, hardware, placement, workloads.of(asked.workload, geometry), asked.draft)
    told = source or (str(results) if results else "the command line")
    costs = costs_of(hardware, profile)
    learnt = calibration.calibrate(case, costs, found.identity, profile.name, values, told, blame, before)
    calibration.save(learnt, path)
    if as_json:
        print(learnt.model_dump_json(by_alias=True))
        return
    for entry in learnt.evidence:
        print(
            f"{entry.metric}: predicted {entry.predicted:.4g}, measured {entry.measured:.4g} "
            f"({entry.predicted / entry.measured - 1:+.0%}): {entry.cost} times {entry.factor:.3g}"
        )
    print(f"kept in {path}; `moetier plan` uses it" + ("" if out is None else f" with --calibration {path}"))


def _kept(identity: str, engine: str) -> Path:
    if identity == "described":
        raise SettingsError("a machine in words has no corrections of its own; name a file for them with --out")
    return calibration.calibration_file(identity, engine)


def _values(results: Path | None, pairs: list[str], streams: int) -> dict[str, float]:
    values = calibration.read_measured(results, streams) if results else {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not equals or not 0 < value < 1e12:
            raise SettingsError(f"--measured {pair!r}: expected METRIC=VALUE with a positive number")
        values[name] = value
    if not values:
        raise SettingsError("expected what was measured: --results FILE or --measured METRIC=VALUE")
    return values
