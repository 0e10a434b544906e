"""Heat: how often each (layer, expert) was routed, kept across restarts."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetier.errors import MoetierError
from moetier.files import read_small, write_durably

logger = logging.getLogger(__name__)

FORMAT = 1
MAX_BYTES = 64 << 20
"""Far more than the counts of any model need; a larger file is not one of ours."""
LOCK_TRIES = 100
LOCK_PAUSE_SECONDS = 0.02
"""Between them: two seconds in all."""


class Heat:
    """Uses counted per (layer, expert): uint64 [layers, experts].

    Heat is advice: it decides what is read first, never what is computed. So a heat file that is missing, damaged or
    of another checkpoint is said in one warning and replaced at the next save.
    """

    def __init__(self, layers: int, experts: int, identity: str) -> None:
        self.counts: NDArray[np.uint64] = np.zeros((layers, experts), np.uint64)
        self._identity = identity
        self._saved = self.counts.copy()

    @classmethod
    def load(cls, path: Path, layers: int, experts: int, identity: str) -> Heat:
        """Read `path` if it is a heat file of the checkpoint `identity`, else start cold."""
        heat = cls(layers, experts, identity)
        try:
            counts = _read(path, identity, heat.counts.shape)
        except FileNotFoundError:
            return heat
        except (MoetierError, *_UNREADABLE) as error:
            logger.warning("heat file %s is not used (%s); starting cold, it is replaced at the next save", path, error)
            return heat
        heat.counts = counts
        heat._saved = counts.copy()
        return heat

    def add(
        self, layer: int | NDArray[np.intp], experts: NDArray[Any], pairs: NDArray[np.int32], sequences: int = 0
    ) -> None:
        """Count `pairs` int32 [D] of the distinct `experts`, integers [D], of one layer call; or of one call of each of
        several layers, `layer` then being the layer of each, integers [D].

        sequences: those of the step, 0 where it is not known. An expert then counts once a sequence at most, so neither
        a long prompt nor the drafts that a step verifies outweigh decode.
        """
        uses = np.minimum(pairs, sequences) if sequences else pairs
        self.counts[layer, experts] += uses.astype(np.uint64)

    def hottest(self, layer: int, number: int) -> NDArray[np.int32]:
        """The `number` hottest experts of a layer, hottest first; equal heat goes by id."""
        order = np.argsort(-self.counts[layer].astype(np.float64), kind="stable")
        return order[:number].astype(np.int32)

    def save(self, path: Path) -> None:
        """Add what was counted since the last save to the file: a kill leaves the old file or the new one.

        Several processes may save to one file (servers that share a store): each adds its own counts to what the file
        holds by then. Does nothing if nothing was counted, nor where `path` is a device such as /dev/null, or a pipe:
        the new file would take its place.
        """
        if path.exists() and not path.is_file():
            return
        counts = self.counts.copy()
        if np.array_equal(counts, self._saved) and path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent):
            total = self._of_others(path) + (counts - self._saved)
            state = {"format": FORMAT, "identity": self._identity, "counts": total.tolist()}
            write_durably(path, json.dumps(state).encode())
        self._saved = counts

    def _of_others(self, path: Path) -> NDArray[np.uint64]:
        """Return what the file holds now; where it is gone or no use, what we last knew of it."""
        try:
            return _read(path, self._identity, self.counts.shape)
        except (MoetierError, *_UNREADABLE):
            return self._saved


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)


def _read(path: Path, identity: str, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    state = json.loads(read_small(path, MAX_BYTES))
    counts = np.array(state["counts"], np.uint64)
    if state["format"] != FORMAT or state["identity"] != identity or counts.shape != shape:
        raise ValueError("it belongs to another checkpoint or version")
    return counts


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other savers of this folder's heat out; one that hangs, or a file system without locks, is not waited for.

    Then two may save at once: the file is whole, and lacks what one of them counted of late.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_PAUSE_SECONDS)
            except OSError:
                break
        yield
    finally:
        os.close(fd)
