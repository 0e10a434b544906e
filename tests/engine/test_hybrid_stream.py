"""The ring that streams records for many tokens, on a device without streams: the CPU's kernels over the same slots."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the device tier wants torch")

from moetier.engine.hybrid import stream  # noqa: E402
from moetier.engine.hybrid.lane import Lane  # noqa: E402
from moetier.engine.hybrid.stream import Streamer, Tables  # noqa: E402
from moetier.engine.model import TieredModel  # noqa: E402
from moetier.errors import RecordReadError  # noqa: E402
from moetier.settings import Settings  # noqa: E402
from moetier.store.build import build_store  # noqa: E402
from moetier.store.checkpoint import Checkpoint  # noqa: E402
from moetier.store.store import Store  # noqa: E402
from moetier.tiers.slots import ABSENT  # noqa: E402
from tests.engine.late import LateLane, Streams  # noqa: E402
from tests.engine.stream_bench import TOKENS, Bench  # noqa: E402
from tests.store.checkpoints import write_checkpoint  # noqa: E402

EXPERTS = 12


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("stream")
    write_checkpoint(folder / "model", experts=EXPERTS, hidden=64, intermediate=32, top_k=3, layers=(1, 2))
    build_store(folder / "model", folder / "store")
    return Store.open(folder / "store")


@pytest.fixture
def benches(store: Store) -> Iterator[Any]:
    made: list[Bench] = []

    def make(*sizes: int, **options: Any) -> Bench:
        made.append(Bench(store, *sizes, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.reader.close()
        bench.pool.close()


ALL = list(range(EXPERTS))


@pytest.mark.parametrize(("records", "staging", "groups"), [(10, 2, 4), (10, 5, 2), (10, 16, 4), (3, 4, 4), (0, 3, 3)])
def test_calls_after_each_other_have_the_bits_of_all_in_memory(
    benches: Any, records: int, staging: int, groups: int
) -> None:
    bench = benches(records, staging, groups)
    for seed in range(6):
        for layer in range(2):
            call = bench.call(seed, ALL[seed:])
            bench.layers[layer].stream_ahead(TOKENS)
            assert torch.equal(bench.found(layer, call), bench.expected(layer, call))
            bench.layers[layer].tier.check_integrity()


@pytest.mark.parametrize(
    "routed", [ALL, [0, 1], [2, 3], [11], [5, 9, 10]], ids=["all", "slots", "staged", "late", "mixed"]
)
@pytest.mark.parametrize("staging", [2, 4, 16])
def test_what_was_streamed_ahead_is_a_guess_that_changes_no_bit(benches: Any, staging: int, routed: list[int]) -> None:
    bench = benches(10, staging)
    call = bench.call(1, routed)
    bench.layers[1].stream_ahead(TOKENS)
    assert bench.streamer._coming
    assert torch.equal(bench.found(1, call), bench.expected(1, call))
    ahead = min(staging, 10)
    late = len([e for e in routed if e >= 2 + ahead])
    assert bench.layers[1].counters.streamed_bytes == (ahead + late) * bench.layers[1].record_bytes


def test_the_next_layer_is_streamed_ahead_by_many_tokens_only(benches: Any) -> None:
    bench = benches(10, 8)
    few = -(-8 * EXPERTS // bench.geometry.top_k) - 1
    for tokens, ahead in ((few, False), (few + 1, True)):
        call = bench.call(3, ALL, tokens)
        bench.found(0, call)
        bench.layers[0].following.stream_ahead(tokens)
        assert bool(bench.streamer._coming) is ahead


def test_records_ahead_for_another_layer_are_dropped(benches: Any) -> None:
    bench = benches(10, 8)
    bench.layers[1].stream_ahead(TOKENS)
    call = bench.call(4, ALL)
    assert torch.equal(bench.found(0, call), bench.expected(0, call))
    assert not bench.streamer._coming


def test_the_hottest_of_the_last_call_go_first_and_those_not_routed_to_not_at_all(benches: Any) -> None:
    bench = benches(10, 3)
    x, ids, weights = bench.call(5, [7, 8])
    ids[:, :] = torch.tensor([8, 8, 7])
    bench.found(0, (x, ids, weights))
    bench.layers[0].stream_ahead(TOKENS)
    assert [expert for one in bench.streamer._coming for expert in one.experts] == [8, 7]


def test_what_was_forgotten_leaves_the_slots_to_others(benches: Any) -> None:
    bench = benches(10, 8)
    bench.layers[0].stream_ahead(TOKENS)
    bench.streamer.forget()
    bench.slots[4:] = 0xFF  # a step that the device planned
    call = bench.call(6, ALL)
    assert torch.equal(bench.found(0, call), bench.expected(0, call))


def test_a_record_that_cannot_be_read_ends_the_call_and_leaves_nothing_behind(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.path, tmp_path / "store")
    with Store.open(tmp_path / "store") as copy:
        bench = Bench(copy, records=3, staging=4)
        try:
            call, path = bench.call(8, ALL), copy.record_file(0)
            right = path.read_bytes()
            at = copy.offset(EXPERTS - 1) + 10
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([right[at] ^ 1]))
            bench.layers[0].stream_ahead(TOKENS)
            with pytest.raises(RecordReadError):
                bench.found(0, call)
            bench.rooms.check_integrity()
            bench.layers[0].tier.check_integrity()
            with path.open("r+b") as file:
                file.write(right)
            assert torch.equal(bench.found(0, call), bench.expected(0, call))
        finally:
            bench.reader.close()
            bench.pool.close()


@pytest.fixture(params=[(0, 0), (0, 1), (1, 0), (1, 1), (0.7, 0.7)], ids="copies {0[0]}, compute {0[1]}".format)
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Of all benches; from such that run at once when they may to such that only run when somebody waits."""
    made = Streams(*request.param)
    monkeypatch.setattr(stream, "Lane", lambda device: LateLane(made))
    return made


