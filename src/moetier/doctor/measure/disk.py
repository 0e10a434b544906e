"""Random reads of one record each, past the page cache, by as many threads as there are reads in flight."""

from __future__ import annotations

import errno
import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moetier.errors import SettingsError
from moetier.interrupts import interrupts_held
from moetier.machine.facts import Disk, DiskRate

BLOCK = 4096
DEPTHS = (1, 2, 4, 8, 16, 32)
SECONDS = 1.0
"""Seconds of reading at each depth."""
GLANCE = 0.05
"""Seconds between two looks for Ctrl-C."""
LEAST_READS = 8
SPAN = 1 << 30
"""Bytes to read from: more than a disk's own cache."""
PIECE = 16 << 20
FREE_SHARE = 0.1
"""Share of the free space that the file may take."""


@dataclass(frozen=True)
class _Target:
    """Open files to read from with their sizes, and whether reads pass the page cache."""

    files: tuple[tuple[int, int], ...]
    direct: bool


def measure_disk(disk: Disk, record_bytes: int) -> tuple[DiskRate, ...]:
    """Read from the files that lie in the disk's folder (a store's), else from one made for it and removed again.

    record_bytes: of one read, a multiple of 4096. SettingsError where the folder cannot be measured.
    """
    direct = disk.o_direct is not False
    try:
        with _files(Path(disk.path), record_bytes, direct) as files:
            return tuple(
                DiskRate(
                    device=disk.device,
                    queue_depth=depth,
                    record_bytes=record_bytes,
                    bytes_per_s=_rate(_Target(files, direct), depth, record_bytes),
                    direct=direct,
                )
                for depth in DEPTHS
            )
    except OSError as error:
        raise SettingsError(
            f"{disk.path}: the disk cannot be measured ({error.strerror}); name a folder that can be written or one "
            "that holds a store"
        ) from error


def _rate(target: _Target, depth: int, record_bytes: int) -> float:
    """Bytes a second of `depth` readers that each wait for one record at a time."""
    stop, done = threading.Event(), [0] * depth
    start = time.perf_counter()

    def read(reader: int) -> None:
        random_offset = random.Random(reader)  # noqa: S311 (which record comes next is no secret)
        with mmap.mmap(-1, record_bytes) as buffer:
            while not stop.is_set() or done[reader] * depth < LEAST_READS:
                file, size = random_offset.choice(target.files)
                offset = random_offset.randrange((size - record_bytes) // BLOCK + 1) * BLOCK
                _read_record(file, buffer, offset, target.direct)
                done[reader] += 1

    with interrupts_held() as interrupts, ThreadPoolExecutor(depth) as pool:
        try:
            readers = [pool.submit(read, reader) for reader in range(depth)]
            while not interrupts and (left := start + SECONDS - time.perf_counter()) > 0:
                time.sleep(min(left, GLANCE))
        finally:
            stop.set()  # whatever comes: the pool waits for its readers
        for reader in readers:
            reader.result()
    return sum(done) * record_bytes / (time.perf_counter() - start)


def _read_record(file: int, buffer: mmap.mmap, offset: int, direct: bool) -> None:
    view, done = memoryview(buffer), 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "a file became shorter while it was read")
        done += count
    view.release()
    if not direct:
        os.posix_fadvise(file, offset, len(buffer), os.POSIX_FADV_DONTNEED)


@contextmanager
def _files(folder: Path, record_bytes: int, direct: bool) -> Iterator[tuple[tuple[int, int], ...]]:
    """Open files with their sizes: those of the folder that hold a record, else one of random bytes."""
    sizes = {path: path.stat().st_size for path in folder.iterdir() if path.is_file() and os.access(path, os.R_OK)}
    large = {path: size for path, size in sizes.items() if size >= record_bytes}
    with ExitStack() as opened:
        if sum(large.values()) < SPAN:
            made = opened.enter_context(_made_file(folder, record_bytes))
            large = {made: made.stat().st_size}
        files = []
        for path, size in large.items():
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
            opened.callback(os.close, file)
            files.append((file, size))
        yield tuple(files)


@contextmanager
def _made_file(folder: Path, record_bytes: int) -> Iterator[Path]:
    """A file of random bytes, which no disk compresses; SettingsError where there is no room or no right."""
    space = os.statvfs(folder)
    size = min(SPAN, int(space.f_bavail * space.f_frsize * FREE_SHARE)) // PIECE * PIECE
    if size < 2 * record_bytes:
        raise SettingsError(
            f"{folder}: expected room for two records of {record_bytes / 1e6:.1f} MB in {FREE_SHARE:.0%} of the free "
            "space; free some, or name a folder that holds a store"
        )
    chunk = np.random.default_rng().bytes(PIECE)
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name: a kill leaves nothing
        for piece in range(size // PIECE):
            file.write(piece.to_bytes(8, "little") + chunk[8:])
        file.flush()
        os.fsync(file.fileno())
        yield Path(f"/proc/self/fd/{file.fileno()}")
