"""The command line in this process, as a scenario's user runs it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from moetier.cli import app


def moetier(*arguments: str | Path) -> str:
    """Run `moetier` with these arguments; returns what it printed. Its errors are raised as they are."""
    done = CliRunner().invoke(app, [*map(str, arguments)], prog_name="moetier")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code:
        raise SystemExit(f"exit code {done.exit_code}: {done.output}")
    return done.output
