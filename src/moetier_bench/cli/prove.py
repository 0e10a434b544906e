"""`moetier prove`: doctor, identity and speed of one model in one file that can be shared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moetier_bench.cli.common import say, wanted


def prove(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.json[.gz]", help="The file to write.")],
    store: Annotated[Path | None, typer.Option(help="Its expert store (default: built for the while).")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting, such as dram_records=25%.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable of the server, which the file shows.")
    ] = None,
    suite: Annotated[str, typer.Option(help="The suite to run.")] = "quick",
) -> None:
    """Check exactness and measure MODEL here; the file holds no prompt and no path. What follows `--` goes to vLLM."""
    wanted()
    from moetier_bench.documents import Library
    from moetier_bench.prove import prove as proved
    from moetier_bench.prove import refuse_existing_file, write_proof

    refuse_existing_file(out)
    chosen = Library(Path()).suite(suite)
    result = proved(
        model, store, _settings(setting or []), tuple(context.args), chosen, say, env=_pairs(env or [], "--env")
    )
    write_proof(result, out)
    print(f"{out}: {result.status}, {len(result.cells)} cells, seal {result.sha256[:16]}")
    if result.status != "ok" or result.extra["identity"]["differ"]:
        raise typer.Exit(1)


def _settings(pairs: list[str]) -> dict[str, Any]:
    """A value is JSON where it is, else text."""
    from moetier_bench.sweep import value_of

    return {name: value_of(value) for name, value in _pairs(pairs, "--set").items()}


def _pairs(pairs: list[str], option: str) -> dict[str, str]:
    """Return the pairs of NAME=VALUE."""
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise typer.BadParameter(f"expected NAME=VALUE, found {wrong[0]!r}", param_hint=option)
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
