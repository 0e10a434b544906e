"""The thread pool, and how many threads this process may use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moetier.errors import SettingsError
from moetier.kernels.cpu import _native

_CGROUPS = Path("/sys/fs/cgroup")


def allowed_cpus() -> tuple[int, ...]:
    """CPUs that this process may run on. (The calling thread itself may be pinned to fewer.)"""
    return tuple(sorted(os.sched_getaffinity(os.getpid())))


def cgroup_quota(membership: str, root: Path = _CGROUPS) -> float | None:
    """CPUs that the cgroup's quota allows, of version 1 or 2, parents included; None: no quota.

    Parameters
    ----------
    membership
        Text of /proc/self/cgroup.
    root
        Where the cgroup file systems are mounted.

    """
    quotas = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            quotas += [_quota_v2(folder / "cpu.max") for folder in _with_parents(root, path)]
        elif "cpu" in controllers.split(","):
            quotas += [_quota_v1(folder) for folder in _with_parents(root / "cpu", path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def default_threads(cpus: Sequence[int]) -> int:
    """Threads to run on `cpus`: one each, fewer where the cgroup's quota allows less."""
    try:
        quota = cgroup_quota(Path("/proc/self/cgroup").read_text())
    except OSError:
        quota = None
    return len(cpus) if quota is None else max(1, min(len(cpus), int(quota)))


class ThreadPool:
    """A team of native threads for the kernels. It sleeps when idle; one call runs at a time, others take turns.

    Parameters
    ----------
    threads
        How many threads compute, the calling one included. Default: one per CPU, within the cgroup's quota.
    cpus
        CPUs that the threads may use. Default: those of the process. The caller's own affinity is left as it is.

    """

    def __init__(self, threads: int | None = None, cpus: Sequence[int] | None = None) -> None:
        mine = allowed_cpus()
        chosen = mine if cpus is None else tuple(cpus)
        outside = sorted(set(chosen) - set(mine))
        if not chosen or outside:
            raise SettingsError(f"CPUs {list(chosen)}: this process may use {list(mine)}; name some of those")
        count = default_threads(chosen) if threads is None else threads
        if count < 1:
            raise SettingsError(f"{count} threads: at least 1 is needed")
        self._native: _native.Pool | None = _native.Pool(count, list(chosen))
        self.threads = count
        self.cpus = chosen

    @property
    def native(self) -> _native.Pool:
        """The binding's object; RuntimeError after `close`."""
        if self._native is None:
            raise RuntimeError("the thread pool is closed")
        return self._native

    def close(self) -> None:
        """Drop the threads. They end once no `CpuExperts` uses them any more."""
        self._native = None


def _with_parents(root: Path, path: str) -> list[Path]:
    """The cgroup's folder and those above it, up to the root. In a container the path may not exist below it."""
    folder = root / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _quota_v2(file: Path) -> float | None:
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if quota <= 0 else quota / period
