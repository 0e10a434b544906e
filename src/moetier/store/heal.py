"""Healing: a record whose bytes went bad is built again from the checkpoint, used, and written back."""

from __future__ import annotations

import errno
import logging
import os
import threading

import numpy as np
from numpy.typing import NDArray

from moetier.errors import CheckpointError, RecordReadError
from moetier.files import write_all
from moetier.store.checkpoint import Checkpoint
from moetier.store.store import Store

logger = logging.getLogger(__name__)


class Healer:
    """Rebuilds records of `store` from the checkpoint that it was built from.

    A record is believed only if it has the checksum that the store holds for it, so a checkpoint that was damaged or
    exchanged meanwhile heals nothing. It is written back only into the very file that it was read from: the folder may
    be another store's by now. A kill while a record is written back leaves a bad record, which the next read finds and
    heals again.
    """

    def __init__(self, store: Store, checkpoint: Checkpoint) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._said = False
        self.healed = 0
        """Records healed since the start, on the disk or in memory alone."""

    def heal(self, layer: int, expert: int, problem: str, out: NDArray[np.uint8], file: int | None = None) -> bool:
        """Fill `out`, uint8 [stride], with the right record; RecordReadError if the checkpoint does not give it.

        problem says what was wrong with the record on the disk, for the log; file is the descriptor that it was read
        from. Gives whether the record is right on the disk too.
        """
        self.rebuild(layer, expert, problem, out)
        with self._lock:
            return self._write_back(
                layer, expert, problem, out, self._store.descriptor(layer) if file is None else file
            )

    def rebuild(self, layer: int, expert: int, problem: str, out: NDArray[np.uint8]) -> None:
        """As `heal`, and leave the disk alone: where it could not be read, writing to it is no remedy."""
        try:
            self._store.layout.pack(self._checkpoint.read_expert(layer, expert), out)
        except CheckpointError as error:
            raise RecordReadError(f"{problem}; it cannot be healed: {error}") from error
        if wrong := self._store.problem(layer, expert, out):
            raise RecordReadError(
                f"{problem}; it cannot be healed: the checkpoint {self._checkpoint.path} gives {wrong}. Restore the "
                "checkpoint or build the store again into another folder"
            )
        with self._lock:
            self.healed += 1

    def _write_back(self, layer: int, expert: int, problem: str, record: NDArray[np.uint8], file: int) -> bool:
        """The record in memory is right either way, so a disk that does not take it is said once."""
        try:
            fd = os.open(self._store.record_file(layer), os.O_WRONLY | os.O_CLOEXEC)
            try:
                if not os.path.sameopenfile(fd, file):
                    raise FileNotFoundError(errno.ENOENT, "the file was replaced since it was opened")
                write_all(fd, record.data, self._store.offset(expert))
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            logger.log(
                logging.DEBUG if self._said else logging.WARNING,
                "%s; healed in memory, but not written back: %s. Such records come from the checkpoint at every read, "
                "which is slower and not said again",
                problem,
                error.strerror,
            )
            self._said = True
            return False
        logger.warning("%s; healed from the checkpoint and written back", problem)
        return True
