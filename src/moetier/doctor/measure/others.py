"""How much of the CPUs something else used while we measured: rates of a busy machine say nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from moetier.machine import limits as machine
from moetier.machine.probe.files import text

IDLE = (3, 4)
"""Columns of /proc/stat that count no work: idle, and waiting for a disk."""
COLUMNS = 8
"""Up to stolen time; what follows is counted in the first ones too."""


class Others:
    """Counts from its making on."""

    def __init__(self, cpus: Sequence[int], root: Path = machine.ROOT) -> None:
        self._cpus, self._root = frozenset(f"cpu{cpu}" for cpu in cpus), root
        self._busy, self._own, self._start = self._read(), time.process_time(), time.monotonic()

    def cpus(self) -> float | None:
        """CPUs' worth of time that was not ours, stolen time included; None where /proc/stat tells nothing."""
        busy, own, seconds = self._read(), time.process_time() - self._own, time.monotonic() - self._start
        if busy is None or self._busy is None or seconds <= 0:
            return None
        return max(0.0, (busy - self._busy - own) / seconds)

    def _read(self) -> float | None:
        """Seconds that our CPUs were busy since the machine's start."""
        ticks = 0
        lines = [line.split() for line in (text(self._root / "proc/stat") or "").splitlines()]
        ours = [words[1 : 1 + COLUMNS] for words in lines if words and words[0] in self._cpus]
        for columns in ours:
            ticks += sum(int(word) for column, word in enumerate(columns) if column not in IDLE)
        return ticks / os.sysconf("SC_CLK_TCK") if ours else None
