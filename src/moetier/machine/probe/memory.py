"""Host memory: the container's limits before the host's size."""

from __future__ import annotations

import re
from pathlib import Path

from moetier.machine import limits as machine
from moetier.machine.facts import Memory
from moetier.machine.probe.files import fields, text

CAP_IPC_LOCK = 14


def probe_memory(root: Path = machine.ROOT) -> Memory:
    """Sizes, the limit on locked memory and huge pages."""
    info, ours = machine.meminfo(root), machine.memory(root)
    return Memory(
        total_bytes=info["MemTotal"],
        limit_bytes=ours.limit,
        available_bytes=ours.available,
        limited_by=str(ours.limited_by) if ours.limited_by else None,
        memlock_bytes=_memlock(root),
        transparent_huge_pages=_transparent(root),
        huge_page_bytes=info.get("Hugepagesize") or None,
        huge_pages_free=info.get("HugePages_Free"),
    )


def _memlock(root: Path) -> int | None:
    """Soft limit in bytes; None where there is none, also for a process with the capability to lock what it likes."""
    capabilities = fields(root / "proc/self/status").get("CapEff", "0")
    if int(capabilities, 16) >> CAP_IPC_LOCK & 1:
        return None
    for line in (text(root / "proc/self/limits") or "").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0]
            return int(soft) if soft.isdecimal() else None
    return None


def _transparent(root: Path) -> str | None:
    """The kernel writes all choices and puts the current one in brackets."""
    chosen = re.search(r"\[(\w+)\]", text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return chosen[1] if chosen else None
