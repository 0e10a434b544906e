"""The machine's rates, each measured the way that moetier uses that part."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from moetier.contract import RecordLayout
from moetier.doctor.judge_rates import require_possible
from moetier.doctor.measure.cpu import measure_dram, measure_kernel
from moetier.doctor.measure.disk import measure_disk
from moetier.doctor.measure.gpu import measure_links
from moetier.doctor.measure.kernel import parse_shape
from moetier.doctor.measure.others import Others
from moetier.errors import SettingsError
from moetier.machine.facts import DramRate, Machine, Rates
from moetier.machine.limits import serving_threads

ATTEMPTS = 3


def _best(before: tuple[DramRate, ...], now: tuple[DramRate, ...]) -> tuple[DramRate, ...]:
    """For each number of threads the faster of two readings."""
    fastest = {rate.threads: rate for rate in before}
    return tuple(max(rate, fastest.get(rate.threads, rate), key=lambda one: one.bytes_per_s) for rate in now)


def measure(machine: Machine, shape: str, report: Callable[[str], None] = lambda line: None) -> Rates:
    """Measure everything that `machine` has: tens of seconds during which nothing else should run.

    Parameters
    ----------
    machine
        Its facts; the disk's rates are those of the folder that they name.
    shape
        A name of `kernel.SHAPES`, or hidden,intermediate,experts,top_k: of which size records are.
    report
        Called with one line before each part.

    """
    stride = RecordLayout.of(parse_shape(shape)).stride
    cpu, disk = machine.cpu, machine.disk
    # What may be impossible comes first: a build of torch without CUDA, a disk without room.
    if machine.gpus:
        report(f"copies of {len(machine.gpus)} devices")
    links = measure_links(machine.gpus)
    if disk:
        report(f"reading records of {stride / 1e6:.1f} MB from {disk.path}")
    disk_read = measure_disk(disk, stride) if disk else ()
    others = Others(cpu.allowed)
    threads = serving_threads(cpu.allowed, beside_device=bool(machine.gpus))
    dram_read: tuple[DramRate, ...] = ()
    for attempt in range(ATTEMPTS):
        report(f"reading DRAM with 1 to {len(cpu.allowed)} threads")
        dram_read = _best(dram_read, measure_dram(cpu))
        report(f"the CPU kernel, {threads} threads, shape {shape}")
        kernel = measure_kernel(shape, threads)
        found = Rates(identity=machine.identity, dram_read=dram_read, kernel=kernel)
        try:
            require_possible(found, "rates measured now")
            break
        except SettingsError:  # a shared machine's memory was faster in one second than in another
            if attempt == ATTEMPTS - 1:
                raise
    return Rates(
        identity=machine.identity,
        others_cpus=others.cpus(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        dram_read=dram_read,
        kernel=kernel,
        host_to_device=links.host_to_device,
        device_to_host=links.device_to_host,
        device_copy=links.device_copy,
        disk_read=disk_read,
    )
