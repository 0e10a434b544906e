"""`moetier bench kernel`: one routed-expert layer beside this machine's limits."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from moetier.doctor.measure.kernel import SHAPES, TOKENS, Row, bench_kernel


def kernel(
    shape: Annotated[
        str, typer.Option(help=f"One of {', '.join(SHAPES)}, or HIDDEN,INTERMEDIATE,EXPERTS,TOP_K.")
    ] = "v4-flash",
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Threads; repeat for more (default: 1, all).")
    ] = None,
    isa: Annotated[list[str] | None, typer.Option(help="Kernel sets; repeat for more (default: the best).")] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option("--tokens", "-M", min=1, help="Tokens of a call; repeat for more (default: 1 to 512)."),
    ] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts of the layer, instead of the shape's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Time one routed-expert layer for M tokens beside the limits of memory and arithmetic, both measured too."""
    progress = Console(stderr=True)

    def shown(row: Row) -> None:
        progress.print(f"M={row.M} {row.isa} {row.threads} threads: {row.us:.0f} us", highlight=False)

    result = bench_kernel(shape, threads, isa, tokens or TOKENS, experts, shown)
    if as_json:
        print(json.dumps(result))
        return
    sizes = ", ".join(f"{name.replace('_', '-')} {size}" for name, size in result["shape"].items())
    print(f"{result['machine']['cpu']}: {sizes}")
    table = Table()
    for name in ("M", "isa", "threads", "us", "GB/s", "of reads", "GOP/s", "of peak", "of the nearer limit"):
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
    Console().print(table, markup=False)
