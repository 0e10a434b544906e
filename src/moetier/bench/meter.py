"""What happens on the machine meanwhile: CPUs that others use, energy, and what the server's processes hold."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from moetier import machine
from moetier.bench.samples import Frozen

POWERCAP = Path("/sys/class/powercap")
STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Mark:
    """Readings of one moment. busy: CPU seconds of our CPUs, by anyone; own: by the server and us; joules: None where
    nothing can be read.
    """

    at: float
    busy: float
    own: float
    joules: float | None


class Footprint(Frozen):
    """What the server's processes hold together. pss: shared pages divided among those who share them."""

    at: float
    rss_mib: float
    pss_mib: float | None = None
    handles: int = 0
    threads: int = 0
    gpu_mib: float | None = None


class Meter:
    """Reads the machine around a trial. root: of the server's processes, None where the server is not ours."""

    def __init__(self, root: psutil.Process | None) -> None:
        """Find out what can be read."""
        self._root = root
        self._cpus = set(machine.allowed_cpus())
        self._rapl = [path for path in rapl_domains(POWERCAP) if os.access(path, os.R_OK)]
        self._gpus = nvml_devices()

    def family(self) -> list[psutil.Process]:
        """The server's processes."""
        if self._root is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._root, *self._root.children(recursive=True)]
        return []

    def mark(self) -> Mark:
        """Read now."""
        return Mark(time.perf_counter(), self._busy(), self._own(), self._joules())

    def foreign_cpus(self, since: Mark) -> float | None:
        """CPUs that others used since then, on average; None where the server's own share is not known."""
        if self._root is None:
            return None
        now = self.mark()
        others = (now.busy - since.busy) - (now.own - since.own)
        return round(max(0.0, others / max(now.at - since.at, 1e-6)), 3)

    def joules(self, since: Mark) -> float | None:
        """Energy of packages and devices since then."""
        now = self._joules()
        return None if now is None or since.joules is None else round(now - since.joules, 3)

    def footprint(self) -> Footprint | None:
        """What the server's processes hold now; None where the server is not ours."""
        family = self.family()
        if not family:
            return None
        rss = pss = handles = threads = 0
        whole = True
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                rss += process.memory_info().rss
                handles, threads = handles + process.num_fds(), threads + process.num_threads()
                try:
                    pss += process.memory_full_info().pss
                except psutil.AccessDenied:
                    whole = False
        return Footprint(
            at=round(time.time(), 1),
            rss_mib=round(rss / 2**20, 1),
            pss_mib=round(pss / 2**20, 1) if whole else None,
            handles=handles,
            threads=threads,
            gpu_mib=gpu_mib(self._gpus, [process.pid for process in family]),
        )

    def _busy(self) -> float:
        return busy_seconds(STAT.read_text(), self._cpus)

    def _own(self) -> float:
        total = 0.0
        for process in (*self.family(), psutil.Process()):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _joules(self) -> float | None:
        readings = [int(path.read_text()) / 1e6 for path in self._rapl]
        readings += [library.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3 for library, device in self._gpus]
        return sum(readings) if readings else None


def busy_seconds(stat: str, cpus: set[int]) -> float:
    """CPU seconds that these CPUs were not idle since the start of the machine, from the text of /proc/stat."""
    ticks = 0
    for line in stat.splitlines():
        name, _, rest = line.partition(" ")
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cpus:
            user, nice, system, _idle, _iowait, irq, softirq, *more = (int(part) for part in rest.split())
            ticks += user + nice + system + irq + softirq + (more[0] if more else 0)
    return ticks / os.sysconf("SC_CLK_TCK")


def rapl_domains(root: Path) -> list[Path]:
    """Energy counters of whole packages; their parts would count twice."""
    return sorted(root.glob("intel-rapl:[0-9]*/energy_uj")) if root.is_dir() else []


def nvml_devices() -> list[tuple[Any, Any]]:
    """NVML and the devices whose energy it can tell."""
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]

        pynvml.nvmlInit()
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        for device in devices:
            pynvml.nvmlDeviceGetTotalEnergyConsumption(device)
    except Exception:  # a missing library, driver or right: then there is nothing to read, and cells say so
        return []
    return [(pynvml, device) for device in devices]


def gpu_mib(devices: Sequence[tuple[Any, Any]], pids: Sequence[int]) -> float | None:
    """Device memory of processes; None without a readable device."""
    if not devices:
        return None
    running = (p for library, device in devices for p in library.nvmlDeviceGetComputeRunningProcesses(device))
    return round(sum((p.usedGpuMemory or 0) for p in running if p.pid in pids) / 2**20, 1)
