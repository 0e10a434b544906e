"""The machine's limits, measured with the threads and instructions that the kernels use."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from moetier.kernels.cpu import _native
from moetier.kernels.cpu.isa import choose_isa
from moetier.kernels.cpu.pool import ThreadPool


def read_bandwidth(pool: ThreadPool, memory: NDArray[Any], isa: str | None = None) -> float:
    """Bytes a second at which the pool's threads read `memory` once: C-contiguous, larger than the caches."""
    return _native.read_rate(pool.native, choose_isa(isa), memory)


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
