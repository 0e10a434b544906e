"""The command line `moetier`: one verb a file, JSON on standard output with --json, errors in one piece."""

from __future__ import annotations

import errno
import os
import sys

import typer

from moetier.cli.terminal import guard
from moetier.cli.verbs import VERBS, group
from moetier.errors import MoetierError
from moetier.folders import NO_TEMPORARY_FOLDER, find_temporary_folder

app = typer.Typer(
    name="moetier",
    cls=group(VERBS),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve Mixture-of-Experts models that do not fit the GPU: the same bits wherever an expert lives.",
)


@app.callback()
def verbs() -> None:
    """Nothing is done before a verb."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main() -> None:
    """Entry point of the console script."""
    stdout_is_open = sys.stdout is not None
    _fill_closed_streams()
    if not stdout_is_open:
        sys.exit("moetier: error: standard output is closed: what was asked for would be lost")
    guard()
    try:
        try:
            find_temporary_folder()
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
        if error.errno == errno.ENOENT and error.filename is None:  # as tempfile says it
            print(f"moetier: error: {NO_TEMPORARY_FOLDER}", file=sys.stderr)
            sys.exit(MoetierError.exit_code)
        if error.filename is None:
            raise
        print(
            f"moetier: error: {error.filename}: {error.strerror}; check the name, its permissions and the disk",
            file=sys.stderr,
        )
        sys.exit(MoetierError.exit_code)


def _fill_closed_streams() -> None:
    """Open what of the standard streams is closed: else the next file that is opened takes its number, and is read or
    written instead of it. What is said on a closed standard error is lost.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(number, True)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 (a descriptor, for all the process's life)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115


def _silence() -> None:
    """Drop the rest of standard output, which cannot be written: nothing more is said of it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
