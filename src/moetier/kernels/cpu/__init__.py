"""The CPU kernels of the contract: routed experts run from their records, bit for bit as the oracle says."""

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
