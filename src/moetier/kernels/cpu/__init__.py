"""The CPU kernels of the contract: routed experts run from their records, bit for bit as the oracle says."""

from moetier.errors import NotBuiltError

try:
    from moetier.kernels.cpu import _native  # noqa: F401  # every module below needs it
except ImportError as error:
    raise NotBuiltError(
        f"the compiled kernels are not in this installation ({error}): it can plan, and nothing else; install moetier "
        "with a C++20 compiler (`pip install .` in a checkout), or from a wheel for this system"
    ) from error

from moetier.kernels.cpu.experts import CpuExperts
from moetier.kernels.cpu.isa import ISA_VARIABLE, available_isas
from moetier.kernels.cpu.measure import fastest_read, integer_peak, read_bandwidth, start_time
from moetier.kernels.cpu.pool import ThreadPool

__all__ = [
    "ISA_VARIABLE",
    "CpuExperts",
    "ThreadPool",
    "available_isas",
    "fastest_read",
    "integer_peak",
    "read_bandwidth",
    "start_time",
]
