"""Share among the verbs of `moetier bench`: options, progress, the packages that they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moetier_bench import BenchError

Root = Annotated[Path, typer.Option("--root", help="The checkout with recipes/, machines/ and results/.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Model = Annotated[Path | None, typer.Option(help="The checkpoint, if not where the recipe says.")]
Store = Annotated[Path | None, typer.Option(help="Expert store (default: stores/MODEL of the checkout).")]
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


def findings(found: list[str], fine: str, as_json: bool) -> None:
    """Print what is wrong, or that it is fine; exit 1 if anything is."""
    if as_json:
        print(json.dumps({"findings": found}))
    else:
        print("\n".join(found) if found else fine)
    if found:
        raise typer.Exit(1)