@pytest.mark.parametrize(("records", "staging", "groups"), [(10, 2, 2), (10, 5, 1), (10, 9, 4), (3, 4, 4), (0, 6, 2)])
def test_no_order_that_streams_may_take_changes_a_bit(
    benches: Any, streams: Streams, records: int, staging: int, groups: int
) -> None:
    bench, results = benches(records, staging, groups, streams=streams), []
    for seed in range(4):
        for layer in range(2):
            call = bench.call(seed, ALL[seed:])
            if seed:
                bench.layers[layer].stream_ahead(TOKENS)
            results.append((bench.found(layer, call), bench.expected(layer, call)))
    streams.finish()
    assert all(torch.equal(found, expected) for found, expected in results)


def test_a_planned_step_between_calls_has_the_staging_slots_to_itself(benches: Any, streams: Streams) -> None:
    bench, results = benches(10, 6, 3, streams=streams), []
    for seed in range(6):
        bench.layers[0].stream_ahead(TOKENS)
        bench.streamer.forget()
        bench.device.planned_step()
        call = bench.call(seed, ALL)
        if seed % 2:
            bench.layers[1].stream_ahead(TOKENS)
        results.append((bench.found(1, call), bench.expected(1, call)))
    streams.finish()
    assert bench.device.undisturbed
    assert all(torch.equal(found, expected) for found, expected in results)


def test_a_step_after_a_call_that_failed_has_the_staging_slots_to_itself(
    store: Store, tmp_path: Path, streams: Streams
) -> None:
    shutil.copytree(store.path, tmp_path / "store")
    with Store.open(tmp_path / "store") as copy:
        bench = Bench(copy, records=3, staging=4, groups=2, streams=streams)
        try:
            with copy.record_file(0).open("r+b") as file:
                file.seek(copy.offset(5))
                file.write(bytes(100))
            with pytest.raises(RecordReadError):  # of the second record of a round, the first of which is in DRAM
                bench.found(0, bench.call(8, [2, 3, 4, 5]))
            bench.streamer.forget()
            bench.device.planned_step()
            streams.finish()
            assert bench.device.undisturbed
        finally:
            bench.reader.close()
            bench.pool.close()


def test_a_table_has_the_slots_of_its_round_and_leaves_other_groups_alone() -> None:
    cpu = torch.device("cpu")
    tables, held = Tables(3, 7, cpu, Lane(cpu)), {}
    for turn in range(5 * 3 * Tables.SENT):
        slots = {(turn + i) % 7: 40 + turn + i for i in range(turn % 4)}
        held[turn % 3] = tables.send(turn % 3, slots)[0], [slots.get(expert, ABSENT) for expert in range(7)]
        assert all(table.tolist() == expected for table, expected in held.values())


def test_records_shorter_than_a_slot_leave_the_bytes_behind_them(benches: Any) -> None:
    bench, short = benches(10, 4, 2), 100
    size = bench.slots.shape[1] - short
    streamer = Streamer(bench.device.sizes, TOKENS, bench.slots, range(4, 8), size, bench.device, 2)
    bench.slots[:] = 0xA5
    streamer.ahead(1, [(expert, int(bench.layers[1].tier.addresses[expert])) for expert in (2, 7, 4)])
    assert torch.equal(bench.slots[4:7, :size], bench.everywhere[1][[2, 7, 4], :size])
    assert bool((bench.slots[4:7, size:] == 0xA5).all())
    assert bool((bench.slots[:4] == 0xA5).all())
    assert bool((bench.slots[7:] == 0xA5).all())


def test_a_layer_beyond_the_model_s_own_is_a_drafter_s(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path / "model", layers=(1, 2, 3), config_overrides={"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    )
    build_store(tmp_path / "model", tmp_path / "store")
    checkpoint, settings = Checkpoint.open(tmp_path / "model"), Settings(store=tmp_path / "store", threads=1)
    with Store.open(settings.store) as store, TieredModel(settings, store, 1, 1, checkpoint) as model:
        assert [model.drafts(layer.number) for layer in store.manifest.layers] == [False, False, True]
