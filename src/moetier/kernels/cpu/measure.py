"""The machine's limits, measured with the threads and instructions that the kernels use."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from moetier.kernels.cpu import _native
from moetier.kernels.cpu.isa import available_isas, choose_isa
from moetier.kernels.cpu.pool import ThreadPool

CONTENDERS = 3
"""Ways that are compared a second time."""
TRIED_BYTES = 1 << 30
"""Bytes of memory that are read to compare ways."""


class ReadWay(NamedTuple):
    """One way to read memory: with an instruction set's registers, in one of the orders of native/cpu/reading.h."""

    isa: str
    order: int


def read_ways(isa: str | None = None) -> list[ReadWay]:
    """Ways with the registers of a kernel set; None: of every width that this machine has."""
    here = available_isas()
    widths = (
        [choose_isa(isa)]
        if isa is not None
        else [here[0], *(name for name in ("avx2", "portable") if name in here[1:])]
    )
    return [ReadWay(width, order) for width in widths for order in range(_native.READ_WAYS)]


def fastest_read(pool: ThreadPool, memory: NDArray[Any], isa: str | None = None) -> ReadWay:
    """The way in which these threads read this memory fastest: which one it is, is the processor's."""
    tried = memory.reshape(-1)[: TRIED_BYTES // memory.itemsize]
    once = {way: read_bandwidth(pool, tried, way) for way in read_ways(isa)}
    best = sorted(once, key=lambda way: once[way])[-CONTENDERS:]
    return max(best, key=lambda way: max(once[way], read_bandwidth(pool, tried, way)))


def read_bandwidth(pool: ThreadPool, memory: NDArray[Any], way: ReadWay | None = None) -> float:
    """Bytes a second at which the pool's threads read `memory` once: C-contiguous, larger than the caches.

    way: None: the fastest, which is looked for first.
    """
    isa, order = way or fastest_read(pool, memory)
    return _native.read_rate(pool.native, isa, order, memory)


def integer_peak(pool: ThreadPool, isa: str | None = None) -> float:
    """Operations a second (a multiply and an add are two) of the kernel set's dot products, without memory."""
    return _native.multiply_rate(pool.native, choose_isa(isa))


def start_time(pool: ThreadPool, idle: float = 0.0) -> float:
    """Seconds from a call until the last of the pool's threads is at work, `idle` seconds after the call before.

    Up to about 100 microseconds of idleness the threads still look for work; later they sleep and must be woken.
    """
    if not 0 <= idle <= 60:
        raise ValueError(f"idle: expected 0 to 60 seconds, found {idle}")
    return _native.start_time(pool.native, idle)
