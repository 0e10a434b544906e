"""Measure a sentinel: what it finds, how soon, at what cost, and whether it ever tells what is right.

    python benchmarks/sentinel/run.py STORE [--checks N] [--faults N] [--shares 0.005,0.02,0.1] [--json FILE]

One thread serves random calls of one token of every layer in turn, as a server does, over DRAM tiers that hold all
records; for the false alarms also over a quarter of them, so that records are evicted while they are looked at. The
limit that is measured in the same run is the sentinel's own share: the time in which it looks once at everything is
predicted from the time of one look, and compared with the time that a flipped bit took to be found.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from moetier.contract import oracle
from moetier.engine.model import TieredModel
from moetier.identity.calls import random_routing
from moetier.sentinel.watch import Sentinel
from moetier.settings import Settings
from moetier.store.store import Store

RUNS = 5
"""Faults of each cell, at least."""


class Traffic:
    """A model with a sentinel, and calls of its layers."""

    def __init__(self, store: Path, records: str, share: float) -> None:
        settings = Settings.parse({"store": store, "dram_records": records, "heat_file": "/dev/null"})
        self.store = Store.open(store)
        geometry = self.store.manifest.layer_geometry
        self.model = TieredModel(settings, self.store, settings.records_of(geometry.experts) or 0, max_tokens=8)
        self.layers = [self.model.attach(layer.number) for layer in self.store.manifest.layers]
        self.sentinel = Sentinel(self.model, share, halt=False)
        self._rng = np.random.default_rng(0)
        self._x = oracle.to_bf16(self._rng.standard_normal((64, geometry.hidden)).astype(np.float32))
        self._ids, self._weights = random_routing(geometry, 64, self._rng)
        self._out = np.zeros((1, geometry.hidden), np.uint16)
        self.sentinel.start()

    def step(self) -> None:
        """A token through all layers, and what the engine's thread does before it."""
        self.sentinel.settle()
        row = int(self._rng.integers(64))
        one = slice(row, row + 1)
        for layer in self.layers:
            layer.forward(self._x[one], self._ids[one], self._weights[one], self._out)

    def close(self) -> None:
        self.sentinel.close()
        self.model.close()
        self.store.close()


def false_alarms(store: Path, checks: int) -> list[dict[str, Any]]:
    """Check until `checks` were made, half of them with all records in DRAM, half with a quarter."""
    found = []
    for records in ("100%", "25%"):
        traffic = Traffic(store, records, 0.5)
        counted = traffic.model.checks
        while counted.records + counted.calls < checks // 2:
            traffic.step()
        found.append(
            {"in DRAM": records, "records": counted.records, "calls": counted.calls,
             "false alarms": counted.wrong_records + counted.wrong_calls}
        )  # fmt: skip
        traffic.close()
    return found


def detection(store: Path, share: float, faults: int) -> dict[str, Any]:
    """Flip a bit of a random record `faults` times, and measure how long it takes to be found."""
    traffic = Traffic(store, "100%", share)
    counted, choice = traffic.model.checks, random.Random(1)
    while counted.rounds < 1 or counted.calls < 3:
        traffic.step()
    times = []
    begun, before = time.perf_counter(), (counted.us, counted.records, counted.rounds)
    while len(times) < faults:
        for _ in range(choice.randrange(50)):
            traffic.step()  # the sentinel is anywhere in its round
        tier = choice.choice([layer.tier for layer in traffic.layers if layer.tier.resident.size])
        expert = choice.choice(tier.resident.tolist())
        record, address = tier.record(expert), int(tier.addresses[expert])
        record[choice.randrange(record.size)] ^= 1 << choice.randrange(8)
        flipped = time.perf_counter()
        while counted.wrong_records <= len(times) and int(tier.addresses[expert]) == address:
            traffic.step()
        if counted.wrong_records > len(times):  # else it was evicted before it was looked at, and is gone
            times.append(time.perf_counter() - flipped)
    seconds = time.perf_counter() - begun
    cost = (counted.us - before[0]) / 1e6 / seconds
    in_dram = sum(layer.tier.resident.size for layer in traffic.layers) + faults / 2
    rate = (counted.records - before[1]) / seconds
    traffic.close()
    return {
        "share": share, "faults": faults, "found": len(times), "cost": cost,
        "look at all, s": in_dram / rate, "found after, s": statistics.median(times),
        "slowest, s": max(times), "ratio": statistics.median(times) / (in_dram / rate / 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--checks", type=int, default=1_000_000)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--shares", default="0.005,0.02,0.1")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.faults < RUNS:
        parser.error(f"--faults: a median of fewer than {RUNS} says nothing")
    logging.getLogger("moetier").setLevel(logging.CRITICAL)
    report = {
        "detection": [detection(asked.store, float(share), asked.faults) for share in asked.shares.split(",")],
        "false alarms": false_alarms(asked.store, asked.checks),
    }
    for name, rows in report.items():
        print(name)
        print("  ".join(f"{key:>14}" for key in rows[0]))
        for row in rows:
            print("  ".join(f"{value:14.4g}" if isinstance(value, float) else f"{value:>14}" for value in row.values()))
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
