"""The disk tier: a pool of explicit reads, each checked against the record's checksum. Never a page fault."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from shlex import quote
from threading import Barrier, Lock

import numpy as np
from numpy.typing import NDArray

from moetier.errors import RecordReadError, SettingsError
from moetier.kernels.cpu.mailbox import Alone
from moetier.store.heal import Healer
from moetier.store.store import Store
from moetier.tiers.part import Part

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""A record that reads wrongly once is read once more before it is given up."""


@dataclass
class DiskCounters:
    """Counters of the disk tier since the start."""

    reads: int = 0
    bytes: int = 0
    retries: int = 0


class DiskReader:
    """Reads records of a store into memory that the caller owns.

    Reads bypass the page cache (O_DIRECT) so that a record is not held in memory twice; a file system that refuses it
    is read through the page cache, which one warning says. A record that reads wrongly is read again, then healed
    where there is a healer; one that cannot be read comes from the checkpoint. Of each record, only the part of this
    rank is read, and its slices are checked.
    In a forked child its threads do not exist, and `submit` raises RuntimeError: open one there.
    """

    def __init__(self, store: Store, threads: int, healer: Healer | None = None, part: Part | None = None) -> None:
        self._store = store
        self.part = part or Part(store.manifest.layer_geometry)
        self._healer = healer
        self._files: list[int] = []
        self.direct = True
        self._lock = Lock()
        self._said: set[tuple[int, int]] = set()
        """Records that stay wrong on the disk, which was said."""
        for layer in range(len(store.manifest.layers)):
            self._files.append(self._open(layer))
        self._pool = self._start(threads)
        self._owner = os.getpid()
        self.counters = DiskCounters()

    def _open(self, layer: int) -> int:
        if self.direct:
            try:
                return self._store.open_records(layer, os.O_DIRECT)
            except OSError as error:
                self._read_through_the_cache(f"{self._store.record_file(layer)}: {error.strerror}")
        return self._store.open_records(layer)

    def _read_through_the_cache(self, why: str) -> None:
        """Give up direct reads, of the files that are open too: what was refused once would be each time."""
        with self._lock:
            if not self.direct:
                return
            for file in self._files:
                fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
            self.direct = False
        logger.warning(
            "%s; the file system refuses O_DIRECT, or reads of 4 KiB: records are read through the page cache, and may "
            "be in memory twice",
            why,
        )

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
            used=part.bytes,
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
        problem, readable = "", True
        for attempt in range(ATTEMPTS):
            if attempt:
                with self._lock:
                    self.counters.retries += 1
                self._say(layer, expert, f"{problem}; reading it again")
            problem, readable = self._attempt(layer, expert, out)
            if not problem:
                with self._lock:
                    self.counters.reads += 1
                    self.counters.bytes += out.size
                return
        problem = f"{problem} ({ATTEMPTS} attempts)"
        if self._healer is None:
            path = quote(str(self._store.path))
            raise RecordReadError(
                f"{problem}. Nothing was computed from it. Check the disk (`moetier store verify {path}` "
                "finds every bad record), remove the file that was named, and run `moetier store build CHECKPOINT "
                f"{path}`, which builds this layer anew"
            )
        if self.part.ranks == 1:
            self._heal(self._healer, layer, expert, problem, readable, out)
            return
        whole = np.empty(self._store.layout.stride, np.uint8)
        self._heal(self._healer, layer, expert, problem, readable, whole)
        out[:] = whole[self.part.start :][: out.size]

    def _heal(
        self, healer: Healer, layer: int, expert: int, problem: str, readable: bool, out: NDArray[np.uint8]
    ) -> None:
        """Fill `out` from the checkpoint. Only a record that was read and is wrong is written anew."""
        if not readable:
            healer.rebuild(layer, expert, problem, out)
            self._say(layer, expert, f"{problem}; its bytes come from the checkpoint, and the store stays as it is")
        elif healer.heal(layer, expert, problem, out, self._files[layer]):
            with self._lock:
                self._said.discard((layer, expert))
            return
        with self._lock:
            self._said.add((layer, expert))

    def _say(self, layer: int, expert: int, text: str) -> None:
        """Warn of a record; of one that stays as it is on the disk once, not at every read."""
        logger.log(logging.DEBUG if (layer, expert) in self._said else logging.WARNING, "%s", text)

    def _attempt(self, layer: int, expert: int, out: NDArray[np.uint8]) -> tuple[str, bool]:
        """Return what is wrong with the record ("": nothing), and whether all its bytes could be read."""
        where = (
            f"layer {self._store.manifest.layers[layer].number}, expert {expert} in {self._store.record_file(layer)}"
        )
        offset, done = self._store.offset(expert) + self.part.start, 0
        try:
            while done < out.size:
                count = self._preadv(layer, out.data[done:], offset + done, where)
                if count == 0:
                    return f"{where}: the file ends {out.size - done} bytes before the record does", False
                done += count
        except OSError as error:
            return f"{where}: {error.strerror}", False
        part = self.part
        wrong = self._store.problem(layer, expert, part.of(out), part.first)
        return (f"{where}: {wrong}" if wrong else ""), True

    def _preadv(self, layer: int, room: memoryview, offset: int, where: str) -> int:
        """Read some; EINVAL of a direct read ends direct reads, since blocks of the disk may be larger than 4 KiB."""
        try:
            return os.preadv(self._files[layer], [room], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._read_through_the_cache(f"{where}: {error.strerror}")
            return os.preadv(self._files[layer], [room], offset)

    def close(self) -> None:
        """Wait for the reads in flight and close the files."""
        self._pool.shutdown(wait=True)
        for file in self._files:
            os.close(file)
        self._files.clear()
