"""The container's limits come before the host's, in cgroup v2 and v1."""

import os
from pathlib import Path

import pytest

from moetier.machine import limits as machine

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 64 GiB with no cgroup yet."""
    write(tmp_path / "proc", meminfo="MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\nHugePages_Free: 3\n")
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_this_machine() -> None:
    memory = machine.memory()
    assert 0 < memory.available <= memory.limit
    assert set(machine.allowed_cpus()) <= os.sched_getaffinity(0)
    assert machine.allowed_cpus()


def test_v2_limit_of_an_ancestor(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/pod/task\n")
    write(
        root / "sys/fs/cgroup/pod",
        memory__max=str(GIB),
        memory__current=str(GIB // 2),
        memory__stat=f"inactive_file {GIB // 8}\n",
    )
    write(root / "sys/fs/cgroup/pod/task", memory__max="max\n", memory__current="5")
    assert machine.memory(root) == machine.Memory(GIB, GIB // 2 + GIB // 8, root / "sys/fs/cgroup/pod/memory.max")


def test_v2_throttle_counts_as_a_limit(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    write(root / "sys/fs/cgroup/pod", memory__max=str(2 * GIB), memory__high=str(GIB), memory__current="0")
    assert machine.memory(root) == machine.Memory(GIB, GIB, root / "sys/fs/cgroup/pod/memory.high")


def test_v1_limit(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("4:memory:/pod\n1:cpu,cpuacct:/pod\n0::/\n")
    write(root / "sys/fs/cgroup/memory/pod", memory__limit_in_bytes=str(GIB), memory__usage_in_bytes="0")
    assert machine.memory(root) == machine.Memory(GIB, GIB, root / "sys/fs/cgroup/memory/pod/memory.limit_in_bytes")


def test_v1_without_a_limit_is_no_limit(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("4:memory:/\n")
    write(root / "sys/fs/cgroup/memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="0")
    assert machine.memory(root) == machine.Memory(64 * GIB, 60000000 * 1024)
    assert machine.meminfo(root)["HugePages_Free"] == 3, "pages, not kB"


def test_path_of_the_host_falls_back_to_the_root_that_is_mounted(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/of/the/host\n")
    write(root / "sys/fs/cgroup", memory__max=str(GIB), memory__current="0")
    assert machine.memory(root).limit == GIB


def test_cpu_quota(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    write(root / "sys/fs/cgroup/pod", cpu__max="100000 100000\n")
    assert machine.default_threads((3, 5, 7), root) == 1
    assert machine.allowed_cpus() == tuple(sorted(os.sched_getaffinity(0))), "a quota says how much, not where"


def test_half_a_cpu_is_one_thread(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    write(root / "sys/fs/cgroup/pod", cpu__max="50000 100000\n")
    assert machine.default_threads((3, 5, 7), root) == 1


def test_cpus_beyond_a_pinned_thread_are_not_outside() -> None:
    mine = os.sched_getaffinity(0)
    pinned = {min(mine)}
    os.sched_setaffinity(0, pinned)
    try:
        assert machine.outside_cpus(sorted(mine)) == ()
        assert os.sched_getaffinity(0) == pinned, "the asking thread is left as it was"
    finally:
        os.sched_setaffinity(0, mine)
    assert machine.outside_cpus([*sorted(mine), 4000]) == (4000,)
    assert machine.outside_cpus([4000]) == (4000,)


def test_v1_cpu_quota(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("1:cpu,cpuacct:/pod\n")
    write(root / "sys/fs/cgroup/cpu,cpuacct/pod", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert machine.default_threads((0, 1, 2), root) == 1


@pytest.mark.parametrize(
    ("cpus", "computing"), [((0, 1), (0, 1)), ((2, 3, 4, 5), (2, 3, 4, 5)), (tuple(range(16)), tuple(range(1, 16)))]
)
def test_who_computes_where(cpus: tuple[int, ...], computing: tuple[int, ...]) -> None:
    assert machine.compute_cpus(cpus) == computing


@pytest.mark.parametrize(
    ("cpus", "alone", "beside_device"), [(1, 1, 1), (2, 2, 2), (4, 4, 4), (5, 4, 4), (16, 15, 14), (64, 63, 62)]
)
def test_a_cpu_is_left_to_the_frontend_and_one_to_the_thread_that_launches(
    root: Path, cpus: int, alone: int, beside_device: int
) -> None:
    assert machine.serving_threads(range(cpus), beside_device=False, root=root) == alone
    assert machine.serving_threads(range(cpus), beside_device=True, root=root) == beside_device


def test_a_quota_counts_before_a_cpu_is_left(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    write(root / "sys/fs/cgroup/pod", cpu__max="800000 100000\n")
    assert machine.serving_threads(range(64), beside_device=True, root=root) == 7
