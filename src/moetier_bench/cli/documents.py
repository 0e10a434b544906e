"""`moetier bench list`, `lint`, `show`, `machine`: recipes, machines and suites."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from moetier.files import write_output
from moetier_bench import BenchError
from moetier_bench.cli.common import HERE, Json, Root, findings, wanted


def list_documents(root: Root = HERE, as_json: Json = False) -> None:
    """List recipes, machines and suites."""
    wanted()
    from moetier_bench.documents import Library

    library = Library(root)
    found: dict[str, list[tuple[str, str, str]]] = {
        "recipes": [(r.id, r.status, r.summary) for r in map(library.recipe, library.names("recipes"))],
        "machines": [(m.id, "", m.summary) for m in map(library.machine, library.names("machines"))],
        "suites": [(s.id, "", s.summary) for s in map(library.suite, library.names("suites"))],
    }
    if as_json:
        print(
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
        Console().print(table, markup=False)


def lint(root: Root = HERE, as_json: Json = False) -> None:
    """Every document against its schema, every recipe with every suite; exit 1 if one is wrong."""
    wanted()
    from moetier_bench.documents import Library

    library = Library(root)
    found = list(library.lint())
    count = sum(len(library.names(what)) for what in ("recipes", "machines", "suites"))
    findings(found, f"{count} documents, none is wrong", as_json)


def show(
    kind: Annotated[Literal["recipe", "machine", "suite"], typer.Argument(help="What it is.")],
    name: Annotated[str, typer.Argument(help="Its id.")],
    root: Root = HERE,
    as_json: Json = False,
) -> None:
    """One document with its defaults, and its hash."""
    wanted()
    import yaml

    from moetier_bench.documents import Library, digest

    library = Library(root)
    document: Any = {"recipe": library.recipe, "machine": library.machine, "suite": library.suite}[kind](name)
    values = {"sha256": digest(document), **document.model_dump(mode="json")}
    print(json.dumps(values) if as_json else yaml.safe_dump(values, sort_keys=False, width=120).rstrip("\n"))


def machine(
    name: Annotated[str, typer.Argument(help="A name for this machine, such as my-server.")],
    summary: Annotated[str, typer.Option(help="What it is, in a line.")],
    root: Root = HERE,
) -> None:
    """Write machines/NAME.yaml: what the doctor finds of this machine's hardware."""
    wanted()
    import yaml

    from moetier_bench.documents import MachineFile, checked_id
    from moetier_bench.provenance import machine_here

    document = MachineFile.model_validate(machine_here(checked_id(name), summary))
    path = root / "machines" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        raise BenchError(f"{path} is there already; name the machine otherwise, or remove the file")
    values = document.model_dump(mode="json", exclude_none=True)
    write_output(path, yaml.safe_dump(values, sort_keys=False, width=120, default_flow_style=None))
    print(f"{path}: hardware {document.identity}")
