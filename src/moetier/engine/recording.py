"""Recorded layer calls: inputs and output bits of real traffic, to be computed again elsewhere and compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from moetier.errors import SettingsError

SUFFIX = ".calls"
MAGIC = 6
"""Bytes with which every array starts."""


@dataclass(frozen=True)
class Call:
    """One layer call: x [T, hidden] bf16 bits, ids and weights [T, top_k], out bf16 bits [T, hidden].

    x is float32 in what older versions wrote of models in float32.
    """

    layer: int
    x: NDArray[Any]
    ids: NDArray[Any]
    weights: NDArray[np.float32]
    out: NDArray[np.uint16]


class Recorder:
    """Appends calls to one file per process in `folder`, which must be new: recordings are never mixed."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise SettingsError(f"record_calls: {folder} exists already; name a new folder") from None
        self._file = (folder / f"{os.getpid()}{SUFFIX}").open("wb")

    def add(self, call: Call) -> None:
        """Write one call, whole."""
        for array in (np.int64(call.layer), call.x, call.ids, call.weights, call.out):
            np.save(self._file, array)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_calls(folder: Path) -> Iterator[Call]:
    """Every call recorded in `folder`; SettingsError if there is none, or what is there is no recording.

    A call cut off by a kill is left out.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise SettingsError(f"{folder}: expected *{SUFFIX} files of a recording, found none")
    none = True
    for path in files:
        with _opened(path) as file:
            while True:
                try:
                    layer, x, ids, weights, out = (np.load(file) for _ in range(5))
                except (EOFError, ValueError) as error:
                    if len(file.read(MAGIC)) == MAGIC:  # a call that was cut off ends with the file
                        raise SettingsError(
                            f"{path}: expected recorded calls to the end of the file, found {error}"
                        ) from error
                    break
                none = False
                yield Call(int(layer), x, ids, weights, out)
    if none:
        raise SettingsError(f"{folder}: expected at least one whole recorded call, found none; record again")


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise SettingsError(f"{path}: expected a file of recorded calls, found: {error.strerror}") from error
