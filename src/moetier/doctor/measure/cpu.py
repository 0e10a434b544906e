"""DRAM reads per thread count, and our kernel with the threads that it will have."""

from __future__ import annotations

import statistics

import numpy as np

from moetier.doctor.measure.kernel import bench_kernel, parse_shape
from moetier.errors import SettingsError
from moetier.kernels.cpu import ThreadPool, fastest_read, read_bandwidth
from moetier.machine import limits as machine
from moetier.machine.facts import Cpu, DramRate, KernelRate
from moetier.tiers.pages import map_touched

READ_BYTES = 1 << 30
"""Read at a time: beyond every last-level cache but those of the largest servers."""
LEAST_READ_BYTES = 64 << 20
MEMORY_SHARE = 0.25
"""Share of the available memory that the reading may take."""
READS = 7
EXPERTS = 128
"""Records of the layer that the kernel is timed with: beyond the caches, and fewer than a model has."""
TOKENS = (1, 2, 4, 8, 16, 64, 512)


def thread_counts(cpu: Cpu) -> tuple[int, ...]:
    """Powers of two, the physical cores, the default and all CPUs."""
    most = len(cpu.allowed)
    counts = {1 << power for power in range(most.bit_length())} | {cpu.physical_cores or most, cpu.threads, most}
    return tuple(sorted(count for count in counts if count <= most))


def measure_dram(cpu: Cpu) -> tuple[DramRate, ...]:
    """Median of several reads of memory that lies as records do: on the same pages and NUMA nodes."""
    size = min(READ_BYTES, int(machine.memory().available * MEMORY_SHARE))
    if size < LEAST_READ_BYTES:
        raise SettingsError(
            f"expected {LEAST_READ_BYTES >> 20} MiB of memory to measure with, found {size >> 20} MiB (a quarter of "
            "what is available); stop other processes"
        )
    memory = np.frombuffer(map_touched(size), np.uint8)[:size]
    rates = []
    for count in thread_counts(cpu):
        pool = ThreadPool(count, cpu.allowed)
        way = fastest_read(pool, memory)
        speed = statistics.median(read_bandwidth(pool, memory, way) for _ in range(READS))
        rates.append(DramRate(threads=count, bytes_per_s=speed))
        pool.close()
    return tuple(rates)


def measure_kernel(shape: str, threads: int) -> tuple[KernelRate, ...]:
    """Calls of the routed-expert layer with random routing, from one token to a prompt's chunk; last, one token of one
    expert, as a miss is.
    """
    geometry = parse_shape(shape)
    record = 3 * geometry.hidden * geometry.intermediate * 17 / 32
    experts = min(EXPERTS, geometry.experts)
    alone = f"{geometry.hidden},{geometry.intermediate},{experts},1"
    rows = bench_kernel(shape, [threads], tokens=TOKENS, experts=experts)["rows"]
    rows += bench_kernel(alone, [threads], tokens=(1,), experts=experts)["rows"]
    return tuple(
        KernelRate(
            isa=row["isa"],
            threads=row["threads"],
            hidden=geometry.hidden,
            intermediate=geometry.intermediate,
            tokens=row["M"],
            experts=row["gbps"] * 1e3 * row["us"] / record,
            seconds=row["us"] / 1e6,
            bytes_per_s=row["gbps"] * 1e9,
            ops_per_s=row["gops"] * 1e9,
            peak_ops_per_s=row["peak_gops"] * 1e9,
        )
        for row in rows
    )
