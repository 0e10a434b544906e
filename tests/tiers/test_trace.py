"""Traces: what is written is read, what is damaged is refused, and the simulator counts as one would by hand."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from moetier.errors import SettingsError
from moetier.tiers.policy import POLICIES
from moetier.tiers.step import Step
from moetier.trace.record import BLOCK, CALL, HEADER, MAGIC, Trace, TracedCall, TraceHeader, TraceWriter, write_trace
from moetier.trace.simulate import Plan, hit_rate, simulate

IDENTITY = "5a" * 32
DECODE = Step(1, False)


def header(layers: int = 2, experts: int = 8, top_k: int = 2) -> TraceHeader:
    return TraceHeader(layers, experts, top_k, IDENTITY)


def call(layer: int, *rows: tuple[int, ...], step: Step = DECODE) -> TracedCall:
    return TracedCall(layer, step, np.array(rows, np.int32))


def decode_trace(path: Path, *sets: tuple[int, int]) -> Trace:
    """One layer, one token a step."""
    write_trace(path, header(layers=1), [call(0, pair) for pair in sets])
    return Trace.open(path)


@pytest.mark.parametrize("experts", [8, 255, 256, 512])
def test_what_is_written_is_read(tmp_path: Path, experts: int) -> None:
    generator = np.random.default_rng(experts)
    calls = [
        TracedCall(
            layer,
            Step(int(generator.integers(0, 9)), bool(generator.integers(2))),
            generator.integers(0, experts + 1, (int(generator.integers(0, 40)), 6), np.int32),
        )
        for layer in [0, 1, 2] * 300
    ]
    write_trace(tmp_path / "t", header(3, experts, 6), calls)
    trace = Trace.open(tmp_path / "t")
    assert trace.header == header(3, experts, 6)
    found = list(trace.calls())
    assert len(found) == len(calls)
    for written, read in zip(calls, found, strict=True):
        assert (read.layer, read.step) == (written.layer, written.step)
        assert np.array_equal(read.ids, written.ids)
    assert [len(step) for step in trace.steps()] == [3] * 300


def test_ids_that_name_no_expert(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", header())
    writer.add(0, DECODE, np.array([[-1, 3], [8, 1 << 40]], np.int64))
    writer.close()
    (found,) = Trace.open(tmp_path / "t").calls()
    assert found.ids.tolist() == [[8, 3], [8, 8]]


def test_steps_end_where_layers_do_not_ascend(tmp_path: Path) -> None:
    layers = [0, 1, 2, 2, 0, 1, 2, 0]
    write_trace(tmp_path / "t", header(3), [call(layer, (0, 1)) for layer in layers])
    steps = list(Trace.open(tmp_path / "t").steps())
    assert [[c.layer for c in step] for step in steps] == [[0, 1, 2], [2], [0, 1, 2], [0]]


def test_cut_trace_is_readable_up_to_its_last_whole_block(tmp_path: Path) -> None:
    path = tmp_path / "t"
    rows = [tuple(row) for row in np.random.default_rng(0).integers(0, 8, (5000, 2))]
    write_trace(path, header(), [call(0, *rows) for _ in range(20)])
    whole = path.read_bytes()
    counts = set()
    for size in range(HEADER.size, len(whole), 4999):
        path.write_bytes(whole[:size])
        counts.add(len(list(Trace.open(path).calls())))
    assert 0 in counts
    assert len(counts) > 2
    assert max(counts) < 20


def packed(raw: bytes, size: int | None = None) -> bytes:
    data = zlib.compress(raw)
    return BLOCK.pack(len(raw) if size is None else size, len(data), zlib.crc32(data)) + data


GOOD = HEADER.pack(MAGIC, 1, 2, 8, 2, bytes.fromhex(IDENTITY))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "expected a routing trace"),
    "another-file": (b"GGUF" * 40, "expected a routing trace"),
    "short-header": (GOOD[:40], "expected a routing trace"),
    "future-format": (HEADER.pack(MAGIC, 2, 2, 8, 2, b""), "format 1, found format 2"),
    "no-experts": (HEADER.pack(MAGIC, 1, 2, 0, 2, b""), "0 experts"),
    "top-k-beyond-experts": (HEADER.pack(MAGIC, 1, 2, 8, 9, b""), "top-9"),
    "checksum": (GOOD + packed(CALL.pack(0, 0, 1, 0))[:-1] + b"\0", "wrong checksum"),
    "huge-block": (GOOD + BLOCK.pack(1 << 31, 8, 0) + b"\0" * 8, "impossible size"),
    "not-zlib": (GOOD + BLOCK.pack(4, 4, zlib.crc32(b"abcd")) + b"abcd", "incorrect header check"),
    "bomb": (GOOD + packed(b"\0" * (1 << 22), size=12), "another size"),
    "too-small": (GOOD + packed(CALL.pack(0, 0, 1, 0), size=99), "another size"),
    "half-a-call": (GOOD + packed(b"\0" * 5), "ends inside a call"),
    "huge-call": (GOOD + packed(CALL.pack(0, 0, 1, 0xFFFFFFFF)), "does not fit"),
    "layer": (GOOD + packed(CALL.pack(2, 0, 1, 0)), "layer 2"),
    "expert": (GOOD + packed(CALL.pack(0, 0, 1, 1) + b"\x03\x09"), "beyond 8"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        list(Trace.open(path).calls())


def test_pipe_and_absent_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsError, match="no regular file"):
        Trace.open(tmp_path / "pipe")
    with pytest.raises(SettingsError, match="No such file"):
        Trace.open(tmp_path / "absent")


def test_trace_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"precious")
    with pytest.raises(SettingsError, match="exists already"):
        TraceWriter(tmp_path / "t", header())
    assert (tmp_path / "t").read_bytes() == b"precious"


def test_full_disk_ends_the_recording_not_the_service(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", header())
    writer._file.close()
    writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115, PTH123 (the writer closes it)
    ids = np.zeros((50_000, 2), np.int64)
    for _ in range(3):
        writer.add(0, DECODE, ids)
    writer.close()
    assert caplog.text.count("No space left") == 1


def test_hits_counted_by_hand(tmp_path: Path) -> None:
    """Two slots of LRU, from the first step's heat: 0 and 1."""
    trace = decode_trace(tmp_path / "t", (0, 1), (0, 1), (0, 2), (0, 2), (3, 4), (0, 2))
    score = simulate(trace, Plan(slots=2, policy="lru", learn=0)).decode
    # (0,1) hit both; (0,2) one, 2 replaces 1; (0,2) both; (3,4) none, both replaced; (0,2) none.
    assert (score.steps, score.uses, score.hits) == (5, 10, 5)
    assert score.misses_per_step == 1.0
    assert score.layers_with_miss_per_step == 3 / 5
    assert score.fills == 1 + 2 + 2


