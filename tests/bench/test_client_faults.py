"""Known faults of load generators: each is reproduced on a server that invites it, with the wrong figure that it gives,
and what our client says of the same streams is right, or no figure.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

import psutil
import pytest

from moetier_bench import BenchError
from moetier_bench.corpus import Prompts
from moetier_bench.endpoint import connect
from moetier_bench.meter import Meter
from moetier_bench.probes import Coding, Decode, Mixed, Prefill, Prefix
from moetier_bench.probes.base import Probe, Raw, Target, Timed, trial
from moetier_bench.samples import Cell, Stream
from tests.bench.scripted import POSITIONS, Script, scripted
from tests.bench.simulated import simulated


def probed(script: Script, probe: Probe) -> tuple[Raw, dict[str, Cell]]:
    """What a probe measured against a scripted server, and its cells."""

    async def run(url: str) -> Raw:
        async with connect(url, None, None) as endpoint:
            return await probe.measure(Target(endpoint, Prompts(endpoint), Meter(psutil.Process()), url))

    raw = simulated(script, run)
    return raw, {cell.name: cell for cell in probe.cells(raw)}


def asked(script: Script, due: Sequence[float] = (0.0,), max_tokens: int = 1000) -> tuple[Stream, ...]:
    """Streams of chat requests that are sent when they are due."""

    async def run(url: str) -> tuple[Stream, ...]:
        async with connect(url, None, None) as endpoint:
            target = Target(endpoint, Prompts(endpoint), Meter(None), url)
            requests = [Timed(at, endpoint.chat("hello", max_tokens)) for at in due]
            return (await trial(target, "x", requests)).streams

    return simulated(script, run)


def near(value: float) -> object:
    """But for rounding to microseconds."""
    return pytest.approx(value, rel=1e-4)


QUICK = Decode(levels=(1,), repeats=1, seconds=1, warmup_seconds=0.2)


@pytest.mark.parametrize("running_usage", [True, False])
def test_1_reasoning_tokens_ignored_in_ttft(running_usage: bool) -> None:
    (stream,) = asked(Script(first=0.5, gap=0.1, reasoning=10, stop_after=15, running_usage=running_usage))
    first_content = stream.arrivals[10] - stream.due
    assert first_content == near(1.5)  # three times too long
    assert stream.ttft == near(0.5)


def test_2_an_empty_chunk_with_the_role_taken_for_the_first_token() -> None:
    (stream,) = asked(Script(first=0.5, gap=0.1, role_at=0.01, stop_after=5))
    assert stream.ttft == near(0.5)  # and not 0.01


def test_3_chunks_counted_as_tokens() -> None:
    raw, cells = probed(Script(gap=0.05, per_chunk=3), QUICK)
    (stream,) = raw.trials[0].streams
    chunks_per_second = 1 / statistics.mean(stream.gaps_us[1:]) * 1e6
    assert chunks_per_second == near(20)  # a third of the truth
    assert cells["decode.C1"].value == near(60)


def test_4_throughput_as_one_over_the_median_gap() -> None:
    # Every other token comes at once after the one before it, as with a drafter.
    stream = Stream(due=0, sent=0, end=9, status=200, cut=True, gaps_us=(1000, *(1000, 99000) * 40), tokens=(1,) * 81)
    trials = Raw.model_validate({"trials": [{"label": "C1", "want": 1, "streams": [stream]}]})
    assert 1e6 / statistics.median_low(stream.gaps_us) == 1000  # fifty times too fast
    assert QUICK.cells(trials)[0].value == near(20)


def test_5_coordinated_omission() -> None:
    streams = asked(Script(first=0.3, gap=0.01, stop_after=10, serial=True), due=[0.1 * n for n in range(8)])
    waits = [stream.ttft for stream in streams]
    # A client that sends the next request when the last is answered sees 0.3 s each time.
    assert waits[-1] > 2
    assert waits == sorted(waits)


def test_5b_a_client_that_falls_behind_still_counts_from_when_it_was_due() -> None:
    stream = Stream(due=1.0, sent=3.0, end=4, status=200, finish="stop", completion_tokens=1, gaps_us=(500_000,))
    assert stream.ttft == near(2.5)


def test_6_http_errors_taken_for_fast_answers() -> None:
    raw, cells = probed(Script(gap=0.01, stop_after=20, fail_every=4), Mixed(requests=8, per_second=50, max_tokens=40))
    assert sum(stream.status == 500 for stream in raw.trials[0].streams) == 2
    assert cells["mixed.ttft"].value is None
    assert "2 of the requests failed, the first: HTTP status 500" in (cells["mixed.ttft"].reason or "")
    assert cells["mixed.failed"].value == 2


def test_7_an_error_within_a_stream_of_status_200() -> None:
    _, cells = probed(Script(gap=0.02, error_after=10), QUICK)
    assert cells["decode.C1"].value is None
    assert "engine died" in (cells["decode.C1"].reason or "")


@pytest.mark.parametrize(
    "script",
    [
        Script(gap=0.02, break_after=10),
        Script(gap=0.02, stop_after=9, end_anyway=b""),
        Script(gap=0.02, stop_after=9, end_anyway=b"e\r\ndata: [DONE]\n\n\r\n"),
    ],
    ids=["connection broken", "ended without a word", "done without a reason"],
)
def test_8_a_stream_that_broke_off_taken_for_complete(script: Script) -> None:
    (stream,) = asked(script)
    assert stream.completion_tokens in (9, 10)  # it looks like a short answer
    assert stream.fault() is not None


def test_9_truncated_answers_taken_for_finished_ones() -> None:
    _, cells = probed(Script(gap=0.005), Coding(max_tokens=16, repeats=1))
    assert cells["coding.truncated"].value == 5
    _, cells = probed(Script(gap=0.005, stop_after=10), Coding(max_tokens=16, repeats=1))
    assert cells["coding.truncated"].value == 0


@pytest.mark.parametrize(("stop_after", "figures"), [(30, True), (None, False)], ids=["they end", "they do not"])
def test_9b_answers_without_an_end_of_their_own_taken_for_natural_ones(stop_after: int | None, figures: bool) -> None:
    probe = Mixed(ask="question", requests=6, per_second=50, longest=512, max_tokens=40)
    _, cells = probed(Script(first=0.02, gap=0.005, stop_after=stop_after), probe)
    measured = [cells[f"mixed.{name}"] for name in ("ttft", "ttft_p99", "latency", "throughput")]
    assert all((cell.value is not None) == figures for cell in measured)
    assert {cell.reason for cell in measured} == {None if figures else "6 of 6 answers were truncated at 40 tokens"}
    assert (cells["mixed.truncated"].value, cells["mixed.failed"].value) == (0 if figures else 6, 0)


def test_10_a_warm_prefix_cache_counted_as_prefill() -> None:
    raw, cells = probed(Script(first=0.1, cached=90), Prefill(lengths=(100,), repeats=1))
    assert 100 / raw.trials[0].streams[0].ttft == near(1000)  # ten tokens were computed, not a hundred
    assert cells["prefill.100"].value is None
    assert "not cold: the server took 90 tokens from its prefix cache" in (cells["prefill.100"].reason or "")


def test_10b_without_counters_nothing_is_proved_cold() -> None:
    _, cells = probed(Script(metrics=False), Prefill(lengths=(100,), repeats=1))
    assert "not proved cold" in (cells["ttft.100"].reason or "")


def test_11_a_prompt_of_another_length_than_meant() -> None:
    _, cells = probed(Script(extra_prompt_tokens=7), Prefill(lengths=(100,), repeats=1))
    assert cells["ttft.100"].reason == "100 prompt tokens were meant, the server counted 107"


def test_12_a_stall_hidden_behind_the_last_token() -> None:
    # 20 tokens in the first second, then nothing: the rate up to the last token would stay 20.
    stream = Stream(due=0, sent=0, end=5, status=200, cut=True, gaps_us=(0, *(50_000,) * 20), tokens=(1,) * 21)
    trials = Raw.model_validate({"trials": [{"label": "C1", "want": 1, "streams": [stream]}]})
    probe = Decode(levels=(1,), repeats=1, seconds=4, warmup_seconds=0)
    cells = {cell.name: cell for cell in probe.cells(trials)}
    assert cells["decode.C1"].value == near(5)
    assert cells["decode.C1.gap_p99"].value == near(3000)


def test_13_ramp_and_end_inside_the_window() -> None:
    _, cells = probed(Script(first=0.1, gap=0.05, stop_after=10), QUICK)
    assert "ended before the window" in (cells["decode.C1"].reason or "")
    probe = Decode(levels=(4,), repeats=1, seconds=1, warmup_seconds=0.1, stagger_seconds=0.3)
    raw, cells = probed(Script(first=0.3, gap=0.05), probe)
    tokens = sum(sum(stream.tokens or ()) for stream in raw.trials[0].streams)
    whole = tokens / max(stream.arrivals[-1] for stream in raw.trials[0].streams)
    assert whole < 0.8 * 80  # tokens over the whole run, ramp included
    assert cells["decode.C4"].value == near(80)


def test_14_no_usage_no_figure() -> None:
    _, cells = probed(Script(gap=0.05, per_chunk=3, running_usage=False), QUICK)
    assert "no running usage" in (cells["decode.C1"].reason or "")
    (stream,) = asked(Script(gap=0.01, stop_after=5, running_usage=False, final_usage=False))
    assert stream.fault() == "the server gives no usage"


def test_15_another_server_than_meant() -> None:
    async def run(url: str) -> None:
        async with connect(url, None, "nano-mxfp4"):
            pass

    with scripted(Script()) as url, pytest.raises(BenchError, match="expected the model nano-mxfp4, found scripted"):
        asyncio.run(run(url))


def test_16_a_prompt_longer_than_the_model_is_no_failure_of_the_model() -> None:
    _, cells = probed(Script(), Prefill(lengths=(POSITIONS,), repeats=1))
    assert cells[f"ttft.{POSITIONS}"].reason == f"needs {POSITIONS + 1} positions, the server has {POSITIONS}"


def test_17_a_shared_prefix_that_the_cache_did_not_know() -> None:
    _, cells = probed(Script(first=0.05), Prefix(prefix=100, followers=1))
    assert cells["prefix.cold_ttft"].value is not None
    assert cells["prefix.warm_ttft"].reason == "the server's counters show no hit of the prefix"
