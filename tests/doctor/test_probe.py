"""Facts from files of other machines, and from this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moetier.amounts import cpu_list
from moetier.doctor.examine import facts
from moetier.errors import SettingsError
from moetier.machine import limits
from moetier.machine.facts import CoreKind, IoUring, NumaNode
from moetier.machine.probe import disk as disk_probe
from moetier.machine.probe.cpu import numa_refusal, probe_cpu, probe_numa
from moetier.machine.probe.disk import probe_disk, probe_io_uring
from moetier.machine.probe.gpu import bus_facts, unusable_gpus, visible_devices
from moetier.machine.probe.memory import probe_memory
from tests.doctor.machines import bare, cpu_files, write

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8\n", (0, 1, 2, 3, 8)),
        ("5", (5,)),
        ("8,0-1", (0, 1, 8)),
        ("", ()),
        (None, ()),
        ("0-", ()),
        ("a", ()),
        ("-1", ()),
    ],
)
def test_cpu_lists(text: str | None, cpus: tuple[int, ...]) -> None:
    assert cpu_list(text) == cpus


# -- CPU and NUMA ----------------------------------------------------------------------------------------------------


def test_a_container_that_shows_next_to_nothing(tmp_path: Path) -> None:
    cpu = probe_cpu(bare(tmp_path, "1,3"))
    assert (cpu.allowed, cpu.threads, cpu.physical_cores, cpu.quota) == ((1, 3), 2, None, None)
    assert cpu.l3_groups == ()
    assert probe_numa(cpu.allowed, tmp_path) == ()


def test_two_threads_a_core_and_two_caches(tmp_path: Path) -> None:
    bare(tmp_path, "0-1,4-5")  # CPUs 2, 3, 6 and 7 are not ours
    for cpu in range(8):
        write(tmp_path, cpu_files(cpu, f"{cpu % 4},{cpu % 4 + 4}", "0,4" if cpu % 4 == 0 else "1-3,5-7"))
    cpu = probe_cpu(tmp_path)
    assert cpu.physical_cores == 2
    assert cpu.l3_groups == ((0, 4), (1, 5))


def test_hybrid_x86(tmp_path: Path) -> None:
    bare(tmp_path)
    write(tmp_path, {"sys/devices/cpu_core/cpus": "0-1\n", "sys/devices/cpu_atom/cpus": "2-7\n"})
    assert probe_cpu(tmp_path).kinds == (
        CoreKind(name="performance", cpus=(0, 1)),
        CoreKind(name="efficient", cpus=(2, 3)),
    )


@pytest.mark.parametrize(
    ("capacity", "kinds"), [(("1024", "1024", "450", "450"), 2), (("1024", "1000", "1024", "980"), 1)]
)
def test_kinds_by_capacity(capacity: tuple[str, ...], kinds: int, tmp_path: Path) -> None:
    bare(tmp_path)
    for cpu, text in enumerate(capacity):
        write(tmp_path, cpu_files(cpu, str(cpu), "0-3", cpu_capacity=text))
    assert len(probe_cpu(tmp_path).kinds) == kinds


def test_quota_of_the_cgroup(tmp_path: Path) -> None:
    bare(tmp_path)
    write(tmp_path, {"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "150000 100000\n"})
    cpu = probe_cpu(tmp_path)
    assert (cpu.quota, cpu.threads) == (1.5, 1)


def test_numa_nodes(tmp_path: Path) -> None:
    at = "sys/devices/system/node"
    write(
        tmp_path,
        {
            f"{at}/node0/cpulist": "0-3",
            f"{at}/node0/meminfo": "Node 0 MemTotal:       1024 kB\nNode 0 MemFree: 1 kB\n",
            f"{at}/node10/cpulist": "4-7",
            f"{at}/node10/meminfo": "Node 10 MemTotal:       2048 kB\n",
            f"{at}/node2/cpulist": "",
            f"{at}/node2/meminfo": "Node 2 MemTotal:       0 kB\n",
        },
    )
    assert probe_numa((2, 3, 9), tmp_path) == (
        NumaNode(node=0, cpus=(2, 3), memory_bytes=MIB),
        NumaNode(node=10, cpus=(), memory_bytes=2 * MIB),
    )


def test_a_kernel_that_refuses_to_interleave(tmp_path: Path) -> None:
    bare(tmp_path)
    for node, cpus in ((900, "0-1"), (901, "2-3")):  # which this machine has not
        write(tmp_path, {f"sys/devices/system/node/node{node}/cpulist": cpus})
    refused = numa_refusal(probe_cpu(tmp_path), tmp_path)
    assert refused is not None
    assert "mbind" in refused


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_limit_names_its_file(tmp_path: Path) -> None:
    bare(tmp_path)
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(2**30),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "0",
        },
    )
    memory = probe_memory(tmp_path)
    assert (memory.total_bytes, memory.limit_bytes) == (64 * 2**30, 2**30)
    assert memory.limited_by is not None
    assert memory.limited_by.endswith("memory.limit_in_bytes")
    assert (memory.huge_page_bytes, memory.huge_pages_free) == (2 * MIB, 3)


LIMITS = "Limit                     Soft Limit           Hard Limit           Units     \n"
LIMITS += "Max locked memory         {}              65536                bytes     \n"


@pytest.mark.parametrize(
    ("soft", "capabilities", "limit"),
    [
        ("8388608", "0", 8 * MIB),
        ("unlimited", "0", None),
        ("8388608", "00000000a80425fb", 8 * MIB),
        ("1", "1ffffffffff", None),
    ],
    ids=["limited", "unlimited", "container's root", "CAP_IPC_LOCK"],
)
def test_memlock(soft: str, capabilities: str, limit: int | None, tmp_path: Path) -> None:
    bare(tmp_path, CapEff=capabilities)
    write(tmp_path, {"proc/self/limits": LIMITS.format(soft)})
    assert probe_memory(tmp_path).memlock_bytes == limit


@pytest.mark.parametrize(
    ("text", "how"), [("always [madvise] never\n", "madvise"), ("always madvise [never]", "never"), ("", None)]
)
def test_transparent_huge_pages(text: str, how: str | None, tmp_path: Path) -> None:
    write(bare(tmp_path), {"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert probe_memory(tmp_path).transparent_huge_pages == how


# -- disk ------------------------------------------------------------------------------------------------------------


def test_deepest_and_latest_mount(tmp_path: Path) -> None:
    folder = tmp_path / "a store"
    folder.mkdir()
    escaped = str(folder).replace(" ", "\\040")
    lines = [
        "22 1 254:0 / / rw - ext4 /dev/root rw",
        f"30 22 0:40 / {escaped} rw,noatime shared:1 - tmpfs under rw",
        f"31 22 0:41 / {escaped} rw - xfs /dev/nvme0n1p1 rw",
        f"32 22 0:42 / {escaped}/below rw - nfs4 server:/x rw",
        "not a mount",
    ]
    found = probe_disk(folder, write(tmp_path / "root", {"proc/self/mountinfo": "\n".join(lines)}))
    assert (found.filesystem, found.device) == ("xfs", "/dev/nvme0n1p1")


def test_nothing_known_of_mounts(tmp_path: Path) -> None:
    found = probe_disk(tmp_path, tmp_path)
    assert (found.filesystem, found.device, found.rotational) == (None, None, None)
    assert found.free_bytes is not None


@pytest.mark.parametrize("spins", [True, False])
def test_a_partition_asks_its_disk(spins: bool, tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    block = tmp_path / "sys/devices/pci/sda"
    write(tmp_path, {"sys/devices/pci/sda/queue/rotational": f"{int(spins)}\n"})
    (block / "sda1").mkdir()
    link = tmp_path / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(block / "sda1")
    assert probe_disk(tmp_path, tmp_path).rotational is spins


def test_o_direct_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    assert probe_disk(folder).o_direct is not None
    assert list(folder.iterdir()) == []


def test_o_direct_refused() -> None:
    """Files of /proc/self are too short to be tried, and none can be made there."""
    assert probe_disk(Path("/proc/self/fdinfo")).o_direct is None
    assert disk_probe._reads_directly("/proc/self/status") is False


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="expected a folder, found none"):
        probe_disk(tmp_path / "none")


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)  # noqa: PTH102 (a Path is made of text)
    with pytest.raises(SettingsError, match="UTF-8"):
        probe_disk(Path(os.fsdecode(folder)))


@pytest.mark.parametrize(
    ("code", "status", "level", "state", "reason"),
    [
        (1, {"Seccomp": "0"}, "2\n", IoUring.FORBIDDEN, "io_uring_disabled=2"),
        (1, {"Seccomp": "0"}, "1\n", IoUring.FORBIDDEN, "io_uring_disabled=1"),
        (1, {"Seccomp": "2"}, "0\n", IoUring.FORBIDDEN, "seccomp"),
        (1, {"Seccomp": "2", "CapEff": "1ffffffffff"}, "1\n", IoUring.FORBIDDEN, "seccomp"),
        (1, {"Seccomp": "0"}, "0\n", IoUring.FORBIDDEN, "security module"),
        (38, {"Seccomp": "2"}, None, IoUring.FORBIDDEN, "seccomp"),
        (38, {"Seccomp": "0"}, None, IoUring.ABSENT, "has no io_uring"),
        (12, {"Seccomp": "0"}, None, IoUring.FORBIDDEN, "Cannot allocate memory"),
    ],
)
def test_who_refused_io_uring(
    code: int, status: dict[str, str], level: str | None, state: IoUring, reason: str, tmp_path: Path
) -> None:
    bare(tmp_path, **status)
    if level is not None:
        write(tmp_path, {"proc/sys/kernel/io_uring_disabled": level})
    found, why = disk_probe._refusal(code, tmp_path)
    assert found is state
    assert reason in why


SECCOMP = """
import ctypes, platform, struct
nr, errno = 425, {errno}
arch = {{"x86_64": 0xC000003E, "aarch64": 0xC00000B7}}[platform.machine()]
steps = [(0x20, 0, 0, 4), (0x15, 0, 3, arch), (0x20, 0, 0, 0), (0x15, 0, 1, nr), (0x06, 0, 0, 0x50000 | errno),
         (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, program, 0, 0): raise SystemExit(77)
from moetier.machine.probe.disk import probe_io_uring
print(*probe_io_uring(), sep="|")
"""


@pytest.mark.parametrize(("errno", "name"), [(1, "EPERM"), (38, "ENOSYS")])
def test_a_real_seccomp_filter(errno: int, name: str) -> None:
    if probe_io_uring()[0] is not IoUring.ALLOWED:
        pytest.skip("wants a machine that allows io_uring")
    done = subprocess.run(
        [sys.executable, "-c", SECCOMP.format(errno=errno)], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("this kernel takes no seccomp filter")
    assert done.returncode == 0, done.stderr
    state, reason = done.stdout.strip().split("|")
    assert state == "forbidden"
    assert "seccomp" in reason
    assert name in reason


# -- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("0,7,1", [0]),
        ("1,1,0", [1]),
        ("GPU-bb", [1]),
        ("GPU-c,0", [2, 0]),
        ("GPU-", []),
        (" 1 , 2 ", [1, 2]),
    ],
)
def test_devices_that_cuda_shows(variable: str | None, visible: list[int]) -> None:
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_devices(["GPU-aa", "GPU-bb", "GPU-cc"], environment) == visible


def test_devices_without_a_driver(tmp_path: Path) -> None:
    at = "sys/bus/pci/devices"
    write(
        tmp_path,
        {
            f"{at}/0000:65:00.0/vendor": "0x10de\n",
            f"{at}/0000:65:00.0/device": "0x2b85\n",
            f"{at}/0000:65:00.0/class": "0x030000\n",
            f"{at}/0000:65:00.1/vendor": "0x10de\n",  # its sound
            f"{at}/0000:65:00.1/class": "0x040300\n",
            f"{at}/0000:01:00.0/vendor": "0x1002\n",
            f"{at}/0000:01:00.0/class": "0x030000\n",
        },
    )
    assert unusable_gpus(0, tmp_path) == ("0000:65:00.0 (0x10de 0x2b85)",)
    assert unusable_gpus(1, tmp_path) == ()
    assert unusable_gpus(0, tmp_path / "nowhere") == ()


def test_a_card_in_a_slot_of_an_older_board(tmp_path: Path) -> None:
    at = "sys/devices/pci0000:60/0000:60:01.1"
    write(
        tmp_path,
        {
            f"{at}/max_link_speed": "16.0 GT/s PCIe\n",
            f"{at}/max_link_width": "16\n",
            f"{at}/0000:65:00.0/max_link_speed": "32.0 GT/s PCIe\n",
            f"{at}/0000:65:00.0/max_link_width": "16\n",
            f"{at}/0000:65:00.0/current_link_speed": "2.5 GT/s PCIe\n",
            f"{at}/0000:65:00.0/current_link_width": "8\n",
            f"{at}/0000:65:00.0/numa_node": "-1\n",
        },
    )
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    (devices / "0000:65:00.0").symlink_to(tmp_path / at / "0000:65:00.0")
    assert bus_facts(tmp_path, "0000:65:00.0") == {
        "pcie_generation": 4,
        "pcie_width": 16,
        "pcie_generation_now": 1,
        "pcie_width_now": 8,
        "numa_node": None,
    }
    assert set(bus_facts(tmp_path, "0000:01:00.0").values()) == {None}


# -- this machine ----------------------------------------------------------------------------------------------------


def test_this_machine(tmp_path: Path) -> None:
    found = facts(tmp_path)
    assert found.cpu.allowed == limits.allowed_cpus()
    assert found.cpu.physical_cores is None or found.cpu.physical_cores <= len(found.cpu.allowed)
    assert found.memory.limit_bytes <= found.memory.total_bytes
    assert found.disk is not None
    assert found.identity == facts().identity
    assert found.memory.total_bytes == pytest.approx(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), rel=1e-3)
