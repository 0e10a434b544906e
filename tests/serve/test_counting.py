"""What is counted reaches the log and /metrics whole, and no broken file stops either."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from moetier.engine import Counters, TieredModel
from moetier.launch.counting import Publisher, Snapshot, line, read_snapshots
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.store.store import Store
from tests.store.checkpoints import write_checkpoint


def snapshot(rank: int = 0, **counted: float) -> Snapshot:
    return Snapshot(rank, {3: Counters(**counted), 4: Counters()}, 7, 8, 1, 0)  # type: ignore[arg-type]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[TieredModel]:
    made = write_checkpoint(tmp_path / "model", experts=8, hidden=96, intermediate=64, top_k=2)
    build_store(made.path, tmp_path / "store")
    with (
        Store.open(tmp_path / "store") as store,
        TieredModel(Settings(store=tmp_path / "store"), store, records=2, max_tokens=8) as model,
    ):
        yield model


def run(model: TieredModel, number: int, *experts: int) -> None:
    x = np.zeros((1, 96), np.uint16)
    ids, weights = np.array([experts], np.int32), np.ones((1, len(experts)), np.float32)
    model.attach(number).forward(x, ids, weights, np.empty_like(x))


def test_model_publishes_what_its_layers_counted(model: TieredModel, tmp_path: Path) -> None:
    publisher = Publisher(model, tmp_path)
    run(model, 1, 0, 7)
    run(model, 1, 0, 7)
    publisher.close()
    (found,) = read_snapshots(tmp_path)
    assert found == Snapshot.of(model)
    assert set(found.layers) == {1}, "layer 2 is in the store, and not served"
    counters = found.layers[1]
    assert (counters.calls, counters.pairs, counters.hits, counters.misses) == (2, 4, 3, 1)
    assert (counters.dram_reads, counters.disk_reads, counters.dram_fills) == (3, 1, 1)
    assert counters.cpu_us > 0
    assert found.disk_reads == 2 + 1, "two at the start"
    assert found.disk_bytes == 3 * model.store.layout.stride


def test_warm_up_is_not_counted(model: TieredModel) -> None:
    model.context.real = False
    run(model, 1, 0, 7)
    assert model.counters == Counters()
    assert not model.heat.counts.any()
    model.context.real = True
    run(model, 1, 0, 7)
    assert model.counters.calls == 1


def test_broken_files_are_left_out(tmp_path: Path) -> None:
    for name, text in {
        "rank-0": "{",
        "rank-1": "[]",
        "rank-2": '{"layers": 3}',
        "rank-3": '{"layers": {"1": {"x": 1}}}',
    }.items():
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "rank-4.json").write_text(json.dumps(asdict(snapshot(4))))
    assert read_snapshots(tmp_path) == [snapshot(4)]
    assert read_snapshots(tmp_path / "absent") == []


def test_full_disk_costs_the_metrics_only(model: TieredModel, tmp_path: Path) -> None:
    publisher = Publisher(model, tmp_path / "absent")
    run(model, 1, 0, 7)
    publisher.close()


def test_line_says_what_was_done_since() -> None:
    before = [snapshot(calls=10, hits=100, misses=100)]
    now = [snapshot(calls=30, hits=190, misses=110, disk_reads=10, cpu_us=2.5e6)]
    text = line(now, before)
    assert "hit rate 90.0% (layers 90% to 90%)" in text
    assert "10 misses in 20 layer calls" in text
    assert "10 disk" in text
    assert "CPU 2.50 s" in text
    assert line(now, now) == ""
    assert line([], []) == ""
    assert "slot fills" in line([snapshot(calls=1, slot_fills=2)], [])


def test_metrics_have_every_counter() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from prometheus_client.exposition import generate_latest
    from prometheus_client.registry import CollectorRegistry

    from moetier.vllm import stats

    class Fixed:
        def collect(self):  # type: ignore[no-untyped-def]
            return stats.metrics([snapshot(0, calls=2, hits=3, misses=1, disk_reads=1), snapshot(1)])

    registry = CollectorRegistry()
    registry.register(Fixed())  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    assert 'moetier_hit_rate{layer="3",rank="0"} 0.75' in text
    assert 'moetier_reads_total{layer="3",rank="0",tier="disk"} 1.0' in text
    assert 'moetier_hits_total{layer="4",rank="1"} 0.0' in text
    assert 'moetier_store_reads_total{rank="1"} 7.0' in text
    assert 'moetier_store_direct{rank="1"} 1.0' in text
    for name in ("cpu_microseconds", "wait_microseconds", "streamed_bytes", "slot_fills", "misses", "records_healed"):
        assert f"moetier_{name}_total" in text
