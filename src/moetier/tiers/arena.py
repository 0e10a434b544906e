"""Room for records in DRAM: one anonymous mapping, page-aligned so that direct reads can land in it."""

from __future__ import annotations

import logging
import mmap
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moetier.errors import SettingsError
from moetier.tiers.pages import HUGE_PAGE, Pages, map_touched, pages_at

logger = logging.getLogger(__name__)


class Arena:
    """`slots` records of `stride` bytes each, allocated and touched at construction: it cannot fail later.

    shift: bytes of a slot before the part of the record that the kernels read (see `Part`).
    """

    _told: ClassVar[bool] = False
    """Whether a log line has said which pages records get."""

    def __init__(self, slots: int, stride: int, shift: int = 0) -> None:
        self.slots = slots
        self.shift = shift
        self.stride = stride
        size = max(slots * stride, mmap.PAGESIZE)
        try:
            self._map = map_touched(size)
        except OSError as error:
            raise SettingsError(
                f"could not allocate {size / 2**30:.2f} GiB of DRAM for {slots} records ({error.strerror}); "
                "set dram_records lower"
            ) from error
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._base = self._bytes.ctypes.data
        if size >= HUGE_PAGE and not Arena._told:
            Arena._told = True
            logger.info("records lie on %s", self.pages)

    @property
    def pages(self) -> Pages:
        """The pages behind the records, as the kernel says now: it may join small ones later."""
        return pages_at(self._base)

    @property
    def all(self) -> NDArray[np.uint8]:
        """The bytes of all slots, one after the other."""
        return self._bytes

    @property
    def extent(self) -> tuple[int, int]:
        """Address and bytes of the mapping that holds all slots."""
        return self._base, len(self._map)

    def address(self, slot: int) -> int:
        """Where the kernels find the record of a slot."""
        return self._base + slot * self.stride + self.shift

    def view(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of a slot, uint8 [stride], writable."""
        return self._bytes[slot * self.stride : (slot + 1) * self.stride]
