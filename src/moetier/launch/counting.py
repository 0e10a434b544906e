"""Counts of a server's processes on their way to whoever asks: one small file a rank, written every second.

The engine's processes have no port of their own, and vLLM's statistics carry only vLLM's numbers. So each rank replaces
its file in a folder that all know, and the frontend reads the files when it is asked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moetier.engine import Counters, TieredModel
from moetier.engine.counters import Checks

logger = logging.getLogger(__name__)

SECONDS = 1.0
"""Between writes: so old may be what is read."""


@dataclass(frozen=True)
class Snapshot:
    """Counts of a rank. layers: by the layer's number in the checkpoint; disk: with the reads of the start."""

    rank: int
    layers: dict[int, Counters]
    disk_reads: int
    disk_bytes: int
    disk_retries: int
    healed: int
    checks: Checks = field(default_factory=Checks)
    """Those of the sentinel."""
    direct: bool = True
    """Whether reads of the store bypass the page cache."""

    @classmethod
    def of(cls, model: TieredModel) -> Snapshot:
        disk, layers = model.reader.counters, model.store.manifest.layers
        return cls(
            model.part.rank,
            {layers[index].number: model.layer_counters[index] for index in model.attached},
            disk.reads,
            disk.bytes,
            disk.retries,
            model.healer.healed if model.healer else 0,
            model.checks,
            model.reader.direct,
        )

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """The inverse of json.dumps(asdict(...)); ValueError, KeyError or TypeError for another text."""
        state: dict[str, Any] = json.loads(text)
        layers = {int(number): Counters(**counters) for number, counters in state.pop("layers").items()}
        return cls(layers=layers, checks=Checks(**state.pop("checks")), **state)

    @property
    def total(self) -> Counters:
        return Counters.total(self.layers.values())


class Publisher:
    """Writes a model's counters into `folder` every second until it is closed, then once more."""

    def __init__(self, model: TieredModel, folder: Path) -> None:
        self._model = model
        self._path = folder / f"rank-{model.part.rank}.json"
        self._written = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moetier-counters", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SECONDS):
            self._write()

    def _write(self) -> None:
        text = json.dumps(asdict(Snapshot.of(self._model)))
        if text == self._written:
            return
        aside = self._path.with_suffix(".tmp")
        try:
            aside.write_text(text)
            aside.replace(self._path)
            self._written = text
        except OSError as error:  # a full disk costs the metrics, never the service
            logger.debug("counters were not written to %s: %s", self._path, error)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()
        self._write()


def read_snapshots(folder: Path) -> list[Snapshot]:
    """Return what every rank wrote last, by rank; a file that cannot be read is left out."""
    found = []
    for path in folder.glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            found.append(Snapshot.parse(path.read_text()))
    return sorted(found, key=lambda snapshot: snapshot.rank)


def line(now: list[Snapshot], before: list[Snapshot]) -> str:
    """One line of a log about what was counted between two readings; "" if nothing was."""
    then = Counters.total(snapshot.total for snapshot in before)
    total = Counters.total(snapshot.total for snapshot in now).since(then)
    if not total.calls or not now:
        return ""
    old = before[0].layers if before else {}
    rates = [
        counters.since(old.get(number, Counters())).hit_rate
        for number, counters in now[0].layers.items()
        if counters.calls > old.get(number, Counters()).calls
    ]
    parts = [
        f"hit rate {total.hit_rate:.1%} (layers {min(rates, default=1):.0%} to {max(rates, default=1):.0%})",
        f"{total.misses} misses in {total.calls} layer calls",
        f"reads: {total.device_reads} device, {total.dram_reads} DRAM, {total.disk_reads} disk",
        f"CPU {total.cpu_us / 1e6:.2f} s, waited {total.wait_us / 1e6:.2f} s",
    ]
    if total.slot_fills or total.streamed_bytes:
        parts.append(f"{total.slot_fills} slot fills, {total.streamed_bytes / 2**20:.1f} MiB streamed")
    wrong = sum(snapshot.checks.wrong_records + snapshot.checks.wrong_calls for snapshot in now)
    if wrong:
        parts.append(f"{wrong} CORRUPTIONS since the start")
    healed = sum(snapshot.healed for snapshot in now)
    if healed:
        parts.append(f"{healed} records healed since the start")
    return "; ".join(parts)
