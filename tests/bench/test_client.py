"""Client truth: against a server whose timing is known, every figure is what the script says."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Literal

import psutil
import pytest

from moetier_bench.corpus import Prompts
from moetier_bench.endpoint import connect
from moetier_bench.meter import Meter
from moetier_bench.probes import Coding, Decode, Fairness, Growth, Mixed, Prefill, Prefix
from moetier_bench.probes.base import Probe, Target, Timed, trial
from moetier_bench.samples import Cell, Stream
from tests.bench.scripted import Script, scripted
from tests.bench.simulated import simulated


def measured(script: Script, probe: Probe) -> dict[str, Cell]:
    """Cells of a probe against a scripted server."""

    async def run(url: str) -> dict[str, Cell]:
        async with connect(url, None, None) as endpoint:
            target = Target(endpoint, Prompts(endpoint), Meter(psutil.Process()), url)
            raw = await probe.measure(target)
            restored = type(raw).model_validate_json(raw.model_dump_json())
            return {cell.name: cell for cell in probe.cells(restored)}

    return simulated(script, run)


def near(value: float) -> object:
    """But for rounding to microseconds."""
    return pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("level", [1, 2, 4, 8, 16, 32])
def test_decode_by_concurrency(level: int) -> None:
    probe = Decode(levels=(level,), repeats=1, seconds=1, warmup_seconds=0.1)
    cells = measured(Script(first=0.2, gap=0.05, per_chunk=3), probe)
    assert cells[f"decode.C{level}"].value == near(level * 3 / 0.05)
    assert cells[f"decode.C{level}.gap_p99"].value == near(50)


@pytest.mark.parametrize("level", [1, 2, 4, 8, 16, 32])
def test_ttft_under_concurrency_counts_the_first_reasoning_token(level: int) -> None:
    script = Script(first=0.5, gap=0.05, reasoning=10, role_at=0.01, stop_after=20)
    for stream in simulated(script, partial(asked, level)):
        assert stream.fault() is None
        assert stream.completion_tokens == 20
        assert stream.ttft == near(0.5)


async def asked(level: int, url: str) -> tuple[Stream, ...]:
    """Chats, one every 20 ms."""
    async with connect(url, None, None) as endpoint:
        target = Target(endpoint, Prompts(endpoint), Meter(None), url)
        requests = [Timed(0.02 * n, endpoint.chat("hello", 100)) for n in range(level)]
        return (await trial(target, "x", requests)).streams


def test_on_the_clock_of_this_machine_nothing_is_earlier_than_scripted() -> None:
    """A server in a process of its own, over TCP. How late it is depends on the machine."""
    with scripted(Script(first=0.3, gap=0.02, reasoning=10, role_at=0.01, stop_after=20)) as url:
        streams = asyncio.run(asked(8, url))
    assert [stream.due for stream in streams] == [pytest.approx(0.02 * n) for n in range(8)]
    for stream in streams:
        assert stream.fault() is None
        assert stream.completion_tokens == 20
        assert stream.due <= stream.sent
        for number, at in enumerate(stream.arrivals):
            assert at >= stream.sent + 0.3 + 0.02 * number - 1e-4
        assert stream.end >= stream.arrivals[-1]


def test_prefill_and_ttft_of_exact_lengths() -> None:
    cells = measured(Script(first=0.5), Prefill(lengths=(100, 1000), repeats=1))
    for length in (100, 1000):
        assert cells[f"ttft.{length}"].value == near(0.5)
        assert cells[f"prefill.{length}"].value == near(length / 0.5)


def test_decode_behind_a_context() -> None:
    cells = measured(Script(first=0.2, gap=0.03, per_chunk=2), Growth(lengths=(64,), tokens=64, repeats=1))
    assert cells["growth.64"].value == near(2 / 0.03)


def test_coding_counts_from_the_first_token_on() -> None:
    script = Script(first=0.2, gap=0.02, reasoning=3, role_at=0.01, stop_after=20)
    cells = measured(script, Coding(max_tokens=40, repeats=1))
    assert cells["coding.decode"].value == near(1 / 0.02)
    assert cells["coding.ttft"].value == near(0.2)


@pytest.mark.parametrize("ask", ["question", "text"])
def test_mixed_counts_from_when_each_was_due(ask: Literal["question", "text"]) -> None:
    probe = Mixed(ask=ask, requests=8, per_second=20, max_tokens=64, longest=2048, repeats=2)
    cells = measured(Script(first=0.4, gap=0.02, stop_after=31), probe)
    assert cells["mixed.ttft"].value == near(0.4)
    assert cells["mixed.latency"].value == near(0.4 + 30 * 0.02)
    assert cells["mixed.failed"].value == 0
    samples = {name: len(cells[name].samples) for name in ("mixed.ttft", "mixed.ttft_p99", "mixed.throughput")}
    assert samples == {"mixed.ttft": 16, "mixed.ttft_p99": 2, "mixed.throughput": 2}


def test_prefix_cold_and_shared() -> None:
    cells = measured(Script(first=0.4, cached=0), Prefix(prefix=200, followers=2))
    assert cells["prefix.cold_ttft"].value == near(0.4)
    assert cells["prefix.warm_ttft"].value is None
    cells = measured(Script(first=0.4, cached=200), Prefix(prefix=200, followers=2, repeats=2))
    assert cells["prefix.cold_ttft"].value is None
    assert cells["prefix.warm_ttft"].value == near(0.4)
    assert len(cells["prefix.warm_ttft"].samples) == 4


def test_fairness_of_a_server_that_is_fair() -> None:
    cells = measured(Script(first=0.2, gap=0.05), Fairness(running=4, seconds=1, length=200, repeats=1))
    assert cells["fairness.gap_p99_before"].value == near(50)
    assert cells["fairness.gap_p99_during"].value == near(50)
