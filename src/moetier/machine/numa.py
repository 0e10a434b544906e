"""NUMA: which nodes this process has CPUs and memory on, and how threads and records are spread over them.

Records are interleaved page by page over the nodes that the threads run on, so that every thread draws on all memory
controllers, and each thread stays on one node. All through system calls: no libnuma.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moetier.amounts import cpu_list
from moetier.machine.limits import ROOT, allowed_cpus

logger = logging.getLogger(__name__)

NODES = "sys/devices/system/node"
MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call."""
INTERLEAVE = 3  # MPOL_INTERLEAVE
MOST_NODES = 1024


@dataclass(frozen=True)
class Node:
    """A node whose memory this process may use, with those of its CPUs that were asked about."""

    number: int
    cpus: tuple[int, ...]


def nodes(cpus: Sequence[int], root: Path = ROOT) -> tuple[Node, ...]:
    """Nodes on which `cpus` lie and whose memory this process may use, ascending; empty where the kernel tells nothing.

    root: where /proc and /sys are found.
    """
    allowed = _allowed_memory(root)
    found = []
    for folder in (root / NODES).glob("node[0-9]*"):
        number = int(folder.name.removeprefix("node"))
        here = tuple(sorted(set(cpu_list(_text(folder / "cpulist"))) & set(cpus)))
        if here and (allowed is None or number in allowed):
            found.append(Node(number, here))
    return tuple(sorted(found, key=lambda node: node.number))


def cpus_of_threads(threads: int, cpus: Sequence[int], known: Sequence[Node]) -> list[tuple[int, ...]]:
    """The CPUs that each of `threads` may use: those of one node, nodes in proportion to their CPUs.

    All of `cpus` for every thread where there are fewer than two nodes, or where some CPU lies on none of them.
    """
    by_node = [(cpu, node) for node in known for cpu in node.cpus]
    if len(known) < 2 or {cpu for cpu, _ in by_node} != set(cpus):
        return [tuple(cpus)] * threads
    return [by_node[thread * len(by_node) // threads][1].cpus for thread in range(threads)]


def interleave(address: int, size: int, over: Sequence[Node]) -> str | None:
    """Have the pages of a mapping, none of them touched yet, come from each of the nodes in turn.

    address is the mapping's, a multiple of the page size. None, or why the kernel refused (mbind): then every page
    comes from the node of the thread that touches it first.
    """
    if platform.machine() not in MBIND:
        return f"no known number of mbind on {platform.machine()}"
    mask = (ctypes.c_ulong * (MOST_NODES // 64))()
    for node in over:
        mask[node.number // 64] |= 1 << node.number % 64
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (address, size, INTERLEAVE, ctypes.addressof(mask), MOST_NODES + 1, 0)
    if libc.syscall(ctypes.c_long(MBIND[platform.machine()]), *map(ctypes.c_ulong, arguments)) == 0:
        return None
    return f"mbind: {os.strerror(ctypes.get_errno())}"


def spread(address: int, size: int) -> None:
    """`interleave` over the nodes that this process runs on, if there are several; a refusal is logged once."""
    over = known_nodes()
    if len(over) > 1 and (refused := interleave(address, size, over)):
        _warn_once(f"records stay on the NUMA node that touches them first ({refused}): expect less bandwidth")


@functools.cache
def known_nodes() -> tuple[Node, ...]:
    """`nodes` of the CPUs that this process may use, looked up and logged once."""
    over = nodes(allowed_cpus())
    if not over:
        logger.info("NUMA: the kernel tells nothing (a container may hide it): memory and CPUs are taken as one node")
    elif len(over) > 1:
        parts = ", ".join(f"node {node.number} with {len(node.cpus)} CPUs" for node in over)
        logger.info("NUMA: records are interleaved and threads pinned over %s", parts)
    return over


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("NUMA: %s", text)


def _allowed_memory(root: Path) -> set[int] | None:
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("Mems_allowed_list:"):
            return set(cpu_list(line.split(":", 1)[1]))
    return None


def _text(path: Path) -> str:
    """Content of a file of the kernel's; empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