def test_residents_stay(tmp_path: Path) -> None:
    trace = decode_trace(tmp_path / "t", (0, 1), (2, 3), (0, 4), (5, 6), (0, 7))
    assert simulate(trace, Plan(slots=1, resident=1, learn=0)).decode.hits == 2
    assert simulate(trace, Plan(slots=1, policy="lru", learn=0)).decode.hits == 0


def test_fills_are_limited(tmp_path: Path) -> None:
    trace = decode_trace(tmp_path / "t", *[(2 * i % 8, (2 * i + 1) % 8) for i in range(40)])
    free, limited, none = (simulate(trace, Plan(slots=4, policy="lru", fills=fills)).decode for fills in (None, 1, 0))
    assert free.fills > limited.fills > none.fills == 0
    assert limited.fills <= limited.steps


def test_prompts_are_scored_apart(tmp_path: Path) -> None:
    prompt = [call(0, *[(i % 8, (i + 1) % 8) for i in range(16)], step=Step(1, True))]
    decode = [call(0, (0, 1))]
    write_trace(tmp_path / "t", header(layers=1), [*decode * 4, *prompt, *decode * 4])
    scores = simulate(Trace.open(tmp_path / "t"), Plan(slots=2))
    assert (scores.prefill.steps, scores.prefill.uses, scores.prefill.hits) == (1, 8, 2)
    assert scores.decode.hit_rate == 1, "the prompt left decode's slots alone"


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_for_all_hit_always_and_none_never(tmp_path: Path, policy: str) -> None:
    generator = np.random.default_rng(1)
    trace = decode_trace(tmp_path / "t", *[tuple(generator.choice(8, 2, replace=False)) for _ in range(50)])
    rates = [hit_rate(trace, slots, policy) for slots in (0, 2, 4, 8)]
    assert (rates[0], rates[-1]) == (0, 1)
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(slots=9), "9 slots"),
        (Plan(slots=2, resident=3), "3 resident"),
        (Plan(slots=2, policy="mru"), "mru"),
        (Plan(slots=2, fills=-1), "-1"),
        (Plan(slots=2, learn=1.0), "learn"),
        (Plan(slots=2, learn=0.99), "more than"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_plan_that_does_not_fit(tmp_path: Path, plan: Plan, message: str) -> None:
    trace = decode_trace(tmp_path / "t", (0, 1), (2, 3))
    with pytest.raises(SettingsError, match=message):
        simulate(trace, plan)


def test_heat_of_another_model(tmp_path: Path) -> None:
    trace = decode_trace(tmp_path / "t", (0, 1), (2, 3))
    with pytest.raises(SettingsError, match="does not fit a trace"):
        simulate(trace, Plan(slots=2), np.zeros((2, 8), np.uint64))


def test_heat_given_teaches_instead_of_the_trace(tmp_path: Path) -> None:
    trace = decode_trace(tmp_path / "t", (6, 7))
    for hot, rate in (((6, 7), 1), ((0, 1), 0)):
        heat = np.isin(np.arange(8), hot).astype(np.uint64)[None]
        assert simulate(trace, Plan(slots=2), heat).decode.hit_rate == rate
