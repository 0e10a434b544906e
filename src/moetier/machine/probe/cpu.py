"""CPUs and NUMA nodes."""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path

from moetier.amounts import cpu_list
from moetier.machine import limits as machine
from moetier.machine import numa
from moetier.machine.facts import CoreKind, Cpu, NumaNode
from moetier.machine.probe.files import distinct_groups, fields, number, text

SYSTEM = "sys/devices/system"
HYBRID = {"cpu_core": "performance", "cpu_atom": "efficient", "cpu_lowpower": "low-power"}
"""Folders of /sys/devices on hybrid x86 processors, and what their CPUs are."""
SAME_KIND = 0.9
"""Cores whose capacity is at least this part of the largest are of its kind: single cores differ a little by bin."""


def probe_cpu(root: Path = machine.ROOT, isas: tuple[str, ...] = ()) -> Cpu:
    """Return the CPUs that this process may use. isas: the kernels that they run, best first."""
    allowed = cpu_list(fields(root / "proc/self/status").get("Cpus_allowed_list")) or machine.allowed_cpus()
    cores = distinct_groups(_siblings(root, cpu) for cpu in allowed)
    info = fields(root / "proc/cpuinfo")
    return Cpu(
        model=info.get("model name") or info.get("Model") or platform.machine(),
        architecture=platform.machine(),
        allowed=allowed,
        physical_cores=len(cores) or None,
        quota=machine.cpu_quota(root),
        threads=machine.default_threads(allowed, root),
        kinds=_kinds(root, allowed),
        l3_groups=distinct_groups(_within(_last_level_cache(root, cpu), allowed) for cpu in allowed),
        isas=isas,
    )


def probe_numa(allowed: tuple[int, ...], root: Path = machine.ROOT) -> tuple[NumaNode, ...]:
    """NUMA nodes with memory or with CPUs of ours; empty where the kernel tells nothing."""
    nodes = []
    for folder in (root / SYSTEM / "node").glob("node[0-9]*"):
        memory = [line.split() for line in (text(folder / "meminfo") or "").splitlines()]
        total = next((int(words[3]) * 1024 for words in memory if len(words) > 3 and words[2] == "MemTotal:"), 0)
        cpus = _within(cpu_list(text(folder / "cpulist")), allowed)
        if total or cpus:
            nodes.append(NumaNode(node=int(folder.name.removeprefix("node")), cpus=cpus, memory_bytes=total))
    return tuple(sorted(nodes, key=lambda node: node.node))


def numa_refusal(cpu: Cpu, root: Path = machine.ROOT) -> str | None:
    """Try to interleave a few pages over the nodes of our CPUs; None where that works, or where there is one node."""
    over = numa.nodes(cpu.allowed, root)
    if len(over) < 2:
        return None
    with mmap.mmap(-1, 16 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        first = ctypes.c_char.from_buffer(memory)
        try:
            return numa.interleave(ctypes.addressof(first), len(memory), over)
        finally:
            del first  # the mapping cannot be closed while something points into it


def _siblings(root: Path, cpu: int) -> tuple[int, ...]:
    """Logical CPUs of one physical core."""
    topology = root / SYSTEM / f"cpu/cpu{cpu}/topology"
    return cpu_list(text(topology / "core_cpus_list") or text(topology / "thread_siblings_list"))


def _last_level_cache(root: Path, cpu: int) -> tuple[int, ...]:
    for index in (root / SYSTEM / f"cpu/cpu{cpu}/cache").glob("index[0-9]*"):
        if number(index / "level") == 3:
            return cpu_list(text(index / "shared_cpu_list"))
    return ()


def _within(cpus: tuple[int, ...], allowed: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(cpu for cpu in cpus if cpu in allowed)


def _kinds(root: Path, allowed: tuple[int, ...]) -> tuple[CoreKind, ...]:
    """More than one only on hybrid processors: x86 names them, ARM gives each CPU a capacity."""
    lists = {name: cpu_list(text(root / "sys/devices" / at / "cpus")) for at, name in HYBRID.items()}
    named = {name: _within(cpus, allowed) for name, cpus in lists.items()}
    kinds = tuple(CoreKind(name=name, cpus=cpus) for name, cpus in named.items() if cpus)
    if kinds:
        return kinds
    capacity = {cpu: number(root / SYSTEM / f"cpu/cpu{cpu}/cpu_capacity") or 0 for cpu in allowed}
    most = max(capacity.values())
    big = tuple(cpu for cpu in allowed if capacity[cpu] >= SAME_KIND * most)
    little = tuple(cpu for cpu in allowed if cpu not in big)
    if not little:
        return (CoreKind(name="performance", cpus=big),)
    return (CoreKind(name="performance", cpus=big), CoreKind(name="efficient", cpus=little))
