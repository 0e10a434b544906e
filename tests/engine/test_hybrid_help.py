"""What a hybrid layer does on the host: a request whose records must be read, with the test in the mailbox's place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the device tier wants torch")

from moetier.engine.context import Context  # noqa: E402
from moetier.engine.counters import Counters  # noqa: E402
from moetier.engine.fetch import Fetcher  # noqa: E402
from moetier.engine.hybrid.layer import HybridLayer, Shared  # noqa: E402
from moetier.errors import RecordReadError  # noqa: E402
from moetier.kernels.cpu import CpuExperts, ThreadPool  # noqa: E402
from moetier.kernels.cpu.mailbox import OvertakenError, Request  # noqa: E402
from moetier.kernels.cuda.hybrid import LayerTables  # noqa: E402
from moetier.store.build import build_store  # noqa: E402
from moetier.store.store import Store  # noqa: E402
from moetier.tiers.disk import DiskReader  # noqa: E402
from moetier.tiers.dram import DramTier  # noqa: E402
from moetier.tiers.policy import Lru  # noqa: E402
from moetier.tiers.slots import DeviceSlots  # noqa: E402
from moetier.tiers.staging import Staging  # noqa: E402
from tests.store.checkpoints import write_checkpoint  # noqa: E402

TOKENS = 6


class Bench:
    """One layer over a store, `records` of it in DRAM and `staging` rooms; no device."""

    def __init__(self, store: Store, pool: ThreadPool, records: int, staging: int) -> None:
        self.geometry = g = store.manifest.layer_geometry
        stride = store.layout.stride
        self.kernel = CpuExperts(g, store.manifest.layer_family, pool, max_tokens=TOKENS)
        self.reader, self.staging = DiskReader(store, 2), Staging(staging, stride)
        self.tier = DramTier(g.experts, records, stride, Lru(g.experts))
        slots = DeviceSlots(g.experts, [0], torch.zeros((2, stride), dtype=torch.uint8), first=5)
        self.overtaken = False
        nothing: Any = None  # neither kernels nor counts of a device are used here
        self.layer = HybridLayer(
            LayerTables(0, slots.table, nothing, nothing, nothing),
            slots,
            Fetcher(0, self.tier, self.staging, self.reader),
            Shared(nothing, nothing, self.kernel, stride, Lock(), Context()),
            Counters(),
        )
        self.memory = np.zeros(g.experts * stride + 4096, np.uint8)
        start = -self.memory.ctypes.data % 4096
        every = self.memory[start : start + g.experts * stride].reshape(g.experts, stride)
        for expert in range(g.experts):
            self.reader.read(0, expert, every[expert])
        self.everywhere = np.array([row.ctypes.data for row in every], np.uint64)

    def request(self, seed: int, streamed: list[int]) -> Request:
        g, rng = self.geometry, np.random.default_rng(seed)
        x = rng.integers(0x3C00, 0x4000, (TOKENS, g.hidden), np.uint16)
        ids = rng.integers(-1, g.experts, (TOKENS, g.top_k)).astype(np.int32)
        weights = rng.random((TOKENS, g.top_k), np.float32)
        rows = np.full((TOKENS, g.top_k, g.hidden), -7, np.float32)
        return Request(seed + 1, 0, x, ids, weights, np.array(streamed, np.int32), rows)

    def forget(self, request: Request, expert: int) -> None:
        """As the mailbox's: nobody reads the expert in DRAM any more, unless the request was answered meanwhile."""
        if self.overtaken:
            raise OvertakenError
        self.tier.addresses[expert] = 0

    def progress(self) -> None:
        """As the mailbox's."""

    def expected(self, request: Request) -> np.ndarray:
        rows = np.full_like(request.rows, -7)
        self.kernel.rows(request.x, request.ids, request.weights, self.everywhere, rows)
        return rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("help")
    write_checkpoint(folder / "model", experts=8, hidden=64, intermediate=32, top_k=3)
    build_store(folder / "model", folder / "store")
    return Store.open(folder / "store")


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(("records", "staging"), [(0, 1), (1, 1), (3, 2), (8, 1)])
def test_rows_are_those_of_all_records_in_memory(store: Store, pool: ThreadPool, records: int, staging: int) -> None:
    bench = Bench(store, pool, records, staging)
    for seed in range(12):
        request = bench.request(seed, [])
        bench.layer.help(request, bench)
        assert np.array_equal(request.rows, bench.expected(request))
        bench.tier.check_integrity()
        bench.staging.check_integrity()
    assert bench.layer.helped_reads > 0
    bench.reader.close()


def test_what_the_device_streams_and_what_is_being_copied_keeps_its_place(store: Store, pool: ThreadPool) -> None:
    bench = Bench(store, pool, 2, 1)
    bench.layer._fetcher.load(np.array([6, 7], np.int32))
    kept = bench.tier.addresses[[6, 7]].copy()
    bench.layer.busy.add(7)
    for seed in range(8):
        request = bench.request(seed, [6])
        request.ids[np.isin(request.ids, [6, 7])] = 1
        bench.layer.help(request, bench)
        assert np.array_equal(request.rows, bench.expected(request))
        assert np.array_equal(bench.tier.addresses[[6, 7]], kept), "a record moved while the device reads it"
    bench.reader.close()


def test_a_record_that_cannot_be_read_leaves_every_room_free(store: Store, pool: ThreadPool) -> None:
    bench = Bench(store, pool, 1, 2)
    path, offset = store.record_file(0), store.offset(4) + 10
    before = path.read_bytes()
    request = bench.request(0, [])
    request.ids[:] = [2, 4, 5]
    _flip(path, offset)
    try:
        with pytest.raises(RecordReadError, match="expert 4"):
            bench.layer.help(request, bench)
    finally:
        path.write_bytes(before)
    bench.tier.check_integrity()
    bench.staging.check_integrity()
    bench.layer.help(request, bench)
    assert np.array_equal(request.rows, bench.expected(request))
    bench.reader.close()


def test_help_that_comes_too_late_moves_nothing(store: Store, pool: ThreadPool) -> None:
    bench = Bench(store, pool, 2, 1)
    bench.layer._fetcher.load(np.array([6, 7], np.int32))
    kept = bench.tier.addresses.copy()
    request = bench.request(0, [])
    request.ids[:] = [2, 4, 5]
    bench.overtaken = True
    with pytest.raises(OvertakenError):
        bench.layer.help(request, bench)
    assert np.array_equal(bench.tier.addresses, kept), "a record moved that others may be reading"
    bench.tier.check_integrity()
    bench.staging.check_integrity()
    bench.overtaken = False
    bench.layer.help(request, bench)
    assert np.array_equal(request.rows, bench.expected(request))
    bench.reader.close()


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_slots_are_compared_with_the_store(store: Store, pool: ThreadPool) -> None:
    bench = Bench(store, pool, 1, 1)
    bench.reader.read(0, 0, bench.staging.view(0))
    bench.layer.slots.fill(0, torch.from_numpy(bench.staging.view(0)))
    bench.layer.slots.publish()
    bench.layer.check_integrity(bench.reader, bench.staging)
    bench.layer.slots.slots[0, 3] ^= 1
    with pytest.raises(AssertionError, match="expert 0 holds other bytes"):
        bench.layer.check_integrity(bench.reader, bench.staging)
    bench.staging.check_integrity()
    bench.reader.close()
