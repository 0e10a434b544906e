"""The ring that streams records for many tokens, on a device without streams: the CPU's kernels over the same slots."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the device tier wants torch")

from moetier.errors import RecordReadError  # noqa: E402
from moetier.kernels import oracle  # noqa: E402
from moetier.kernels.cpu import CpuExperts, ThreadPool  # noqa: E402
from moetier.kernels.gpu.base import Call, Sizes  # noqa: E402
from moetier.kernels.gpu.hybrid import LayerTables  # noqa: E402
from moetier.layer.context import Context  # noqa: E402
from moetier.layer.counters import Counters  # noqa: E402
from moetier.layer.fetch import Fetcher  # noqa: E402
from moetier.layer.hybrid.layer import HybridLayer, Shared  # noqa: E402
from moetier.layer.hybrid.stream import Streamer  # noqa: E402
from moetier.layer.model import TieredModel  # noqa: E402
from moetier.residency import DiskReader, DramTier, Lru  # noqa: E402
from moetier.residency.device import ABSENT, DeviceSlots  # noqa: E402
from moetier.residency.staging import Staging  # noqa: E402
from moetier.settings import Settings  # noqa: E402
from moetier.store.build import build_store  # noqa: E402
from moetier.store.checkpoint import Checkpoint  # noqa: E402
from moetier.store.store import Store  # noqa: E402
from tests.store.checkpoints import write_checkpoint  # noqa: E402

EXPERTS, TOKENS = 12, 40


class CpuDevice:
    """What a device path does, by the CPU's kernel; records are where the call's table says, and nowhere else."""

    def __init__(self, kernel: CpuExperts) -> None:
        self.kernel, self.sizes = kernel, Sizes(kernel.geometry, kernel.family)

    def rows(self, call: Call) -> None:
        table, g = call.slot_table.numpy(), self.sizes.geometry
        addresses = np.zeros(g.experts, np.uint64)
        for expert in np.flatnonzero(table != ABSENT):
            addresses[expert] = call.slots[int(table[expert])].data_ptr()
        x, ids, weights = call.x.view(torch.int16).numpy().view(np.uint16), call.ids.numpy(), call.weights.numpy()
        self.kernel.rows(x, ids, weights, addresses, call.rows.numpy())

    def combine(self, call: Call, out: torch.Tensor) -> None:
        ids, rows, weights = call.ids.numpy(), call.rows.numpy(), call.weights.numpy()
        acc = np.zeros(call.x.shape, np.float32)
        order = np.argsort(ids, axis=1, kind="stable")
        for token, k in ((t, k) for t in range(ids.shape[0]) for k in order[t]):
            if 0 <= ids[token, k] < self.sizes.geometry.experts:
                acc[token] += oracle.flush(rows[token, k] * weights[token, k])
        out.view(torch.int16).numpy().view(np.uint16)[:] = oracle.to_bf16(acc)


class Bench:
    """Two layers over a store; of each, experts 0 and 1 have slots and `records` are in DRAM."""

    def __init__(self, store: Store, records: int, staging: int, groups: int = 4) -> None:
        self.store, self.geometry, stride = store, store.manifest.layer_geometry, store.layout.stride
        g, self.pool = self.geometry, ThreadPool(1)
        self.kernel = CpuExperts(g, store.manifest.layer_family, self.pool, max_tokens=TOKENS)
        self.reader, self.rooms = DiskReader(store, 2), Staging(2, stride)
        rooms = self.rooms
        self.slots = torch.zeros((4 + staging, stride), dtype=torch.uint8)
        self.device: Any = CpuDevice(self.kernel)
        self.streamer = Streamer(
            self.device.sizes, TOKENS, self.slots, range(4, 4 + staging), stride, self.device, groups
        )
        self.layers = [self._layer(index, records, rooms, stride) for index in range(2)]
        self.layers[0].following = self.layers[1]
        self.everywhere = []
        for index in range(2):
            every = torch.zeros((g.experts, stride), dtype=torch.uint8)
            for expert in range(g.experts):
                self.reader.read(index, expert, rooms.view(0))
                every[expert] = torch.from_numpy(rooms.view(0))
            self.everywhere.append(every)

    def _layer(self, index: int, records: int, rooms: Staging, stride: int) -> HybridLayer:
        g = self.geometry
        tier = DramTier(g.experts, records, stride, Lru(g.experts))
        slots = DeviceSlots(g.experts, [0, 1], self.slots[2 * index : 2 * index + 2], first=2 * index)
        nothing: Any = None
        shared = Shared(self.device, self.streamer, self.kernel, stride, Lock(), Context())
        tables = LayerTables(index, slots.table, nothing, nothing, nothing)
        layer = HybridLayer(tables, slots, Fetcher(index, tier, rooms, self.reader), shared, Counters())
        for expert in (0, 1):
            self.reader.read(index, expert, rooms.view(0))
            slots.fill(expert, torch.from_numpy(rooms.view(0)))
        slots.publish()
        layer._fetcher.load(np.arange(2, 2 + records, dtype=np.int32))
        return layer

    def call(self, seed: int, experts: Sequence[int], tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
        """x, ids and weights of a call to these experts, with some ids outside the layer."""
        g, rng = self.geometry, np.random.default_rng(seed)
        ids = rng.choice([*experts, -1, g.experts], (tokens, g.top_k)).astype(np.int32)
        ids.ravel()[: len(experts)] = experts
        x = torch.from_numpy(rng.standard_normal((tokens, g.hidden), np.float32)).bfloat16()
        return x, torch.from_numpy(ids), torch.from_numpy(rng.random((tokens, g.top_k), np.float32))

    def expected(self, layer: int, call: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, ids, weights = call
        rows = torch.zeros((*ids.shape, self.geometry.hidden))
        table = torch.arange(self.geometry.experts, dtype=torch.int32)
        whole, out = Call(x, ids, weights, table, self.everywhere[layer], rows), torch.empty_like(x)
        self.device.rows(whole)
        self.device.combine(whole, out)
        return out.view(torch.int16)

    def found(self, layer: int, call: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.layers[layer].stream(*call, torch.full_like(call[0], 7)).view(torch.int16)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("stream")
    write_checkpoint(folder / "model", experts=EXPERTS, hidden=64, intermediate=32, top_k=3, layers=(1, 2))
    build_store(folder / "model", folder / "store")
    return Store.open(folder / "store")


@pytest.fixture
def benches(store: Store) -> Iterator[Any]:
    made: list[Bench] = []

    def make(*sizes: int) -> Bench:
        made.append(Bench(store, *sizes))
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


def test_a_layer_beyond_the_model_s_own_is_a_drafter_s(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", layers=(1, 2, 3), config_overrides={"num_hidden_layers": 3})
    build_store(tmp_path / "model", tmp_path / "store")
    checkpoint, settings = Checkpoint.open(tmp_path / "model"), Settings(store=tmp_path / "store", threads=1)
    with Store.open(settings.store) as store, TieredModel(settings, store, 1, 1, checkpoint) as model:
        assert [model.drafts(layer.number) for layer in store.manifest.layers] == [False, False, True]
