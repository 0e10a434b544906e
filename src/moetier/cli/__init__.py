"""The command line `moetier`: one verb a file, JSON on standard output with --json, errors in one piece."""

from __future__ import annotations

import errno
import os
import sys

import typer

from moetier.cli import bench, calibrate, doctor, identity, plan, prove, serve, stack, store, trace, version
from moetier.cli import eval as evaluation
from moetier.cli.terminal import guard
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
app.add_typer(trace.app, name="trace")
app.add_typer(stack.app, name="stack")
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(serve.serve)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("calibrate")(calibrate.calibrate)
app.command("identity")(identity.identity)
app.command("prove", context_settings={"allow_extra_args": True})(prove.prove)
app.command("version")(version.version)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main() -> None:
    """Entry point of the console script."""
    if sys.stdout is None:
        sys.exit("moetier: error: standard output is closed: what was asked for would be lost")
    guard()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except MoetierError as error:
        print(f"moetier: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # whoever read us has enough
        _silence()
        sys.exit(1)
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            print(f"moetier: error: cannot write: {error.strerror}; make room where the output goes", file=sys.stderr)
            _silence()
            sys.exit(MoetierError.exit_code)
        if error.filename is None:
            raise
        print(
            f"moetier: error: {error.filename}: {error.strerror}; check the name, its permissions and the disk",
            file=sys.stderr,
        )
        sys.exit(MoetierError.exit_code)


def _silence() -> None:
    """What is left in the buffer of standard output cannot be written: nothing more is said of it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
