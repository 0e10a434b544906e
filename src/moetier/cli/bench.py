"""`moetier bench`: recipes measured, results checked, compared and rendered; and this machine's CPU kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from moetier.bench import BenchError
from moetier.bench.kernel import SHAPES, TOKENS, Row, bench_kernel

app = typer.Typer(
    help="Measure this machine and served models; check, compare and render results.", no_args_is_help=True
)

Root = Annotated[Path, typer.Option("--root", help="The checkout with recipes/, machines/ and results/.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the results (default: results/ of the checkout).")]
HERE = Path()


def wanted() -> None:
    """MoetierError where the packages of the extra are missing."""
    try:
        import aiohttp  # noqa: F401
        import psutil  # noqa: F401
        import scipy  # noqa: F401
        import yaml  # noqa: F401
    except ImportError as error:
        raise BenchError(f"this needs the package {error.name}; pip install 'moetier[bench]'") from None


def say(text: str) -> None:
    """A line of progress, on stderr."""
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


@app.command("list")
def list_documents(root: Root = HERE, as_json: Json = False) -> None:
    """What there is: recipes, machines, suites."""
    wanted()
    from moetier.bench.documents import Library

    library = Library(root)
    found: dict[str, list[tuple[str, str, str]]] = {
        "recipes": [(r.id, r.status, r.summary) for r in map(library.recipe, library.names("recipes"))],
        "machines": [(m.id, "", m.summary) for m in map(library.machine, library.names("machines"))],
        "suites": [(s.id, "", s.summary) for s in map(library.suite, library.names("suites"))],
    }
    if as_json:
        typer.echo(
            json.dumps(
                {
                    what: [dict(zip(("id", "status", "summary"), row, strict=True)) for row in rows]
                    for what, rows in found.items()
                }
            )
        )
        return
    for what, rows in found.items():
        table = Table("id", "status", "summary", title=what, title_justify="left")
        for row in rows:
            table.add_row(*row)
        Console().print(table)


@app.command()
def lint(root: Root = HERE, as_json: Json = False) -> None:
    """Every document against its schema, every recipe with every suite; exit 1 if one is wrong."""
    wanted()
    from moetier.bench.documents import Library

    library = Library(root)
    found = list(library.lint())
    count = sum(len(library.names(what)) for what in ("recipes", "machines", "suites"))
    _findings(found, f"{count} documents, none is wrong", as_json)


@app.command()
def show(
    kind: Annotated[Literal["recipe", "machine", "suite"], typer.Argument()],
    name: Annotated[str, typer.Argument(help="Its id.")],
    root: Root = HERE,
    as_json: Json = False,
) -> None:
    """One document with its defaults, and its hash."""
    wanted()
    import yaml

    from moetier.bench.documents import Library, digest

    library = Library(root)
    document: Any = {"recipe": library.recipe, "machine": library.machine, "suite": library.suite}[kind](name)
    values = {"sha256": digest(document), **document.model_dump(mode="json")}
    typer.echo(json.dumps(values) if as_json else yaml.safe_dump(values, sort_keys=False, width=120), nl=as_json)


@app.command()
def machine(
    name: Annotated[str, typer.Argument(help="A name for this machine, such as my-server.")],
    summary: Annotated[str, typer.Option(help="What it is, in a line.")],
    root: Root = HERE,
) -> None:
    """Write machines/NAME.yaml: what the doctor finds of this machine's hardware."""
    wanted()
    import yaml

    from moetier.bench.documents import MachineFile, checked_id
    from moetier.bench.provenance import machine_here

    document = MachineFile.model_validate(machine_here(checked_id(name), summary))
    path = root / "machines" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        raise BenchError(f"{path} is there already; name the machine otherwise, or remove the file")
    values = document.model_dump(mode="json", exclude_none=True)
    path.write_text(yaml.safe_dump(values, sort_keys=False, width=120, default_flow_style=None))
    typer.echo(f"{path}: hardware {document.identity}")


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="Id of a recipe, such as nano/tiered-25.")],
    suite: Annotated[str, typer.Option(help="Id of a suite.")] = "quick",
    machine: Annotated[
        str | None, typer.Option(help="Id of the machine (default: the one with this hardware).")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="The checkpoint, if not where the recipe says.")] = None,
    store: Annotated[Path | None, typer.Option(help="Expert store (default: stores/MODEL of the checkout).")] = None,
    allow_dirty: Annotated[
        bool, typer.Option(help="Run on a changed tree; the result may not go to results/.")
    ] = False,
    commit: Annotated[
        str | None, typer.Option(help="The commit that this copy without git is of; its files' hashes go along.")
    ] = None,
    within: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which no further probe begins: the result is partial.")
    ] = None,
    out: Out = None,
    root: Root = HERE,
) -> None:
    """Serve a recipe, probe it, write one result; exit 1 if not every probe could be run."""
    wanted()
    from moetier.bench.documents import Library
    from moetier.bench.run import run_recipe

    library = Library(root)
    path, result = run_recipe(
        library,
        library.recipe(recipe),
        library.suite(suite),
        out or library.root / "results",
        say,
        machine=machine,
        model=model,
        store=store,
        allow_dirty=allow_dirty,
        commit=commit,
        within=within,
    )
    typer.echo(str(path))
    if result.status != "ok":
        say(f"{result.status}: {result.failure}")
        raise typer.Exit(1)


