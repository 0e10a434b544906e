"""Judge the measured rates."""

from __future__ import annotations

from collections.abc import Iterator

from moetier.doctor.judge import link_bytes_per_s
from moetier.errors import SettingsError
from moetier.machine.facts import Cpu, DiskRate, Finding, Gpu, Machine, Rates, Verdict

NEAR = 0.95
"""Part of the best from which on thread counts are as good as each other."""
MOST_OTHERS = 0.1
"""Part of the CPUs that others may use while rates are measured."""
OF_LINK = 0.7
"""Part of what the link carries below which copies are called slow: protocol and drivers take the rest."""
SLOW_DISK = 1e9
"""Bytes a second: a missed record of 13 MB would then take longer than a whole step elsewhere."""


MOST_OF_LIMIT = 1.05
"""Share of what memory or arithmetic gives, above which a figure was measured wrongly."""
BEYOND_CACHES = 1 << 30
"""Bytes of records from which on no cache holds them, and the memory is the limit."""


def require_possible(rates: Rates, where: str) -> Rates:
    """The rates; SettingsError where one lies above its physical limit, so that nothing is planned from them."""
    reads = {rate.threads: rate.bytes_per_s for rate in rates.dram_read}
    held = max((rate.experts * 3 * rate.hidden * rate.intermediate * 17 / 32 for rate in rates.kernel), default=0)
    for rate in rates.kernel:
        limits = {"operations": (rate.ops_per_s, rate.peak_ops_per_s)}
        if held >= BEYOND_CACHES and rate.threads in reads:
            limits["bytes"] = (rate.bytes_per_s, reads[rate.threads])
        for what, (found, most) in limits.items():
            if found > MOST_OF_LIMIT * most:
                raise SettingsError(
                    f"{where}: expected the kernel's {what} a second ({rate.isa}, {rate.threads} threads, "
                    f"{rate.tokens} tokens) to be at most {MOST_OF_LIMIT:g} of the limit beside it ({most:.3g}), "
                    f"found {found:.3g}: one of them was measured wrongly; measure anew: moetier doctor --measure"
                )
    return rates


def judge_rates(machine: Machine) -> Iterator[Finding]:
    """One finding for each part that was measured, or one that says that nothing was."""
    rates = machine.rates
    if rates is None:
        yield Finding(about="rates", verdict=Verdict.FINE, text="not measured here yet: moetier doctor --measure")
        return
    if is_busy(machine.cpu, rates):
        yield Finding(
            about="rates",
            verdict=Verdict.SLOW,
            text=f"others used {rates.others_cpus:.1f} of {len(machine.cpu.allowed)} CPUs while these were measured",
            remedy="stop them, and measure again",
        )
    yield from _dram(rates, machine.cpu.threads)
    yield from _kernel(rates)
    for gpu in machine.gpus:
        yield from _link(rates, gpu)
    yield from _disk(rates.disk_read)


def is_busy(cpu: Cpu, rates: Rates) -> bool:
    """Whether others used so much of the CPUs that the rates say nothing."""
    return rates.others_cpus is not None and rates.others_cpus > MOST_OTHERS * len(cpu.allowed)


def _dram(rates: Rates, threads: int) -> Iterator[Finding]:
    if not rates.dram_read:
        return
    best = max(rates.dram_read, key=lambda rate: rate.bytes_per_s)
    fewest = next(rate for rate in rates.dram_read if rate.bytes_per_s >= NEAR * best.bytes_per_s)
    text = ", ".join(f"{rate.threads}: {rate.bytes_per_s / 1e9:.1f}" for rate in rates.dram_read)
    ours = [rate.bytes_per_s for rate in rates.dram_read if rate.threads == threads]
    if ours and ours[0] < NEAR * best.bytes_per_s:
        yield Finding(
            about="dram",
            verdict=Verdict.SLOW,
            text=f"{threads} threads read {ours[0] / 1e9:.1f} GB/s, "
            f"{fewest.threads} would read {fewest.bytes_per_s / 1e9:.1f}",
            remedy=f"serve with --set threads={fewest.threads}",
        )
    yield Finding(about="dram", verdict=Verdict.FINE, text=f"GB/s read by threads: {text}")


def _kernel(rates: Rates) -> Iterator[Finding]:
    for rate in rates.kernel[:1]:
        size = f"hidden {rate.hidden}, intermediate {rate.intermediate}"
        yield Finding(
            about="kernel",
            verdict=Verdict.FINE,
            text=f"{rate.isa}, {rate.threads} threads, {size}, {rate.tokens} token: "
            f"{rate.seconds * 1e3:.2f} ms a layer, {rate.bytes_per_s / 1e9:.1f} GB/s of experts",
        )


def _link(rates: Rates, gpu: Gpu) -> Iterator[Finding]:
    about, link = f"link {gpu.index}", link_bytes_per_s(gpu)
    alone = {rate.at_once: rate for rate in rates.host_to_device if rate.gpu == gpu.index}
    if 1 not in alone:
        return
    speed = alone[1].bytes_per_s
    if link is not None and speed < OF_LINK * link:
        yield Finding(
            about=about,
            verdict=Verdict.SLOW,
            text=f"{speed / 1e9:.1f} GB/s from pinned memory; the link carries {link / 1e9:.1f}",
            remedy="run on the CPUs and memory of the device's own NUMA node; look for a riser or switch in between",
        )
    else:
        yield Finding(about=about, verdict=Verdict.FINE, text=f"{speed / 1e9:.1f} GB/s from pinned memory")
    for count, rate in alone.items():
        if count > 1 and rate.bytes_per_s < OF_LINK * speed:
            yield Finding(
                about=about,
                verdict=Verdict.SLOW,
                text=f"{rate.bytes_per_s / 1e9:.1f} GB/s while {count} devices copy: they share a link or the memory",
                remedy="spread the devices over root ports and sockets",
            )


def _disk(rates: tuple[DiskRate, ...]) -> Iterator[Finding]:
    if not rates:
        return
    best, first = max(rates, key=lambda rate: rate.bytes_per_s), rates[0]
    text = ", ".join(f"{rate.queue_depth}: {rate.bytes_per_s / 1e9:.2f}" for rate in rates)
    if best.bytes_per_s < SLOW_DISK:
        yield Finding(
            about="disk reads",
            verdict=Verdict.SLOW,
            text=f"at most {best.bytes_per_s / 1e9:.2f} GB/s: a missed record of "
            f"{first.record_bytes / 1e6:.1f} MB takes {first.record_bytes / first.bytes_per_s * 1e3:.0f} ms",
            remedy="copy the store to an NVMe disk, or keep all experts in DRAM (--dram-records 100%)",
        )
    through = "" if all(rate.direct for rate in rates) else " (through the page cache)"
    yield Finding(
        about="disk reads",
        verdict=Verdict.FINE,
        text=f"GB/s of {first.record_bytes / 1e6:.1f} MB records by reads in flight: {text}{through}",
    )
