"""Meters of the machine meanwhile: CPUs that others use, energy, and what the server's processes hold."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from moetier.machine import limits as machine
from moetier_bench.samples import Frozen

POWERCAP = Path("/sys/class/powercap")
STAT = Path("/proc/stat")
SPAN = 2.0
"""Seconds that others' CPU time is counted over at least: the kernel counts in hundredths of a second, those of each
CPU and process by themselves, so that of less time it says nothing.
"""


@dataclass(frozen=True)
class Mark:
    """Readings of one moment. busy: CPU seconds of our CPUs, by anyone; own: by the server and us; joules: of each
    energy counter, None where one cannot be read.
    """

    at: float
    busy: float
    own: float
    joules: tuple[float, ...] | None


@dataclass(frozen=True)
class EnergyCounter:
    """A counter of joules. wraps: where it begins again at zero; None: nowhere."""

    name: str
    read: Callable[[], float]
    wraps: float | None = None

    def between(self, before: float, after: float) -> float:
        """Joules from one reading to the next, which is less than one round later."""
        return after - before if after >= before or self.wraps is None else after - before + self.wraps


class Footprint(Frozen):
    """Memory of the server's processes together. pss: shared pages divided among those who share them."""

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
        self._gpus = nvml_devices()
        self._energy = (*rapl_counters(POWERCAP), *nvml_counters(self._gpus))
        self._marks: deque[Mark] = deque(maxlen=1000)

    @property
    def energy_of(self) -> tuple[str, ...]:
        """Return what joules count: the CPUs' packages, the devices; nothing where none can be read."""
        return tuple(counter.name for counter in self._energy)

    def family(self) -> list[psutil.Process]:
        """The server's processes."""
        if self._root is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._root, *self._root.children(recursive=True)]
        return []

    def mark(self) -> Mark:
        """Read now."""
        self._marks.append(Mark(time.perf_counter(), self._busy(), self._own(), self._joules()))
        return self._marks[-1]

    def foreign_cpus(self, since: Mark) -> float | None:
        """CPUs that others used since then, on average, or since an earlier mark where that is less than SPAN ago;
        None where the server's own share is not known.
        """
        if self._root is None:
            return None
        now = self.mark()
        early = [mark for mark in self._marks if mark.at <= now.at - SPAN]
        since = early[-1] if early and now.at - since.at < SPAN else since
        others = (now.busy - since.busy) - (now.own - since.own)
        return round(max(0.0, others / max(now.at - since.at, 1e-6)), 3)

    def joules(self, since: Mark) -> float | None:
        """Energy of packages and devices since then."""
        now = self._joules()
        if now is None or since.joules is None:
            return None
        pairs = zip(self._energy, since.joules, now, strict=True)
        return round(sum(counter.between(before, after) for counter, before, after in pairs), 3)

    def footprint(self) -> Footprint | None:
        """Return what the server's processes hold now; None where the server is not ours."""
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
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def _joules(self) -> tuple[float, ...] | None:
        try:
            return tuple(counter.read() for counter in self._energy) or None
        except Exception:  # of a driver's library too: then there is no figure, and cells say so
            return None


def busy_seconds(stat: str, cpus: set[int]) -> float:
    """CPU seconds that these CPUs were not idle since the start of the machine, from the text of /proc/stat."""
    ticks = 0
    for line in stat.splitlines():
        name, _, rest = line.partition(" ")
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cpus:
            user, nice, system, _idle, _iowait, irq, softirq, *more = (int(part) for part in rest.split())
            ticks += user + nice + system + irq + softirq + (more[0] if more else 0)
    return ticks / os.sysconf("SC_CLK_TCK")


def rapl_counters(root: Path) -> list[EnergyCounter]:
    """Return the counters of whole packages, if we may read them; their parts, and the platform, would count twice."""
    found = []
    for name in sorted(root.glob("intel-rapl:*/name")):
        energy = name.with_name("energy_uj")
        with contextlib.suppress(OSError, ValueError):
            if name.read_text().startswith("package"):
                int(energy.read_text())
                wraps = int(name.with_name("max_energy_range_uj").read_text()) / 1e6
                read = partial(_microjoules, energy)
                found.append(EnergyCounter(f"RAPL {name.read_text().strip()}", read, wraps))
    return found


def _microjoules(path: Path) -> float:
    return int(path.read_text()) / 1e6


def nvml_devices() -> list[tuple[Any, Any]]:
    """NVML and the devices that a server of ours sees, if it can tell their energy."""
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        indices = range(pynvml.nvmlDeviceGetCount()) if visible is None else [int(x) for x in visible.split(",") if x]
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
        for device in devices:
            pynvml.nvmlDeviceGetTotalEnergyConsumption(device)
    except Exception:  # a missing library, driver or right: then there is nothing to read, and cells say so
        return []
    return [(pynvml, device) for device in devices]


def nvml_counters(devices: Sequence[tuple[Any, Any]]) -> list[EnergyCounter]:
    """Return the counters of each device, all of it, by whomever it is used."""
    found = []
    for library, device in devices:
        read = partial(_millijoules, library, device)
        found.append(EnergyCounter(f"NVML {text_of(library.nvmlDeviceGetName(device))}", read))
    return found


def _millijoules(library: Any, device: Any) -> float:
    return float(library.nvmlDeviceGetTotalEnergyConsumption(device)) / 1e3


def text_of(name: str | bytes) -> str:
    """Return what NVML calls something; older bindings give bytes."""
    return name.decode() if isinstance(name, bytes) else name


def gpu_mib(devices: Sequence[tuple[Any, Any]], pids: Sequence[int]) -> float | None:
    """Device memory of processes; None without a readable device."""
    if not devices:
        return None
    running = (p for library, device in devices for p in library.nvmlDeviceGetComputeRunningProcesses(device))
    return round(sum((p.usedGpuMemory or 0) for p in running if p.pid in pids) / 2**20, 1)
