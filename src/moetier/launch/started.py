"""Figures of an engine that has started: its KV cache, and the device's memory.

How many blocks a request takes depends on context, batch and scheduling, and differs between groups of layers, so it is
the engine's own answer, written to a small file that the launcher reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from moetier.budget import GIB
from moetier.launch.derive import KvCapacity

NAME = "started.json"


@dataclass(frozen=True)
class Started:
    """Figures of the first rank. kv_bytes: allocated for it; device_bytes: in use on its device, None on the CPU."""

    kv_bytes: int
    blocks: int
    blocks_per_request: int
    context: int
    device_bytes: int | None = None

    @property
    def cache(self) -> KvCapacity:
        return KvCapacity(self.blocks, self.blocks_per_request, max(self.kv_bytes // self.blocks, 1), self.context)

    def lines(self, planned_device_bytes: int | None = None) -> Iterator[str]:
        """For the terminal. planned_device_bytes: what the plan gave a device."""
        cache = self.cache
        yield (
            f"KV cache: {self.kv_bytes / GIB:.2f} GiB, {cache.blocks:,} blocks; a request of {cache.context:,} tokens "
            f"takes {cache.blocks_per_request:,}: {cache.concurrency:.4g} such requests at a time"
        )
        if self.device_bytes is not None:
            planned = "" if planned_device_bytes is None else f" ({planned_device_bytes / GIB:.1f} GiB planned)"
            yield f"device memory in use: {self.device_bytes / GIB:.1f} GiB{planned}"


def write_started(folder: Path, started: Started) -> None:
    """In one piece; OSError where the folder takes nothing."""
    aside = folder / f"{NAME}.tmp"
    aside.write_text(json.dumps(asdict(started)))
    aside.replace(folder / NAME)


def read_started(folder: Path) -> Started | None:
    """None where no engine has written there, or not this form."""
    try:
        return Started(**json.loads((folder / NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None
