"""The disk tier: a pool of explicit reads, each checked against the record's checksum. Never a page fault."""

from __future__ import annotations

import errno
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier, Lock

import numpy as np
from numpy.typing import NDArray

from moetier.errors import RecordReadError, SettingsError
from moetier.kernels.cpu.mailbox import Alone
from moetier.residency.part import Part
from moetier.store.files import open_to_read
from moetier.store.heal import Healer
from moetier.store.store import Store

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""A record that reads wrongly once is read once more before it is given up."""


@dataclass
class DiskCounters:
    """What the disk tier did since the start."""

    reads: int = 0
    bytes: int = 0
    retries: int = 0


class DiskReader:
    """Reads records of a store into memory that the caller owns.

    Reads bypass the page cache (O_DIRECT) so that a record is not held in memory twice; a file system that refuses it
    is read through the page cache, which one warning says. A record that reads wrongly is read again, then healed
    where there is a healer. Of each record, only the part of this rank is read, and its slices are checked.
    In a forked child its threads do not exist, and `submit` raises RuntimeError: open one there.
    """

    def __init__(self, store: Store, threads: int, healer: Healer | None = None, part: Part | None = None) -> None:
        self._store = store
        self.part = part or Part(store.manifest.layer_geometry)
        self._healer = healer
        self._files: list[int] = []
        self.direct = True
        for layer in range(len(store.manifest.layers)):
            self._files.append(self._open(store.record_file(layer)))
        self._pool = self._start(threads)
        self._owner = os.getpid()
        self._lock = Lock()
        self.counters = DiskCounters()

    def _open(self, path: Path) -> int:
        if self.direct:
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    return open_to_read(path)  # which says what is wrong
                self.direct = False
                logger.warning("%s: the file system refuses O_DIRECT; records are read through the page cache", path)
        return open_to_read(path)

    @staticmethod
    def _start(threads: int) -> ThreadPoolExecutor:
        """A pool with all its threads: a step must not be the one to find that none can be had."""
        pool = ThreadPoolExecutor(threads, thread_name_prefix="moetier-disk")
        together = Barrier(threads)
        try:
            wait([pool.submit(together.wait) for _ in range(threads)])
        except BaseException as error:  # also on Ctrl-C: Python's end waits for threads that wait for each other
            together.abort()
            pool.shutdown()
            if not isinstance(error, RuntimeError):
                raise
            raise SettingsError(
                f"expected to start {threads} threads that read the store, found: {error}; set disk_threads lower, or "
                "raise the limit on processes or memory"
            ) from error
        return pool

    def alone(self, stuck_ms: int) -> Alone:
        """Return what the mailbox reads records with by itself, as `read` does; valid until `close`."""
        part, layout = self.part, self._store.layout
        return Alone(
            files=self._files,
            sums=[self._store.checksums(layer) for layer in range(len(self._files))],
            stride=self._store.manifest.record_stride,
            start=part.start,
            bytes=part.room,
            shift=part.shift,
            used=part.end - part.begin,
            slices=layout.slices,
            first_slice=part.first,
            slice_bytes=layout.slice_bytes,
            stuck_ms=stuck_ms,
        )

    def submit(self, layer: int, expert: int, out: NDArray[np.uint8]) -> Future[None]:
        """Start reading a record into `out`, uint8 [room], 4 KiB-aligned. `out` belongs to the read until it ends."""
        if os.getpid() != self._owner:  # no thread would ever take it up
            raise RuntimeError("the disk reader was opened before a fork; open one in this process")
        return self._pool.submit(self.read, layer, expert, out)

    def read(self, layer: int, expert: int, out: NDArray[np.uint8]) -> None:
        """Read a record and check it; RecordReadError if it is wrong on every attempt and cannot be healed."""
        if not self._files:
            raise RuntimeError("the disk reader is closed")
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                with self._lock:
                    self.counters.retries += 1
                logger.warning("%s; reading it again", problem)
            problem = self._attempt(layer, expert, out)
            if not problem:
                with self._lock:
                    self.counters.reads += 1
                    self.counters.bytes += out.size
                return
        problem = f"{problem} ({ATTEMPTS} attempts)"
        if self._healer is None:
            raise RecordReadError(
                f"{problem}. Nothing was computed from it. Run `moetier store verify {self._store.path}`, and build "
                "the store again into another folder if the disk is sound."
            )
        if self.part.ranks == 1:
            self._healer.heal(layer, expert, problem, out)
            return
        whole = np.empty(self._store.layout.stride, np.uint8)
        self._healer.heal(layer, expert, problem, whole)
        out[:] = whole[self.part.start :][: out.size]

    def _attempt(self, layer: int, expert: int, out: NDArray[np.uint8]) -> str:
        where = (
            f"layer {self._store.manifest.layers[layer].number}, expert {expert} in {self._store.record_file(layer)}"
        )
        offset, done = self._store.offset(expert) + self.part.start, 0
        try:
            while done < out.size:
                count = os.preadv(self._files[layer], [out.data[done:]], offset + done)
                if count == 0:
                    return f"{where}: the file ends {out.size - done} bytes before the record does"
                done += count
        except OSError as error:
            return f"{where}: {error.strerror}"
        part = self.part
        wrong = self._store.problem(layer, expert, out[part.shift : part.shift + part.end - part.begin], part.first)
        return f"{where}: {wrong}" if wrong else ""

    def close(self) -> None:
        """Wait for the reads in flight and close the files."""
        self._pool.shutdown(wait=True)
        for file in self._files:
            os.close(file)
        self._files.clear()
