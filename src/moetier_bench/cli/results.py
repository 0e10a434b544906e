"""`moetier bench check`, `compare`, `render`, `report`, `import`: what is done with results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from moetier.files import write_output
from moetier_bench import BenchError
from moetier_bench.cli.common import HERE, Json, Root, findings, wanted


def check(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Files (default: all of results/, with the history).")
    ] = None,
    root: Root = HERE,
    as_json: Json = False,
) -> None:
    """Recompute every aggregate, compare every hash; exit 1 if a result is not what was measured."""
    wanted()
    from moetier_bench.check import check_file, check_folder

    if paths:
        found = [line for path in paths for line in check_file(path)[1]]
        count = len(paths)
    else:
        results, found = check_folder(root / "results", root)
        count = len(results)
    findings(found, f"{count} results, all as they were measured", as_json)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A result: the baseline.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another: the candidate.")],
    only: Annotated[list[str] | None, typer.Option(help="quality or speed; repeat for both (the default).")] = None,
    speed_gate: Annotated[float, typer.Option(min=0, max=1, help="The loss of speed that is let pass.")] = 0.05,
    as_json: Json = False,
) -> None:
    """Judge B against A; exit 0: no worse, 1: a regression, 3: unproven (too few items or samples)."""
    wanted()
    from moetier_bench.check import check_file
    from moetier_bench.compare import PARTS, Verdict
    from moetier_bench.compare import compare as judged

    if unknown := sorted(set(only or ()) - set(PARTS)):
        raise BenchError(f"--only {', '.join(unknown)}: expected one of {', '.join(PARTS)}")
    (one, wrong_a), (other, wrong_b) = check_file(a), check_file(b)
    if one is None or other is None or wrong_a or wrong_b:
        raise BenchError("; ".join((*wrong_a, *wrong_b)))
    found = judged(one, other, speed_gate, only or PARTS)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        table = Table("", "verdict", "evidence")
        for line in found.lines:
            table.add_row(line.about, line.verdict.name.lower(), line.text)
        Console().print(table, markup=False)
        for name, items in (("A", found.only_a), ("B", found.only_b)):
            print(f"only {name} is right: {', '.join(items) or 'nowhere'}")
        print(f"{found.same_answers}\n{found.verdict.name.lower()}")
    if found.verdict is not Verdict.PASS:
        raise typer.Exit(int(found.verdict))


def render(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if a rendered file differs.")] = False,
    root: Root = HERE,
) -> None:
    """Write docs/benchmarks/ and the README's marked block from results/ and nothing else."""
    wanted()
    from moetier_bench import render as rendering

    files = rendering.outputs(root.resolve(), root.resolve() / "results")
    if check:
        findings(rendering.drift(files, root.resolve()), f"{len(files)} files are what the results give", False)
        return
    for path in rendering.write(files):
        print(str(path))


def report(
    result: Annotated[Path, typer.Argument(help="A result.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.html", help="The page to write.")],
) -> None:
    """Write one result as a single HTML page that needs no network."""
    wanted()
    from moetier_bench.check import check_file
    from moetier_bench.page import page

    found, wrong = check_file(result)
    if found is None or wrong:
        raise BenchError("; ".join(wrong))
    write_output(out, page(found))


def import_file(
    file: Annotated[Path, typer.Argument(help="What someone's `moetier prove` wrote.")],
    root: Root = HERE,
) -> None:
    """Check a file of `moetier prove` and keep it in results/imported/, to be rendered with its mark."""
    wanted()
    from moetier_bench.prove import import_proof

    path, result = import_proof(file, root / "results")
    print(f"{path}: {result.recipe.summary} on {result.machine.summary}")
