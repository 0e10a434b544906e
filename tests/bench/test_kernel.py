"""The kernel benchmark: what it reports, not how fast this machine is."""

from __future__ import annotations

import json

import pytest

from moetier.contract import LayerGeometry
from moetier.doctor.measure import kernel
from moetier.doctor.measure.kernel import ImpossibleRateError, Row, possible
from moetier.errors import SettingsError
from moetier.kernels.cpu import available_isas


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(kernel, "SECONDS_PER_ROW", 0.0)


def test_rows_and_limits():
    seen = []
    result = kernel.bench_kernel("64,64,8,2", threads=[1, 2], isas=["portable"], tokens=[1, 3], report=seen.append)
    assert [(row["M"], row["isa"], row["threads"]) for row in result["rows"]] == [
        (1, "portable", 1), (3, "portable", 1), (1, "portable", 2), (3, "portable", 2),
    ]  # fmt: skip
    for row, reported in zip(result["rows"], seen, strict=True):
        assert row["us"] == reported.us > 0
        assert row["gops"] > 0 < row["peak_gops"]
        weights = 3 * 64 * 64
        assert row["gops"] == pytest.approx(2 * row["M"] * 2 * weights / row["us"] / 1e3)
        at_most = min(8, row["M"] * 2) * weights * 17 / 32 / row["us"] / 1e3
        assert 0 < row["gbps"] <= at_most * 1.0001
        assert row["read_gbps"] > 0
        limit = max(row["gbps"] / row["read_gbps"], row["gops"] / row["peak_gops"])
        assert row["ratio_to_limit"] == pytest.approx(limit)
    for threads in (1, 2):
        assert len({row["peak_gops"] for row in result["rows"] if row["threads"] == threads}) == 1
    assert json.loads(json.dumps(result))["shape"] == {
        "hidden": 64, "intermediate": 64, "experts": 8, "top_k": 2, "slices": 1,
    }  # fmt: skip
    assert result["machine"]["cpus"] >= 1


def test_the_best_kernel_set_is_the_default():
    result = kernel.bench_kernel("64,64,8,2", threads=[1], tokens=[1])
    assert [row["isa"] for row in result["rows"]] == [available_isas()[0]]


SIZES = {
    "v4-flash": LayerGeometry(4096, 2048, 256, 6),
    "v4.1-flash": LayerGeometry(5120, 2304, 384, 6),
    "glm-5.2": LayerGeometry(6144, 2048, 256, 8),
    "kimi-k2": LayerGeometry(7168, 2048, 384, 8),
    "qwen3-235b": LayerGeometry(4096, 1536, 128, 8),
}


@pytest.mark.parametrize("name", kernel.SHAPES)
def test_shapes_by_name(name):
    """They are those of the bundled models; written out here, so that neither list can change alone."""
    assert kernel.parse_shape(name) == SIZES[name]


def test_a_shape_by_numbers():
    assert kernel.parse_shape("96,64,5,2") == LayerGeometry(96, 64, 5, 2)


@pytest.mark.parametrize("text", ["v5", "1,2,3", "a,b,c,d", ""])
def test_shapes_that_are_none(text):
    with pytest.raises(SettingsError, match="v4-flash"):
        kernel.parse_shape(text)


def test_fewer_experts_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(kernel, "MEMORY_SHARE", 1e-9)
    with pytest.raises(SettingsError, match="memory"):
        kernel.bench_kernel("4096,2048,256,6")


def row(**changes):
    good = {
        "M": 1, "isa": "avx2", "threads": 1, "us": 10.0, "gbps": 9.0, "gops": 5.0, "read_gbps": 10.0,
        "peak_gops": 100.0, "ratio_to_limit": 0.9,
    }  # fmt: skip
    return Row(**{**good, **changes})


def test_a_figure_up_to_a_twentieth_above_its_limit_can_be():
    assert possible(row(ratio_to_limit=1.05)).ratio_to_limit == 1.05


@pytest.mark.parametrize(
    "changes",
    [{"ratio_to_limit": 1.06}, {"ratio_to_limit": 2.6}, {"us": -1.0}, {"gbps": float("nan")}, {"gops": float("inf")},
     {"ratio_to_limit": float("nan")}],
    ids=["1.06", "2.6", "negative", "nan", "infinite", "no-ratio"],
)  # fmt: skip
def test_a_figure_that_cannot_be_is_refused(changes):
    with pytest.raises(ImpossibleRateError, match=r"expected at most 1\.05 of the nearer limit"):
        possible(row(**changes))


def test_a_limit_measured_too_low_is_measured_again_and_then_refused(monkeypatch):
    """Reads of a thousandth of the truth, as a wrong loop once gave a third; nothing of the row is reported."""
    seen, read, calls = [], kernel.read_bandwidth, []

    def slow(pool, memory, way):
        calls.append(way)
        return read(pool, memory, way) / 1000

    monkeypatch.setattr(kernel, "read_bandwidth", slow)
    with pytest.raises(ImpossibleRateError, match="in each of 3 attempts"):
        kernel.bench_kernel("512,512,8,2", threads=[1], tokens=[1], report=seen.append)
    assert not seen
    assert len(calls) == kernel.ATTEMPTS * kernel.FEWEST_CALLS


def test_one_slow_reading_among_good_ones_is_no_limit(monkeypatch):
    """The machine was slow in most readings of the memory: the best of the interleaved ones counts."""
    read, calls = kernel.read_bandwidth, []

    def mostly_slow(pool, memory, way):
        calls.append(way)
        return read(pool, memory, way) * (1 if len(calls) % 4 == 0 else 1e-6)

    monkeypatch.setattr(kernel, "read_bandwidth", mostly_slow)
    (found,) = kernel.bench_kernel("64,64,8,2", threads=[1], tokens=[1])["rows"]
    assert 0 < found["ratio_to_limit"] <= kernel.MOST_OF_LIMIT