@app.command()
def check(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Files (default: all of results/, with the history).")
    ] = None,
    root: Root = HERE,
    as_json: Json = False,
) -> None:
    """Recompute every aggregate, compare every hash; exit 1 if a result is not what was measured."""
    wanted()
    from moetier.bench.check import check_file, check_folder

    if paths:
        found = [line for path in paths for line in check_file(path)[1]]
        count = len(paths)
    else:
        results, found = check_folder(root / "results", root)
        count = len(results)
    _findings(found, f"{count} results, all as they were measured", as_json)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A result: the baseline.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another: the candidate.")],
    only: Annotated[list[str] | None, typer.Option(help="quality or speed; repeat for both (the default).")] = None,
    speed_gate: Annotated[float, typer.Option(min=0, max=1, help="The loss of speed that is let pass.")] = 0.05,
    as_json: Json = False,
) -> None:
    """Judge B against A; exit 0: no worse, 1: a regression, 3: unproven (too few items or samples)."""
    wanted()
    from moetier.bench.check import check_file
    from moetier.bench.compare import PARTS, Verdict
    from moetier.bench.compare import compare as judged

    if unknown := sorted(set(only or ()) - set(PARTS)):
        raise BenchError(f"--only {', '.join(unknown)}: expected {' or '.join(PARTS)}")
    (one, wrong_a), (other, wrong_b) = check_file(a), check_file(b)
    if one is None or other is None or wrong_a or wrong_b:
        raise BenchError("; ".join((*wrong_a, *wrong_b)))
    found = judged(one, other, speed_gate, only or PARTS)
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
    else:
        table = Table("", "verdict", "evidence")
        for line in found.lines:
            table.add_row(line.about, line.verdict.name.lower(), line.text)
        Console().print(table)
        for name, items in (("A", found.only_a), ("B", found.only_b)):
            typer.echo(f"only {name} is right: {', '.join(items) or 'nowhere'}")
        typer.echo(f"{found.same_answers}\n{found.verdict.name.lower()}")
    if found.verdict is not Verdict.PASS:
        raise typer.Exit(int(found.verdict))


@app.command()
def render(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if a rendered file differs.")] = False,
    root: Root = HERE,
) -> None:
    """Write docs/benchmarks/ and the README's marked block from results/ and nothing else."""
    wanted()
    from moetier.bench import render as rendering

    files = rendering.outputs(root.resolve(), root.resolve() / "results")
    if check:
        _findings(rendering.drift(files, root.resolve()), f"{len(files)} files are what the results give", False)
        return
    for path in rendering.write(files):
        typer.echo(str(path))


@app.command()
def report(
    result: Annotated[Path, typer.Argument(help="A result.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.html", help="The page to write.")],
) -> None:
    """Write one result as a single HTML page that needs no network."""
    wanted()
    from moetier.bench.check import check_file
    from moetier.bench.page import page

    found, wrong = check_file(result)
    if found is None or wrong:
        raise BenchError("; ".join(wrong))
    out.write_text(page(found))


@app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(help="What someone's `moetier prove` wrote.")],
    root: Root = HERE,
) -> None:
    """Check a file of `moetier prove` and keep it in results/imported/, to be rendered with its mark."""
    wanted()
    from moetier.bench.prove import import_proof

    path, result = import_proof(file, root / "results")
    typer.echo(f"{path}: {result.recipe.summary} on {result.machine.summary}")


