"""A machine in a few words, for `moetier plan --gpus 4x32GB --ram 256GB --disk 7GB/s`: the same object as doctor's."""

from __future__ import annotations

import re

from moetier.budget import GIB
from moetier.errors import SettingsError
from moetier.machine.facts import Disk, DiskRate, DramRate, Gpu, GpuRate, Machine, Rates
from moetier.plan.cards import CARDS, card_named, near_names, usual_card
from moetier.plan.hardware import TAKEN_FOR, described_cpu, described_memory, dram_by_channels
from moetier.vllm_arguments import NUMBER

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)
MOST_GPUS = 64
KINDS = re.compile(r"(?:^|[^a-z0-9.])[0-9]{1,9}\s*x\s*[a-z0-9]|[,;+&]|\band\b", re.IGNORECASE)
"""Words that begin a kind of card in a text, or stand between two."""
SMALLEST, LARGEST = 2, 400
RECORD = 16 << 20
DESCRIBED_THREADS = 16


def size(text: str, what: str, memory: bool = False) -> int:
    """Bytes of 256GB or 250GiB. memory: sizes of RAM and cards, where GB is what makers mean by it, 2^30."""
    match = _SIZE.fullmatch(text)
    unit = match[2].upper() if match else ""
    if match is None or unit not in UNITS or float(match[1]) <= 0:
        raise SettingsError(f"{what} {text!r}: expected a size such as 256GB")
    if memory and unit in ("", "G"):
        unit = "GI"
    elif memory and unit in ("M", "T"):
        unit += "I"
    return int(float(match[1]) * UNITS[unit])


def rate(text: str, what: str) -> float:
    """Bytes a second of 7GB/s."""
    head, slash, tail = text.strip().partition("/")
    if not slash or tail.strip().lower() not in ("s", "sec"):
        hint = "; free space is --disk-size" if what == "--disk" else ""
        raise SettingsError(f"{what} {text!r}: expected a rate such as 7GB/s{hint}")
    return float(size(head, what))


def gpus(text: str, pcie: str | None = None) -> tuple[Gpu, ...]:
    """4x32GB, 1xRTX5090, or none; pcie such as 5x16."""
    if text.strip().lower() in ("0", "none"):
        return ()
    if len(KINDS.findall(text)) > 1:
        raise SettingsError(
            f"--gpus {text!r}: expected one kind of card, such as 4x32GB, found several; tensor parallelism wants "
            "equal ones: plan for the equal ones alone"
        )
    count, times, what = text.strip().partition("x")
    if not times or not NUMBER.fullmatch(count) or not 1 <= int(count) <= MOST_GPUS:
        raise SettingsError(f"--gpus {text!r}: expected such as 4x32GB, 1xRTX5090, or none")
    name, memory, capability = _gpu(what)
    generation, width = _pcie(pcie) if pcie else (None, None)
    return tuple(
        Gpu(
            index=index,
            name=name,
            memory_bytes=memory,
            compute_capability=capability,
            pcie_generation=generation,
            pcie_width=width,
        )
        for index in range(int(count))
    )


def _gpu(what: str) -> tuple[str, int, str]:
    """Name, memory and compute capability."""
    card = card_named(what)
    if card is not None:
        return card.name, card.gib * GIB, card.capability
    if _SIZE.fullmatch(what) is None:
        near = near_names(what)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(c.name for c in CARDS)}."
        raise SettingsError(
            f"--gpus: {what!r} is neither a size such as 32GB nor a card that we know; {hint} Else give the size of "
            "its memory, such as 1x32GB, and its rate with --gpu-rate"
        )
    memory = size(what, "--gpus", memory=True)
    if not SMALLEST <= memory / GIB <= LARGEST:
        raise SettingsError(f"--gpus: expected cards of {SMALLEST} to {LARGEST} GB, found {what!r}")
    usual = usual_card(memory / GIB)
    return f"{memory / GIB:g} GB{TAKEN_FOR}{usual.name}", memory, usual.capability


def _pcie(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([2-6])(?:\.0)?\s*x\s*(1|2|4|8|16)", text.strip().lower())
    if match is None:
        raise SettingsError(f"--pcie {text!r}: expected generation and width such as 5x16")
    return int(match[1]), int(match[2])


def describe(
    gpu: str = "none",
    ram: str = "64GB",
    disk: str | None = None,
    *,
    memory: str | None = None,
    pcie: str | None = None,
    gpu_rate: str | None = None,
    threads: int = DESCRIBED_THREADS,
    disk_size: str | None = None,
) -> Machine:
    """The machine; SettingsError names the word that is not understood.

    memory: 8xDDR5-4800 or a rate; disk: what random reads of records reach.
    """
    cards = gpus(gpu, pcie)
    host = described_memory(size(ram, "--ram", memory=True))
    dram = None
    if memory:
        read = rate(memory, "--memory") if "/" in memory else dram_by_channels(memory).value
        dram = DramRate(threads=threads, bytes_per_s=read)
    rates = Rates(
        identity="described",
        dram_read=(dram,) if dram else (),
        disk_read=(DiskRate(queue_depth=8, record_bytes=RECORD, bytes_per_s=rate(disk, "--disk")),) if disk else (),
        device_copy=tuple(
            GpuRate(gpu=card.index, bytes_per_s=rate(gpu_rate, "--gpu-rate") / 2) for card in cards if gpu_rate
        ),
    )
    place = Disk(path="described", free_bytes=size(disk_size, "--disk-size")) if disk_size else None
    return Machine(identity="described", cpu=described_cpu(threads), memory=host, gpus=cards, disk=place, rates=rates)
