"""Files of other machines' /proc and /sys, and machines as objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moetier.machine.facts import Cpu, Disk, Gpu, Machine, Memory, hardware_identity

GIB = 2**30
MEMINFO = "MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\nHugePages_Free: 3\nHugepagesize: 2048 kB\n"


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Make a root folder with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def bare(root: Path, cpus: str = "0-3", **status: str) -> Path:
    """The least that a container shows: no /sys at all."""
    lines = {"Cpus_allowed_list": cpus, "Seccomp": "0", "CapEff": "0000000000000000", **status}
    text = "".join(f"{name}:\t{value}\n" for name, value in lines.items())
    return write(root, {"proc/meminfo": MEMINFO, "proc/self/status": text})


def cpu_files(cpu: int, siblings: str, l3: str, **more: str) -> dict[str, str]:
    """One CPU's folder of /sys."""
    at = f"sys/devices/system/cpu/cpu{cpu}"
    files = {f"{at}/topology/core_cpus_list": siblings, f"{at}/cache/index3/level": "3\n"}
    files[f"{at}/cache/index3/shared_cpu_list"] = l3
    return files | {f"{at}/{name}": text for name, text in more.items()}


def machine(**parts: Any) -> Machine:
    """A sound machine of 8 CPUs, one GPU and an NVMe disk, with other `parts`."""
    cpu = Cpu(model="A", architecture="x86_64", allowed=tuple(range(8)), physical_cores=8, threads=8, isas=("avx512",))
    memory = Memory(
        total_bytes=64 * GIB, limit_bytes=64 * GIB, available_bytes=60 * GIB, transparent_huge_pages="madvise"
    )
    gpus = (gpu(),)
    disk = Disk(path="/data", filesystem="ext4", device="/dev/nvme0n1", free_bytes=900 * GIB, o_direct=True)
    known = {"cpu": cpu, "memory": memory, "gpus": gpus, "disk": disk, **parts}
    return Machine(identity=hardware_identity(known["cpu"], known["memory"], known["gpus"]), **known)


def gpu(**parts: Any) -> Gpu:
    """A card of 32 GiB in a full slot."""
    known = {
        "index": 0, "name": "G", "memory_bytes": 32 * GIB, "free_bytes": 31 * GIB, "compute_capability": "12.0",
        "pcie_generation": 5, "pcie_width": 16, "pcie_generation_now": 1, "pcie_width_now": 16, "peers": (),
    }  # fmt: skip
    return Gpu(**{**known, **parts})
