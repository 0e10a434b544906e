"""Compare a store's records with the checkpoint, value by value, by a reader that shares nothing with the build's."""

from __future__ import annotations

import os
import random

import numpy as np
from numpy.typing import NDArray

from moetier.checkpoint.shards import pread_into
from moetier.contract import ExpertMatrices, RecordLayout
from moetier.errors import StoreError
from moetier.files import store_errors
from moetier.store.checkpoint import Checkpoint
from moetier.store.describe import LayerFiles
from moetier.store.second import SecondReader
from moetier.store.store import slice_sums
from moetier.store.work import Meter, Report, Workers


class Checker:
    """Compares random experts of each layer, as they lie on the disk, with the checkpoint. `checked` counts them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: RecordLayout,
        count: int,
        pool: Workers,
        progress: Report | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.layout = layout
        self.count = min(count, checkpoint.geometry.experts)
        self.pool = pool
        self.checked = 0
        self._second: SecondReader | None = None
        self._meter = Meter("check", len(checkpoint.moe_layers) * self.count, progress if count else None)

    def check(self, layer: int, files: LayerFiles) -> None:
        """Check one layer; the first code or scale that differs is a StoreError."""
        if not self.count:
            return
        if self._second is None:
            self.checkpoint.require_experts()
            shards = self.checkpoint.shards
            names = [] if shards.index else [shard.path.name for shard in shards.shards]
            self._second = SecondReader(self.checkpoint.path, names, shards.hold)
        chosen = random.sample(range(self.checkpoint.geometry.experts), self.count)
        with store_errors(f"{files.records} cannot be read"):
            fd = os.open(files.records, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self.pool.map(lambda expert: self._compare(layer, expert, fd, files), chosen, self._meter)
            finally:
                os.close(fd)
        self.checked += len(chosen)

    def _compare(self, layer: int, expert: int, fd: int, files: LayerFiles) -> None:
        record = np.zeros(self.layout.stride, np.uint8)
        pread_into(fd, record, expert * self.layout.stride)
        assert self._second is not None
        name = self.checkpoint.moe_layers[layer].name
        difference = first_difference(self.layout.unpack(record), self._second.expert(name, expert))
        if difference is not None:
            raise StoreError(
                f"layer {self.checkpoint.moe_layers[layer].number}, expert {expert}: the store's {difference} differs "
                f"from the checkpoint's; {self._remedy(expert, record, files)}"
            )

    def _remedy(self, expert: int, record: NDArray[np.uint8], files: LayerFiles) -> str:
        """One that went bad spoils its layer; one that is as it was built says that the store is of other weights."""
        sums = np.fromfile(files.sums, "<u8").reshape(-1, self.layout.slices)
        if list(slice_sums(self.layout, record)) != sums[expert].tolist():
            return f"remove {files.records} and run the same command again, which builds this layer anew"
        folder = files.records.parent
        return (
            f"they are as they were built, from other weights than these: remove {folder} and run the same "
            "command again, or build into another folder"
        )


def first_difference(found: ExpertMatrices, wanted: ExpertMatrices) -> str | None:
    """Name and place of the first code or scale that differs, None if all are equal."""
    for matrix in ("gate", "up", "down"):
        for part in ("codes", "scales"):
            differ = np.argwhere(getattr(getattr(found, matrix), part) != getattr(getattr(wanted, matrix), part))
            if differ.size:
                return f"{matrix} {part} at {differ[0].tolist()} ({len(differ)} in all)"
    return None
