"""`moetier bench run` and `sweep`: serve and probe."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from moetier_bench.cli.common import HERE, Json, Model, Root, Store, say, wanted

if TYPE_CHECKING:
    from moetier_bench.samples import Cell
    from moetier_bench.sweep import Trial


def run(
    recipe: Annotated[str, typer.Argument(help="Id of a recipe, such as nano/tiered-25.")],
    suite: Annotated[
        list[str] | None, typer.Option(help="Id of a suite (default: quick); repeat for more from one start.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="Id of the machine (default: the one with this hardware).")
    ] = None,
    model: Model = None,
    store: Store = None,
    allow_dirty: Annotated[
        bool, typer.Option(help="Run on a changed tree; the result may not go to results/.")
    ] = False,
    commit: Annotated[
        str | None, typer.Option(help="The commit that this copy without git is of; its files' hashes go along.")
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds, from when the server is ready, after which no probe begins (partial)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results (default: results/ of the checkout).")] = None,
    root: Root = HERE,
) -> None:
    """Serve a recipe, probe it, write a result for each suite; exit 1 if not every probe could be run.

    Interrupted or told to end, it writes what it has.
    """
    wanted()
    from moetier_bench.documents import Library
    from moetier_bench.recipes import run_recipe

    library = Library(root)
    for asked_to_end in (signal.SIGINT, signal.SIGTERM):  # the first is ignored in a shell's background
        signal.signal(asked_to_end, signal.default_int_handler)
    whole = True
    for path, result in run_recipe(
        library,
        library.recipe(recipe),
        [library.suite(name) for name in suite or ["quick"]],
        out or library.root / "results",
        say,
        machine=machine,
        model=model,
        store=store,
        allow_dirty=allow_dirty,
        commit=commit,
        within=within,
    ):
        print(str(path))
        if result.status != "ok":
            say(f"{result.status}: {result.failure}")
            whole = False
    if not whole:
        raise typer.Exit(1)


def sweep(
    recipe: Annotated[str, typer.Argument(help="Id of the recipe to vary.")],
    axis: Annotated[list[str], typer.Option(help="NAME=VALUE,VALUE: a setting, or vllm:--FLAG; repeat for more.")],
    objective: Annotated[str, typer.Option(help="The cell to improve.")] = "decode.C1",
    constraint: Annotated[list[str] | None, typer.Option(help="A bound, such as 'ttft.2048<3'; repeat.")] = None,
    suite: Annotated[str, typer.Option(help="Whose probes measure.")] = "quick",
    state: Annotated[Path, typer.Option(help="File of the trials; the same again resumes.")] = Path("sweep.jsonl"),
    model: Model = None,
    store: Store = None,
    root: Root = HERE,
    as_json: Json = False,
) -> None:
    """Measure every combination of settings and print the best; applies nothing. Exit 1 if none qualifies."""
    wanted()
    from moetier_bench.documents import Library
    from moetier_bench.recipes import measure_cells
    from moetier_bench.sweep import Constraint, combinations, parse_axis, ranked, thinned, with_values
    from moetier_bench.sweep import sweep as searched

    library = Library(root)
    base, bounds = library.recipe(recipe), [Constraint.parse(text) for text in constraint or ()]
    chosen = thinned(library.suite(suite), [objective, *(bound.cell for bound in bounds)])
    trials = [(values, with_values(base, values)) for values in combinations([parse_axis(text) for text in axis])]
    measure, bound_to = measure_cells(library, say, model, store)
    found = searched(trials, chosen, state, measure, bound_to, say)
    best = ranked(found, objective, bounds)
    if as_json:
        print(json.dumps({"trials": [t.model_dump() for t in found], "best": best[0].values if best else None}))
    else:
        _evidence(found, best, [objective, *(bound.cell for bound in bounds)])
    if not best:
        raise typer.Exit(1)


def _evidence(found: list[Trial], best: list[Trial], names: list[str]) -> None:
    """Every trial with its ranges, the best first, and what the ranges do not tell apart."""
    from moetier_bench.sweep import not_told_apart

    table = Table("settings", *names, "others' CPUs", "")
    for trial in [*best, *(trial for trial in found if trial not in best)]:
        values = [_shown(trial.by_name.get(name)) for name in names]
        busy = "" if trial.others is None else f"{trial.others:.2f}"
        state = trial.failure or ("" if trial in best else "does not meet the constraints")
        table.add_row(_said(trial), *values, busy, state)
    Console().print(table, markup=False)
    if not best:
        print("no combination qualifies")
        return
    print(f"best: {_said(best[0])}")
    for trial in not_told_apart(best, names[0]):
        print(f"not told apart from it by {names[0]}: {_said(trial)}")


def _said(trial: Trial) -> str:
    return ", ".join(f"{name}={value}" for name, value in trial.values.items())


def _shown(cell: Cell | None) -> str:
    if cell is None or cell.value is None:
        return "" if cell is None else cell.reason or ""
    return f"{cell.value:.4g} ({cell.low:.4g} to {cell.high:.4g})" if len(cell.samples) > 1 else f"{cell.value:.4g}"
