"""Limits of this process on the machine: memory and CPUs, with the container's limits before the host's.

`root` is where /proc and /sys are found: tests give a folder with files of other machines.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)
"""Errors of a system call that is forbidden, or that there is none of."""
SMALL_MACHINE = 4
"""Up to this many CPUs, none is kept free: the HTTP frontend shares them, since it works while the engine waits."""


@dataclass(frozen=True)
class Memory:
    """Bytes. `limit` is what this process may ever use, `available` what it could still take now."""

    limit: int
    available: int
    limited_by: Path | None = None
    """The cgroup's file that sets `limit`; None: it is the machine's size."""


def memory(root: Path = ROOT) -> Memory:
    """Memory of the machine, cut to the limits of every cgroup (v2 or v1) that this process is in."""
    info = meminfo(root)
    limit, limited_by = info["MemTotal"], None
    available = info["MemAvailable" if "MemAvailable" in info else "MemFree"]  # some sandboxes lack the first
    for file, maximum, current, reclaimable in _memory_cgroups(root):
        if maximum < limit:
            limit, limited_by = maximum, file
        available = min(available, maximum - current + reclaimable)
    return Memory(limit, max(available, 0), limited_by)


def allowed_cpus() -> tuple[int, ...]:
    """CPUs that this process may run on, ascending: the affinity mask of its main thread."""
    return tuple(sorted(os.sched_getaffinity(os.getpid())))


def outside_cpus(cpus: Sequence[int]) -> tuple[int, ...]:
    """Those of `cpus` that the kernel does not let this process run on.

    A framework may have pinned the main thread to fewer than that, so a thread of its own asks for them and looks what
    it got. Where the call itself is refused (`may_pin`), all that we run on now is what there is.
    """
    granted: set[int] = set()

    def ask() -> None:
        try:
            os.sched_setaffinity(0, cpus)
            granted.update(os.sched_getaffinity(0))
        except OSError as error:
            if error.errno in REFUSED:
                granted.update(allowed_cpus())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return tuple(sorted(set(cpus) - granted))


def may_pin() -> bool:
    """Whether the kernel lets a thread of ours choose its CPUs; some sandboxes refuse the call, whatever it asks."""
    try:
        os.sched_setaffinity(threading.get_native_id(), os.sched_getaffinity(threading.get_native_id()))
    except OSError:
        return False
    return True


def default_threads(cpus: Sequence[int], root: Path = ROOT) -> int:
    """Threads to run on `cpus`: one each, fewer where the cgroup's CPU quota pays for less."""
    quota = cpu_quota(root)
    return len(cpus) if quota is None else max(1, min(len(cpus), int(quota)))


def compute_cpus(cpus: Sequence[int]) -> tuple[int, ...]:
    """CPUs of attention and experts alike, which take turns; the first of a larger machine is the frontend's."""
    return tuple(cpus) if len(cpus) <= SMALL_MACHINE else tuple(cpus[1:])


def hybrid_threads(threads: int) -> int:
    """Return how many of so many threads compute misses: the engine's own thread launches the device's work meanwhile.

    Every layer waits for the slowest thread, so one that has to share its CPU costs more than it computes.
    """
    return threads if threads <= SMALL_MACHINE else threads - 1


def serving_threads(cpus: Sequence[int], beside_device: bool, root: Path = ROOT) -> int:
    """Threads that compute experts on these CPUs where nobody says how many; beside_device: a GPU computes, too."""
    threads = default_threads(compute_cpus(cpus), root)
    return hybrid_threads(threads) if beside_device else threads


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """Fields of /proc/meminfo: bytes, or a number where the kernel counts pages."""
    fields = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        number, *unit = value.split()
        fields[name] = int(number) * (1024 if unit == ["kB"] else 1)
    return fields


def memory_kills(root: Path = ROOT) -> int:
    """Processes that the kernel has killed for memory since its start; 0 where it does not count them."""
    try:
        fields = dict(line.split() for line in (root / "proc/vmstat").read_text().splitlines())
        return int(fields.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def _cgroup_folders(controller: str, root: Path) -> list[Path]:
    """Folders of the cgroup that this process is in and of its ancestors, for cgroup v2 ("") or a v1 controller."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
            parts = Path(path.lstrip("/"))
            # In a container the path may be that of the host, which is not mounted: its root is then the limit.
            return [folder for folder in (top / parts, *(top / p for p in parts.parents)) if folder.is_dir()] or [top]
    return []


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().split()[0]
    except (OSError, IndexError):
        return None
    return int(text) if text.lstrip("-").isdecimal() else None


def _memory_cgroups(root: Path) -> list[tuple[Path, int, int, int]]:
    """(limit's file, limit, current, reclaimable) of every cgroup that limits memory."""
    found = []
    for controller, limit_name, current_name in (
        ("", "memory.max", "memory.current"),
        ("", "memory.high", "memory.current"),  # past it the kernel slows the process to a crawl
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in _cgroup_folders(controller, root):
            limit, current = _number(folder / limit_name), _number(folder / current_name)
            if limit is not None and current is not None and limit < 1 << 60:
                found.append((folder / limit_name, limit, current, _reclaimable(folder)))
    return found


def _reclaimable(folder: Path) -> int:
    """Page cache that the kernel drops before it refuses memory."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split()[:2] for line in lines)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that the cgroups grant; None: no limit."""
    quotas = []
    for folder in _cgroup_folders("", root):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            quotas.append(int(quota) / int(period))
    for folder in _cgroup_folders("cpu", root):
        v1_quota, v1_period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if v1_quota is not None and v1_period and v1_quota > 0:
            quotas.append(v1_quota / v1_period)
    return min(quotas, default=None)
