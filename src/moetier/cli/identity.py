"""`moetier identity`: prove on this machine that every tier and kernel gives the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from moetier.engine.recording import read_calls
from moetier.identity.long import IdentityReport, check_random, check_recorded
from moetier.store.store import Store


def identity(
    store: Annotated[Path, typer.Option("--store", help="Folder of an expert store.")],
    calls: Annotated[int, typer.Option(min=1, help="Random layer calls, each through every path.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random calls.")] = 0,
    replay: Annotated[
        Path | None, typer.Option(help="Instead: recorded calls (setting record_calls) against all-DRAM.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Compute layer calls through every tier, kernel and thread count; exit 1 if any bit differs."""
    with Store.open(store) as opened, _progress(None if replay else calls) as step:
        if replay is not None:
            report = check_recorded(opened, read_calls(replay), step)
        else:
            report = check_random(opened, calls, seed, progress=step)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        _show(report)
    if report.differ:
        raise typer.Exit(1)


def _show(report: IdentityReport) -> None:
    print(f"{report.calls} calls, {report.pairs} pairs, {report.bytes / 2**30:.2f} GiB of records, paths:")
    for path in report.paths:
        print(f"  {path}")
    if report.oracle_calls:
        print(f"  oracle (first 4 tokens of {report.oracle_calls} calls)")
    print(f"values that differ: {report.differ}")
    if report.first is not None:
        first = report.first
        print(f"first: {first.paths[0]} against {first.paths[1]}, layer index {first.layer}, {first.values} values")


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[int], None]]:
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("layer calls", total=total)
        yield lambda done: bar.update(task, completed=done)
