"""The machine as numbers with their origin: from `moetier doctor --json`, or from a few words such as 4x32GB.

A rate is measured (doctor --measure), stated (by the user), or nominal: taken from the parts' data sheets, or assumed
from their size. The origin decides how far off it may be, and is printed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moetier.budget import GIB
from moetier.contract.record import RecordLayout
from moetier.errors import SettingsError
from moetier.machine.facts import Cpu, Gpu, Machine, Memory, Rates
from moetier.plan.cards import Card, card_named, usual_card

TAKEN_FOR = " card, taken for "
"""In the name of a card that is only described by its memory."""
NO_GPU = "no GPU"
"""Why a rate of a device is known where there is none: something has to stand there."""
MEASURED, STATED, NOMINAL, ASSUMED = 0.05, 0.10, 0.15, 0.30
"""Relative spread of a rate by its origin."""


@dataclass(frozen=True)
class Known:
    """A number, how far it may be off (relative), and where it comes from."""

    value: float
    spread: float
    why: str


LANE_GBPS = {2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""PCIe's payload in GB/s a lane, before packet headers."""
LINK_SHARE = 0.87
"""Share of that which copies from pinned memory reach: 54.5 of 63 GB/s on PCIe 5 x16 (docs/device-kernels.md)."""
COPY_SHARE = 0.875
"""Share of device memory's nominal rate that copies in it reach: 4.2 of 4.8 TB/s, H200 (docs/device-kernels.md)."""
DDR = {"DDR3": 1866, "DDR4": 3200, "DDR5": 4800}
DRAM_SHARE = 0.80
"""Share of the channels' nominal rate that reads from many threads reach. Assumed; doctor --measure replaces it."""
KERNEL_SHARE = 0.85
"""Share of the reads' rate that the CPU's kernel reaches beyond CALL. Ours reach 0.94 of 134 GB/s on 16 cores, 0.92 of
what reads reach in a server's own measurement at its start (docs/performance.md, docs/hybrid.md); doctor --measure
replaces it."""
CALL = 50e-6
"""Seconds of a call to the kernel beyond its bytes: threads start and end, the first bytes arrive. Published: about 130
us for a layer with a miss, 18.8 MB over eight channels of DDR5, of unknown speed. doctor --measure replaces it."""
SERVER_RAM = 192 * GIB
"""From here on, RAM is taken to be on eight channels, below on two."""
DEFAULT_DISK = 5e9


@dataclass(frozen=True)
class Hardware:
    """Rates in bytes (or operations) a second, sizes in bytes. Those of GPUs are of one of `gpus` equal ones."""

    gpus: int
    gpu_name: str
    gpu_bytes: int
    ram_bytes: int
    disk_bytes: int | None
    gpu_rate: Known
    gpu_ops: Known
    link_rate: Known
    """Host to one device, all devices copying at once."""
    dram_rate: Known
    """Reads by many threads, or by all links."""
    cpu_rate: Known
    """Bytes of records that the CPU's kernel computes with, one token an expert, beyond `cpu_call`."""
    cpu_call: Known
    """Seconds of one call of it, whatever it computes."""
    cpu_ops: Known
    disk_rate: Known
    identity: str


def hardware_of(machine: Machine, record: RecordLayout | None = None) -> Hardware:
    """The numbers of a machine; SettingsError where its GPUs differ in memory."""
    gpus, rates = machine.gpus, machine.rates or Rates(identity=machine.identity)
    if len({round(gpu.memory_bytes / GIB) for gpu in gpus}) > 1:
        sizes = ", ".join(f"{gpu.memory_bytes / GIB:.0f} GiB" for gpu in gpus)
        raise SettingsError(
            f"expected GPUs of one size, found {sizes}; hide the others (CUDA_VISIBLE_DEVICES), or plan for the equal "
            "ones in words (--gpus and --ram)"
        )
    sheet = sheet_of(gpus[0]) if gpus else None
    dram = _dram_rate(rates, machine)
    cpu_rate, cpu_call = _cpu_rate(rates, dram, record)
    smallest = min((gpu.memory_bytes for gpu in gpus), default=0)
    return Hardware(
        gpus=len(gpus),
        gpu_name=gpus[0].name if gpus else "none",
        gpu_bytes=smallest,
        ram_bytes=machine.memory.limit_bytes,
        disk_bytes=machine.disk.free_bytes if machine.disk else None,
        gpu_rate=_gpu_rate(rates, sheet),
        gpu_ops=Known(sheet.card.tflops * 1e12, sheet.spread, str(sheet)) if sheet else Known(1e12, NOMINAL, NO_GPU),
        link_rate=_link_rate(rates, gpus, sheet.card if sheet else None),
        dram_rate=dram,
        cpu_rate=cpu_rate,
        cpu_call=cpu_call,
        cpu_ops=_cpu_ops(rates, machine.cpu),
        disk_rate=_disk_rate(rates),
        identity=machine.identity,
    )


@dataclass(frozen=True)
class Sheet:
    """A device's data sheet. stands_in: why it is another card's, where the device's own is not known."""

    card: Card
    stands_in: str = ""

    @property
    def spread(self) -> float:
        return ASSUMED if self.stands_in else NOMINAL

    def __str__(self) -> str:
        return f"data sheet of {self.card.name}{self.stands_in}"


def sheet_of(gpu: Gpu) -> Sheet:
    """The data sheet by name; of a card that is not known, that of its size's usual one, assumed and said so."""
    named = card_named(gpu.name)
    if named is not None:
        return Sheet(named)
    stands_in = "" if TAKEN_FOR in gpu.name else f", assumed: {gpu.name} is not known"
    return Sheet(usual_card(gpu.memory_bytes / GIB), stands_in)


