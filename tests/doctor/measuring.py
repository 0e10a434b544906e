"""Measurements that take no time, for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetier.doctor import judge_rates
from moetier.doctor.measure import cpu as cpu_measure
from moetier.doctor.measure import disk as disk_measure
from moetier.doctor.measure import kernel as bench


def little_to_measure(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Read little, for a moment, beside whatever else runs; keep the rates in this folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(judge_rates, "MOST_OTHERS", 1e9)  # tests run on busy machines
    monkeypatch.setattr(bench, "SECONDS_PER_ROW", 0.0)
    monkeypatch.setattr(cpu_measure, "READ_BYTES", 64 << 20)
    monkeypatch.setattr(cpu_measure, "TOKENS", (1, 3))
    monkeypatch.setattr(cpu_measure, "EXPERTS", 8)
    monkeypatch.setattr(disk_measure, "SECONDS", 0.02)
    monkeypatch.setattr(disk_measure, "SPAN", 4 << 20)
    monkeypatch.setattr(disk_measure, "PIECE", 1 << 20)
    monkeypatch.setattr(disk_measure, "DEPTHS", (1, 4))
