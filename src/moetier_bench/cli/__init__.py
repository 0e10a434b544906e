"""`moetier bench`: recipes measured, results checked, compared and rendered; and this machine's CPU kernels."""

from __future__ import annotations

import typer

from moetier.cli.verbs import group
from moetier_bench.cli import documents, measure, results

app = typer.Typer(
    cls=group({"kernel": "moetier_bench.cli.kernel:kernel"}),
    help="Measure this machine and served models; check, compare and render results.",
    no_args_is_help=True,
)
app.command("list")(documents.list_documents)
app.command("lint")(documents.lint)
app.command("show")(documents.show)
app.command("machine")(documents.machine)
app.command("run")(measure.run)
app.command("check")(results.check)
app.command("compare")(results.compare)
app.command("render")(results.render)
app.command("report")(results.report)
app.command("import")(results.import_file)
app.command("sweep")(measure.sweep)