def _gpu_rate(rates: Rates, sheet: Sheet | None) -> Known:
    if sheet is None:
        return Known(1e9, 0.0, NO_GPU)
    if rates.device_copy:
        best = min(rate.bytes_per_s for rate in rates.device_copy)
        return Known(2 * best, MEASURED, "measured copies within the device, reads and writes counted")
    return Known(sheet.card.gbps * COPY_SHARE * 1e9, sheet.spread, f"{COPY_SHARE:.0%} of the {sheet}")


def _link_rate(rates: Rates, gpus: tuple[Gpu, ...], card: Card | None) -> Known:
    if card is None:
        return Known(1e9, 0.0, NO_GPU)
    if rates.host_to_device:
        most = max(rate.at_once for rate in rates.host_to_device)
        slowest = min(rate.bytes_per_s for rate in rates.host_to_device if rate.at_once == most)
        return Known(slowest, MEASURED, f"measured from pinned memory, {most} at once")
    generation = gpus[0].pcie_generation
    width = gpus[0].pcie_width or 16
    known = generation is not None
    rate = LANE_GBPS.get(generation or card.pcie, LANE_GBPS[4]) * width * LINK_SHARE * 1e9
    text = f"PCIe {generation or card.pcie} x{width}, {LINK_SHARE:.0%} of its payload"
    return Known(rate, NOMINAL if known else ASSUMED, text if known else f"assumed {text}")


def _dram_rate(rates: Rates, machine: Machine) -> Known:
    if rates.dram_read:
        best = max(rate.bytes_per_s for rate in rates.dram_read)
        stated = rates.identity == "described"
        return Known(best, STATED if stated else MEASURED, "stated" if stated else "measured reads")
    if rates.kernel:
        return Known(max(rate.bytes_per_s for rate in rates.kernel), MEASURED, "measured kernel")
    channels = 8 if machine.memory.total_bytes >= SERVER_RAM else 2
    return dram_by_channels(f"{channels}xDDR5", assumed=True)


def _cpu_rate(rates: Rates, dram: Known, record: RecordLayout | None) -> tuple[Known, Known]:
    """Return costs of a record and a call: from the measured kernel of the nearest shape, else a share of the reads.

    A call of one expert and one of a token's experts differ in nothing but their bytes.
    """
    single = [rate for rate in rates.kernel if rate.tokens == 1]
    if not single:
        why = f"{KERNEL_SHARE:.0%} of reads from DRAM"
        call = "published: 130 us for a layer with a miss, less its bytes at that rate"
        return Known(dram.value * KERNEL_SHARE, dram.spread + 0.1, why), Known(CALL, 0.5, call)
    inner = record.intermediate if record else 0
    near = min(single, key=lambda rate: abs(rate.intermediate - inner))
    same = [rate for rate in single if (rate.hidden, rate.intermediate) == (near.hidden, near.intermediate)]
    many, one = max(same, key=lambda rate: rate.experts), min(same, key=lambda rate: rate.experts)
    measured = f"measured kernel {many.isa} on {many.threads} threads, one token"
    more = many.seconds - one.seconds
    if many.experts < one.experts + 1 or more <= 0:
        return Known(many.bytes_per_s, MEASURED, measured), Known(CALL, 0.5, "assumed: not measured here")
    whole = many.bytes_per_s * many.seconds / many.experts
    rate = (many.experts - one.experts) * whole / more
    rate, call_s = min(rate, dram.value), one.seconds - one.experts * whole / min(rate, dram.value)
    return Known(rate, MEASURED, measured), Known(max(call_s, 1e-6), 0.2, f"{measured}, of one expert less its bytes")


def dram_by_channels(text: str, assumed: bool = False) -> Known:
    """8xDDR5-4800: channels of 8 bytes a transfer."""
    match = re.fullmatch(r"(\d{1,2})x(DDR[345])(?:-([1-9]\d{2,4}))?", text.upper().replace("X", "x"))
    if match is None or not int(match[1]):
        raise SettingsError(f"memory {text!r}: expected channels such as 8xDDR5-4800, or a rate such as 250GB/s")
    speed = int(match[3] or DDR[match[2]])
    rate = int(match[1]) * speed * 8e6 * DRAM_SHARE
    said = f"{match[1]} channels of {match[2]}-{speed}, {DRAM_SHARE:.0%} of their rate"
    return Known(rate, ASSUMED if assumed else NOMINAL, f"assumed from the size of RAM: {said}" if assumed else said)


def _cpu_ops(rates: Rates, cpu: Cpu) -> Known:
    """Operations a second with many tokens an expert, where the memory no longer limits."""
    if rates.kernel:
        best = max(rates.kernel, key=lambda rate: rate.ops_per_s)
        return Known(best.ops_per_s, MEASURED, f"measured kernel {best.isa}, {best.tokens} tokens")
    return Known(3e11 * cpu.threads, ASSUMED, f"300 GOP/s for each of {cpu.threads} threads (docs/performance.md)")


def _disk_rate(rates: Rates) -> Known:
    if not rates.disk_read:
        return Known(DEFAULT_DISK, ASSUMED, "assumed: an NVMe drive of PCIe 4")
    best = max(rates.disk_read, key=lambda rate: rate.bytes_per_s)
    if rates.identity == "described":
        return Known(best.bytes_per_s, STATED, "stated")
    return Known(best.bytes_per_s, MEASURED, f"measured random reads of records, {best.queue_depth} at once")


def described_cpu(threads: int) -> Cpu:
    return Cpu(model="described", architecture="x86_64", allowed=tuple(range(threads)), threads=threads)


def described_memory(size: int) -> Memory:
    return Memory(total_bytes=size, limit_bytes=size, available_bytes=size)
