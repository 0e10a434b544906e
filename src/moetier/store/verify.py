"""Check every checksum of a store."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moetier.errors import RecordReadError, StoreError
from moetier.files import open_to_read
from moetier.store.checkpoint import Checkpoint
from moetier.store.match import compare_some, open_store
from moetier.store.store import Store
from moetier.store.work import Meter, Report, Workers, default_threads


@dataclass(frozen=True)
class BadRecord:
    """A record whose bytes are not those that were written. layer is the checkpoint's number."""

    layer: int
    expert: int
    file: str
    reason: str


@dataclass(frozen=True)
class VerifyReport:
    """Report of a verification. bytes counts the records that were read; seconds is wall time."""

    store: str
    layers: int
    records: int
    bytes: int
    bad: tuple[BadRecord, ...]
    seconds: float


def verify_store(
    path: str | Path,
    *,
    checkpoint: str | Path | None = None,
    threads: int | None = None,
    progress: Report | None = None,
) -> VerifyReport:
    """Read every record from the disk and compare its checksum. Bad records are listed, not raised.

    checkpoint: first make sure that the store was built from it: by its whole content where the build recorded that,
    else by some experts of each layer too. StoreError if it was not.
    """
    start = time.monotonic()
    if checkpoint is not None:
        _check_origin(Path(path), Checkpoint.open(checkpoint))
    bad: list[BadRecord] = []
    local = threading.local()
    with Store.open(path) as store, Workers(threads or default_threads(), "moetier-verify") as pool:
        manifest = store.manifest
        experts = manifest.geometry.experts
        records = len(manifest.layers) * experts
        for layer in range(len(manifest.layers)):
            _forget_pages(store.record_file(layer))

        def job(item: int) -> None:
            layer, expert = divmod(item, experts)
            if not hasattr(local, "record"):
                local.record = np.empty(manifest.record_stride, np.uint8)
            try:
                store.read_record(layer, expert, local.record)
            except RecordReadError as error:
                number = manifest.layers[layer].number
                bad.append(BadRecord(number, expert, str(store.record_file(layer)), str(error)))

        pool.map(job, range(records), Meter("verify", records, progress))
    bad.sort(key=lambda record: (record.layer, record.expert))
    return VerifyReport(
        store=str(path),
        layers=len(manifest.layers),
        records=records,
        bytes=records * manifest.record_stride,
        bad=tuple(bad),
        seconds=time.monotonic() - start,
    )


def _check_origin(path: Path, checkpoint: Checkpoint) -> None:
    with open_store(path, checkpoint) as store:
        wanted = store.manifest.checkpoint.content
        if wanted is None:
            compare_some(store, checkpoint)
        elif wanted != (found := checkpoint.identity(deep=True)):
            raise StoreError(
                f"{path} was built from other weights than {checkpoint.path} holds now: expected content {wanted}, "
                f"found {found}; restore the checkpoint, or build its store into another folder"
            )


def _forget_pages(path: Path) -> None:
    """Drop the file from the page cache, so that the disk is read."""
    fd = open_to_read(path)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
