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
