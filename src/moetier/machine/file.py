"""Reading the file that `moetier doctor --json` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from moetier.errors import SettingsError
from moetier.files import read_small
from moetier.machine.facts import Fact, Machine, Rates

LARGEST = 4 << 20
"""Bytes; a machine's facts are a few KiB."""

T = TypeVar("T", bound=Fact)


def read_machine(path: Path) -> Machine:
    """Read what `doctor --json` wrote; SettingsError for a file that is none."""
    return _read(path, Machine, "a machine's facts", "moetier doctor --json")


def read_rates(path: Path) -> Rates:
    """The rates of a file: those of a machine's facts, or rates alone; SettingsError for a file that is neither."""
    expected, command = "measured rates", "moetier doctor --measure --json"
    try:
        rates = read_machine(path).rates
    except SettingsError:
        return _read(path, Rates, expected, command)
    if rates is None:
        raise _other(path, expected, "none", command)
    return rates


def _read(path: Path, kind: type[T], expected: str, command: str) -> T:
    data = read_small(path, LARGEST)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _other(path, expected, f"{where + ': ' if where else ''}{first['msg']}", command) from None


def _other(path: Path, expected: str, found: str, command: str) -> SettingsError:
    return SettingsError(f"{path}: expected {expected}, found {found}; write it anew with `{command}`")
