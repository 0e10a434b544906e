"""Counters of the layers since the start: plain numbers that only grow, one set a layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass
class Checks:
    """Checks of a sentinel since the start. Each field has one writing thread."""

    records: int = 0
    """Records whose bytes were compared with their checksums where they lie."""
    rounds: int = 0
    """Times that every record was."""
    calls: int = 0
    """Rows of calls that were computed again."""
    wrong_records: int = 0
    wrong_calls: int = 0
    us: float = 0
    """CPU time of it, in microseconds."""


@dataclass
class Counters:
    """Counters of one layer. Each field has one writing thread; readers take what they see. Times in microseconds.

    A hit or a miss is one distinct expert of one call, as its bytes are needed once however many tokens route to it.
    """

    calls: int = 0
    tokens: int = 0
    pairs: int = 0
    hits: int = 0
    """Experts found in the fastest tier of the process: device slots, or DRAM where there are none."""
    misses: int = 0
    """Experts that were not: computed by the CPU or streamed, after a read from disk where DRAM lacks them too."""
    device_reads: int = 0
    """Experts that the device computed from their slots."""
    dram_reads: int = 0
    """Experts taken from DRAM, by the CPU or by the link."""
    disk_reads: int = 0
    """Experts read from disk for a call (not those of the start)."""
    dram_fills: int = 0
    """Records read from disk that then stayed in a slot of the DRAM tier."""
    slot_fills: int = 0
    """Records copied into spare device slots."""
    streamed_bytes: int = 0
    """Bytes of records copied to the device to be used once."""
    cpu_us: float = 0
    """Time that the CPU's kernels took."""
    wait_us: float = 0
    """Time that a call waited for a lower tier: the CPU for the disk, the device for the CPU."""

    @property
    def hit_rate(self) -> float:
        """Share of hits, 0 to 1; 1 before the first call."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0

    @classmethod
    def total(cls, parts: Iterable[Counters]) -> Counters:
        """The sum of many."""
        columns = zip(*map(astuple, (cls(), *parts)), strict=True)
        return cls(*(sum(column) for column in columns))

    def since(self, before: Counters) -> Counters:
        """Return what was counted after `before` was."""
        return Counters(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))
