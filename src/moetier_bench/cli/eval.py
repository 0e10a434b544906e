"""`moetier eval`: ask evaluation sets over the OpenAI API; `moetier eval compare`: two results, item by item."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from moetier import __version__
from moetier.launch.keys import keys_of
from moetier_bench.eval.ask import Server, evaluate, model_of
from moetier_bench.eval.compare import Comparison, compare
from moetier_bench.eval.items import Item, Text, load_sets
from moetier_bench.eval.report import Report

app = typer.Typer(help="Score a served model on evaluation sets, over the OpenAI API at temperature 0.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="Where the API is.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="Name of the model (default: the one that is served).")] = None,
    task: Annotated[list[str] | None, typer.Option(help="A set to ask; repeat it for more (default: all).")] = None,
    sets: Annotated[Path, typer.Option(help="Folder of the sets, TASK.jsonl.")] = Path("models/eval"),
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer, thinking included.")] = 256,
    api_key: Annotated[str | None, typer.Option(help="Key of the server (or VLLM_API_KEY).")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the server's keys; the first is used.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write every item's result to this file, for compare.")] = None,
    as_json: Json = False,
) -> None:
    """Ask the sets and score the answers exactly."""
    if context.invoked_subcommand is not None:
        return
    items = load_sets(sets, task or [])
    keys, warnings = keys_of(api_key, api_key_file)
    for line in warnings:
        typer.echo(line, err=True)
    key = keys[0] if keys else None
    server = Server(url, model or model_of(url, key), key, max_tokens)
    start = time.monotonic()
    with _progress(items) as step:
        results = evaluate(server, items, concurrency, step)
    about = {
        "moetier": __version__,
        "url": url,
        "model": server.model,
        "concurrency": concurrency,
        "max_tokens": max_tokens,
        "seconds": round(time.monotonic() - start, 3),
    }
    report = Report(about, tuple(results))
    if out is not None:
        report.save(out)
    if as_json:
        print(json.dumps({**about, **report.summary()}))
    else:
        _show_scores(report)


@app.command("compare")
def compare_files(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A file of `moetier eval --out`.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another, of the same items.")],
    as_json: Json = False,
) -> None:
    """Pair two results: items that only one has right, and McNemar's exact p."""
    comparison = compare(Report.load(a), Report.load(b))
    if as_json:
        print(json.dumps(comparison.as_dict()))
    else:
        _show_comparison(comparison, a, b)


@contextmanager
def _progress(items: list[Item | Text]) -> Iterator[Callable[[Item | Text], None]]:
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        counts = {name: sum(item.task == name for item in items) for name in dict.fromkeys(i.task for i in items)}
        tasks = {name: bar.add_task(name, total=count) for name, count in counts.items()}
        yield lambda item: bar.advance(tasks[item.task])


def _show_scores(report: Report) -> None:
    console = Console()
    table = Table("task", "score", "correct", "no thinking", "thinking", "too long")
    for score in report.scores():
        counts = (str(count) for count in (score.all, score.without_thinking, score.with_thinking))
        table.add_row(score.task, f"{score.all.score:.3f}", *counts, str(score.skipped or ""))
    texts = Table("texts", "read", "tokens", "nats/token", "perplexity", "bits/byte", "too long")
    for loss in report.losses():
        numbers = (f"{loss.loss:.4f}", f"{loss.perplexity:.3f}", f"{loss.bits_per_byte:.4f}")
        texts.add_row(loss.task, str(loss.texts), f"{loss.tokens:,}", *numbers, str(loss.skipped or ""))
    for shown in (table, texts):
        if shown.row_count:
            console.print(shown, markup=False)
    console.print(f"{report.about['model']} at {report.about['url']}, {report.about['seconds']:.1f} s", markup=False)


def _show_comparison(comparison: Comparison, a: Path, b: Path) -> None:
    table = Table("task", "items", "A", "B", "only A", "only B", "p")
    for paired in comparison.tasks:
        counts = (paired.items, paired.correct_a, paired.correct_b, len(paired.only_a), len(paired.only_b))
        table.add_row(paired.task, *(str(count) for count in counts), f"{paired.p:.3g}")
    texts = Table("texts", "items", "A nats/token", "B nats/token", "B - A, mean", "standard error")
    for pair in comparison.texts:
        losses = (
            f"{pair.loss_a:.5f}",
            f"{pair.loss_b:.5f}",
            f"{pair.difference:+.5f}",
            f"{pair.standard_error or 0:.5f}",
        )
        texts.add_row(pair.task, str(pair.texts), *losses)
    console = Console()
    console.print(f"A: {a}\nB: {b}", markup=False, highlight=False)
    for shown in (table, texts):
        if shown.row_count:
            console.print(shown, markup=False)
    for total in comparison.tasks[-1:]:
        for name, only in (("A", total.only_a), ("B", total.only_b)):
            if only:
                console.print(f"only {name} is right: {', '.join(only)}", markup=False)
    if comparison.unpaired:
        console.print(f"{comparison.unpaired} items are in one file only and were left out")