@app.command()
def sweep(
    recipe: Annotated[str, typer.Argument(help="Id of the recipe to vary.")],
    axis: Annotated[list[str], typer.Option(help="NAME=VALUE,VALUE: a setting, or vllm:--FLAG; repeat for more.")],
    objective: Annotated[str, typer.Option(help="The cell to improve.")] = "decode.C1",
    constraint: Annotated[list[str] | None, typer.Option(help="A bound, such as 'ttft.2048<3'; repeat.")] = None,
    suite: Annotated[str, typer.Option(help="Whose probes measure.")] = "quick",
    state: Annotated[Path, typer.Option(help="File of the trials; the same again resumes.")] = Path("sweep.jsonl"),
    model: Annotated[Path | None, typer.Option(help="The checkpoint, if not where the recipe says.")] = None,
    store: Annotated[Path | None, typer.Option(help="Expert store (default: stores/MODEL of the checkout).")] = None,
    root: Root = HERE,
    as_json: Json = False,
) -> None:
    """Measure every combination of settings and print the best; applies nothing. Exit 1 if none qualifies."""
    wanted()
    from moetier.bench.documents import Library
    from moetier.bench.run import measure_cells
    from moetier.bench.sweep import Constraint, combinations, parse_axis, ranked, thinned, with_values
    from moetier.bench.sweep import sweep as searched

    library = Library(root)
    base, bounds = library.recipe(recipe), [Constraint.parse(text) for text in constraint or ()]
    chosen = thinned(library.suite(suite), [objective, *(bound.cell for bound in bounds)])
    trials = [(values, with_values(base, values)) for values in combinations([parse_axis(text) for text in axis])]
    measure, bound_to = measure_cells(library, say, model, store)
    found = searched(trials, chosen, state, measure, bound_to, say)
    best = ranked(found, objective, bounds)
    if as_json:
        typer.echo(json.dumps({"trials": [t.model_dump() for t in found], "best": best[0].values if best else None}))
    else:
        shown = [objective, *(bound.cell for bound in bounds)]
        table = Table("settings", *shown, "")
        for trial in [*best, *(trial for trial in found if trial not in best)]:
            cells = [trial.by_name.get(name) for name in shown]
            values = ["" if c is None else f"{c.value:g}" if c.value is not None else c.reason or "" for c in cells]
            state_of = trial.failure or ("" if trial in best else "does not meet the constraints")
            table.add_row(", ".join(f"{k}={v}" for k, v in trial.values.items()), *values, state_of)
        Console().print(table)
        typer.echo(f"best: {best[0].values}" if best else "no combination qualifies")
    if not best:
        raise typer.Exit(1)


def _findings(found: list[str], fine: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"findings": found}))
    else:
        typer.echo("\n".join(found) if found else fine)
    if found:
        raise typer.Exit(1)


@app.command()
def kernel(
    shape: Annotated[
        str, typer.Option(help=f"One of {', '.join(SHAPES)}, or HIDDEN,INTERMEDIATE,EXPERTS,TOP_K.")
    ] = "v4-flash",
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Threads; repeat for more (default: 1, all).")
    ] = None,
    isa: Annotated[list[str] | None, typer.Option(help="Kernel sets; repeat for more (default: the best).")] = None,
    tokens: Annotated[list[int] | None, typer.Option("--tokens", "-M", min=1, help="Tokens of a call.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts of the layer, instead of the shape's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Time one routed-expert layer for M tokens beside the limits of memory and arithmetic, both measured too."""
    progress = Console(stderr=True)

    def shown(row: Row) -> None:
        progress.print(f"M={row.M} {row.isa} {row.threads} threads: {row.us:.0f} us", highlight=False)

    result = bench_kernel(shape, threads, isa, tokens or TOKENS, experts, shown)
    if as_json:
        typer.echo(json.dumps(result))
        return
    table = Table(title=f"{result['machine']['cpu']}: {result['shape']}", title_justify="left")
    for name in ("M", "isa", "threads", "us", "GB/s", "of read", "GOP/s", "of peak", "of the nearer limit"):
        table.add_column(name, justify="right")
    for row in (Row(**row) for row in result["rows"]):
        table.add_row(
            str(row.M),
            row.isa,
            str(row.threads),
            f"{row.us:,.0f}",
            f"{row.gbps:.1f}",
            f"{row.gbps / row.read_gbps:.2f}",
            f"{row.gops:.0f}",
            f"{row.gops / row.peak_gops:.2f}",
            f"{row.ratio_to_limit:.2f}",
        )
    Console().print(table)
