"""The evaluation sets as a probe: what the server refuses is counted, not asked for again until it is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from moetier_bench.corpus import Prompts
from moetier_bench.endpoint import connect
from moetier_bench.meter import Meter
from moetier_bench.probes import Quality, Soak
from moetier_bench.probes.base import Raw, Target
from tests.bench.scripted import Script, scripted

SETS = (Path(__file__).resolve().parents[2] / "models" / "eval",)


def measured(probe: Quality | Soak, script: Script) -> Raw:
    async def measure() -> Raw:
        with scripted(script) as url:
            async with connect(url, None, None) as endpoint:
                target = Target(endpoint, Prompts(endpoint), Meter(psutil.Process()), url, sets=SETS)
                return await probe.measure(target)

    return asyncio.run(measure())


@pytest.mark.parametrize("every", [None, 3], ids=["never", "every third"])
@pytest.mark.parametrize(
    "probe",
    [
        Quality(tasks=("copy",), limit=6, concurrency=1),
        Soak(tasks=("copy",), minutes=0.01, concurrency=1, every=0.1),
    ],
    ids=lambda probe: str(probe.probe),
)
def test_a_request_that_fails_once_is_a_failure(probe: Quality | Soak, every: int | None) -> None:
    raw = measured(probe, Script(fail_every=every))
    if every is None:
        assert raw.skipped == {}
        assert len(raw.answers) >= 4
    else:
        assert all("answered with status 500" in reason for reason in raw.skipped.values())
        assert raw.skipped
        assert all(cell.value is None for cell in probe.cells(raw) if cell.name != "soak.minutes")
