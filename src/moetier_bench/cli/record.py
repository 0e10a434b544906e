"""`moetier trace record`: a server that is asked evaluation sets while it records which experts they route to."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated

import typer

from moetier.cli import serve
from moetier.cli.trace import show
from moetier.launch.command import ServeRequest, served_name, url_from_here
from moetier.launch.keys import keys_of
from moetier.settings import Settings
from moetier_bench.eval.ask import Server, evaluate
from moetier_bench.eval.items import load_sets
from moetier_bench.server import free_port


def record(
    context: typer.Context,
    model: serve.Model,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="The new file.")],
    store: serve.StoreFolder,
    sets: Annotated[Path, typer.Option(help="Folder of evaluation sets, whose items are asked.")] = Path("models/eval"),
    task: Annotated[list[str] | None, typer.Option(help="A set to ask; repeat it for more (default: all).")] = None,
    items: Annotated[int, typer.Option(min=1, help="The most items of each set.")] = 8,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 256,
    dram_records: Annotated[str, typer.Option(help="As for `moetier serve`; it does not change the trace.")] = "auto",
) -> None:
    """Serve MODEL, ask the items of evaluation sets, write the trace, end. What follows `--` goes to vLLM.

    To record other traffic, use `moetier serve --record TRACE`.
    """
    of_sets = groupby(load_sets(sets, task or []), key=lambda item: item.task)
    questions = [item for _, of_set in of_sets for item in islice(of_set, items)]
    settings = Settings.parse({"store": store, "dram_records": dram_records, "record_trace": trace})
    request = ServeRequest(
        model=model,
        settings=settings,
        port=free_port(),
        log_file=trace.with_name(f"{trace.name}.log"),
        extra=tuple(context.args),
    )
    keys, warnings = keys_of(None, None, request.api_keys)
    request = replace(request, api_keys=keys)

    def ask() -> None:
        key = keys[0] if keys else None
        server = Server(f"{url_from_here(request)}/v1", served_name(request), key, max_tokens)
        evaluate(server, questions, concurrency)
        os.kill(os.getpid(), signal.SIGINT)  # as a person would end the server

    serve.start(request, on_ready=ask, notes=warnings)
    show(trace)
