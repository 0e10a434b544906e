"""The part of every record that one rank holds: some of its slices, which lie one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moetier.contract import LayerGeometry, RecordLayout
from moetier.contract.record import RECORD_ALIGNMENT
from moetier.errors import SettingsError


@dataclass(frozen=True)
class Part:
    """Rank `rank` of `ranks`: an equal share of the slices of a whole expert's `geometry`.

    A part may start anywhere in the record, and direct reads may not: what is read and kept is the part rounded
    outwards to whole pages (`room` bytes from `start`), in which the part begins `shift` bytes in.
    """

    geometry: LayerGeometry
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.geometry.slices % self.ranks:
            expected = f"expected one that divides the {self.geometry.slices} slices of the store's records"
            if self.ranks & (self.ranks - 1):
                raise SettingsError(f"tensor-parallel size {self.ranks}: {expected}; choose a power of two")
            raise SettingsError(
                f"tensor-parallel size {self.ranks}: {expected}; build another store with "
                f"`moetier store build CHECKPOINT OUT --slices {self.ranks}`"
            )
        assert 0 <= self.rank < self.ranks, f"rank {self.rank} of {self.ranks}"

    @property
    def count(self) -> int:
        """Slices of the part."""
        return self.geometry.slices // self.ranks

    @property
    def first(self) -> int:
        """Its first slice."""
        return self.rank * self.count

    @property
    def narrow(self) -> LayerGeometry:
        """The geometry of a layer whose experts are this part only: what the rank's kernels compute."""
        return replace(self.geometry, intermediate=self.geometry.slice_intermediate * self.count, slices=self.count)

    @cached_property
    def layout(self) -> RecordLayout:
        """Return the layout of the whole record."""
        return RecordLayout.of(self.geometry)

    @property
    def begin(self) -> int:
        """Byte of the record at which the part begins."""
        return self.first * self.layout.slice_bytes

    @property
    def end(self) -> int:
        """Byte after its last one; the record's padding belongs to the last part."""
        last = self.rank == self.ranks - 1
        return self.layout.stride if last else self.begin + self.count * self.layout.slice_bytes

    @property
    def bytes(self) -> int:
        """Bytes of a record that are the part's."""
        return self.end - self.begin

    def of(self, room: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the part in what was read, uint8 [room] -> uint8 [bytes]: what the store's checksums are of."""
        return room[self.shift : self.shift + self.bytes]

    @property
    def start(self) -> int:
        """Byte of the record at which reading starts."""
        return self.begin // RECORD_ALIGNMENT * RECORD_ALIGNMENT

    @property
    def shift(self) -> int:
        return self.begin - self.start

    @property
    def room(self) -> int:
        """Bytes that are read and kept, whole pages."""
        return -(-(self.end - self.start) // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
