"""The command line `moetier`: one verb a file, JSON on standard output with --json, errors in one piece."""

from __future__ import annotations

import sys

import typer

from moetier.cli import bench, identity, serve, store, version
from moetier.cli import eval as evaluation
from moetier.errors import MoetierError

app = typer.Typer(
    name="moetier",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve Mixture-of-Experts models that do not fit the GPU: the same bits wherever an expert lives.",
)
app.add_typer(store.app, name="store")
app.add_typer(evaluation.app, name="eval")
app.add_typer(bench.app, name="bench")
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(serve.serve)
app.command("identity")(identity.identity)
app.command("version")(version.version)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except MoetierError as error:
        print(f"moetier: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
