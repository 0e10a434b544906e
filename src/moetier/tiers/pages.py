"""Memory for records on the largest pages that the kernel gives, and which those are."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from moetier.machine import numa
from moetier.machine.limits import ROOT

HUGE_PAGE = 2 << 20
HUGETLB_2MB = 0x40000 | 21 << 26  # MAP_HUGETLB | MAP_HUGE_2MB
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class PageKind(StrEnum):
    """Kind of the pages behind a mapping."""

    EXPLICIT = "explicit"
    """2 MiB pages of the system's pool (vm.nr_hugepages)."""
    TRANSPARENT = "transparent"
    """Ordinary memory that the kernel maps by 2 MiB where it can."""
    NONE = "none"


@dataclass(frozen=True)
class Pages:
    """The kernel's words about a mapping."""

    kind: PageKind
    huge_share: float
    """Share of the resident bytes that is on huge pages, 0 to 1."""

    def __str__(self) -> str:
        return {
            PageKind.EXPLICIT: "explicit huge pages (the pool of vm.nr_hugepages)",
            PageKind.TRANSPARENT: f"transparent huge pages, {self.huge_share:.0%} of them",
            PageKind.NONE: "small pages: vm.nr_hugepages, or madvise in /sys/kernel/mm/transparent_hugepage/enabled, "
            "would let the kernels read faster",
        }[self.kind]


def map_touched(size: int) -> mmap.mmap:
    """Anonymous memory of at least `size` bytes, all of it there: from the pool of huge pages where that has enough.

    Spread over the NUMA nodes that this process runs on. OSError where there is not enough memory.
    """
    if size >= HUGE_PAGE and (memory := _from_pool(-(-size // HUGE_PAGE) * HUGE_PAGE)) is not None:
        return memory
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    content = np.frombuffer(memory, np.uint8)
    numa.spread(content.ctypes.data, size)
    content[:: mmap.PAGESIZE] = 0
    return memory


def _from_pool(size: int) -> mmap.mmap | None:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | HUGETLB_2MB)
    except OSError:
        return None  # the usual case: no pool, or too few free pages in it
    numa.spread(np.frombuffer(memory, np.uint8).ctypes.data, size)
    try:
        memory.madvise(POPULATE_WRITE)  # a cgroup's limit on huge pages fails here, where a touch would end the process
    except OSError:
        memory.close()
        return None
    return memory


def pages_at(address: int, root: Path = ROOT) -> Pages:
    """Pages of the mapping that `address` lies in, from /proc/self/smaps; the kernel walks all memory for it."""
    fields: dict[str, int] = {}
    inside = False
    with (root / "proc/self/smaps").open() as lines:
        for line in lines:
            name, *rest = line.split()
            if not name.endswith(":"):  # the head of a mapping: 7f00-7fff rw-p ...
                if inside:
                    break
                first, _, last = name.partition("-")
                inside = int(first, 16) <= address < int(last, 16)
            elif inside and len(rest) == 2:
                fields[name.removesuffix(":")] = int(rest[0])
    if fields.get("KernelPageSize", 0) * 1024 >= HUGE_PAGE:
        return Pages(PageKind.EXPLICIT, 1.0)
    huge, resident = fields.get("AnonHugePages", 0), fields.get("Rss", 0)
    if not huge:
        return Pages(PageKind.NONE, 0.0)
    return Pages(PageKind.TRANSPARENT, huge / resident)
