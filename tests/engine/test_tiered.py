"""A layer over its tiers gives the oracle's bits wherever its experts are, and survives what goes wrong below it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.contract import oracle
from moetier.engine.counters import Counters
from moetier.engine.host import TieredLayer
from moetier.errors import RecordReadError
from moetier.identity.calls import random_routing
from moetier.kernels.cpu import CpuExperts, ThreadPool
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.heal import Healer
from moetier.store.store import Store
from moetier.tiers.disk import DiskReader
from moetier.tiers.dram import DramTier
from moetier.tiers.heat import Heat
from moetier.tiers.policy import Lru
from moetier.tiers.staging import Staging
from tests.forking import said_by_children
from tests.store.checkpoints import Made, write_checkpoint

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 12, 3, 96, 64


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("checkpoint")
    return write_checkpoint(
        folder / "model", experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, top_k=TOP_K, scales=(118, 124)
    )


@pytest.fixture(scope="module")
def store_path(made: Made) -> Path:
    path = made.path.parent / "store"
    build_store(made.path, path)
    return path


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(2)
    yield pool
    pool.close()


class Bench:
    """One layer of a store with its own tiers."""

    def __init__(self, path: Path, pool: ThreadPool, slots: int, staging: int, healer_of: Path | None = None) -> None:
        self.store = Store.open(path)
        self.healer = Healer(self.store, Checkpoint.open(healer_of)) if healer_of else None
        geometry, family = self.store.manifest.layer_geometry, self.store.manifest.layer_family
        self.reader = DiskReader(self.store, threads=3, healer=self.healer)
        self.staging = Staging(staging, self.store.layout.stride)
        self.heat = Heat(len(self.store.manifest.layers), EXPERTS, "")
        self.counters = Counters()
        self.layer = TieredLayer(
            1,
            CpuExperts(geometry, family, pool, max_tokens=64),
            DramTier(EXPERTS, slots, self.store.layout.stride, Lru(EXPERTS)),
            self.staging,
            self.reader,
            self.heat,
            self.counters,
        )

    def check_integrity(self) -> None:
        self.layer.tier.check_integrity()
        self.staging.check_integrity()

    def close(self) -> None:
        self.reader.close()
        self.store.close()


@pytest.fixture
def bench(request: pytest.FixtureRequest, store_path: Path, pool: ThreadPool) -> Iterator[Bench]:
    slots, staging = getattr(request, "param", (3, 2))
    bench = Bench(store_path, pool, slots, staging)
    yield bench
    bench.check_integrity()
    bench.close()


def expected(made: Made, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, store: Store) -> np.ndarray:
    experts = {e: made.experts[made.layers[1], e] for e in range(EXPERTS)}
    return oracle.moe_layer(oracle.from_bf16(x), ids, weights, experts, EXPERTS, store.manifest.layer_family)


def forward(bench: Bench, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    out = np.full(x.shape, 0xFFFF, np.uint16)
    bench.layer.forward(x, ids, weights, out)
    return out


def inputs(bench: Bench, tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = oracle.to_bf16(generator.standard_normal((tokens, HIDDEN)).astype(np.float32))
    return x, *random_routing(bench.store.manifest.layer_geometry, tokens, generator)


@pytest.mark.parametrize(
    "bench",
    [(12, 1), (6, 2), (3, 2), (1, 1), (0, 1), (0, 12)],
    ids=["all", "half", "quarter", "one-slot", "one-staging", "all-staging"],
    indirect=True,
)
def test_bits_do_not_depend_on_the_tier(bench: Bench, made: Made) -> None:
    for seed, tokens in enumerate([1, 1, 2, 5, 17, 1, 64, 1]):
        x, ids, weights = inputs(bench, tokens, seed)
        assert np.array_equal(forward(bench, x, ids, weights), expected(made, x, ids, weights, bench.store))
        bench.check_integrity()
    assert bench.counters.calls == 8
    assert bench.counters.hits + bench.counters.misses == sum(
        np.unique(inputs(bench, tokens, seed)[1]).size for seed, tokens in enumerate([1, 1, 2, 5, 17, 1, 64, 1])
    )


def test_second_call_of_the_same_experts_reads_nothing(bench: Bench) -> None:
    x, ids, weights = inputs(bench, 1, 0)
    forward(bench, x, ids, weights)
    reads = bench.reader.counters.reads
    assert reads == TOP_K
    forward(bench, x, ids, weights)
    assert bench.reader.counters.reads == reads
    counters = bench.counters
    assert (counters.hits, counters.misses, counters.dram_reads) == (TOP_K, TOP_K, TOP_K)
    assert counters.disk_reads == counters.dram_fills == TOP_K
    assert counters.cpu_us > 0
    assert counters.hit_rate == 0.5


def test_preload_takes_the_hottest(bench: Bench) -> None:
    bench.heat.add(1, np.array([4, 7, 9], np.int32), np.array([10, 30, 20], np.int32))
    bench.layer.preload(2)
    assert bench.layer.tier.resident.tolist() == [7, 9]


def test_heat_counts_pairs(bench: Bench) -> None:
    x, _, weights = inputs(bench, 2, 0)
    ids = np.array([[1, 2, 3], [3, 2, 99]], np.int32)
    forward(bench, x, ids, weights)
    assert bench.heat.counts[1].tolist() == [0, 1, 2, 2] + [0] * 8


def test_no_tokens(bench: Bench) -> None:
    empty = forward(
        bench, np.zeros((0, HIDDEN), np.uint16), np.zeros((0, TOP_K), np.int32), np.zeros((0, TOP_K), np.float32)
    )
    assert empty.shape == (0, HIDDEN)


def damage(path: Path, offset: int) -> bytes:
    with path.open("r+b") as file:
        file.seek(offset)
        before = file.read(1)
        file.seek(offset)
        file.write(bytes([before[0] ^ 0x10]))
    return before


@pytest.mark.parametrize("bench", [(3, 2), (0, 1)], ids=["quarter", "one-staging"], indirect=True)
def test_flipped_byte_is_an_error_and_nothing_is_lost(bench: Bench, made: Made) -> None:
    path, bad = bench.store.record_file(1), 5
    offset = bench.store.offset(bad) + 100
    before = damage(path, offset)
    x, _, weights = inputs(bench, 1, 0)
    ids = np.array([[2, bad, 8]], np.int32)
    out = np.full(x.shape, 0xABCD, np.uint16)
    try:
        with pytest.raises(RecordReadError, match=r"layer 2, expert 5 in .*checksum .* expected") as error:
            bench.layer.forward(x, ids, weights, out)
        assert error.value.exit_code == 1
        assert (out == 0xABCD).all(), "a failed call writes no output"
        assert bench.reader.counters.retries == 1
        bench.check_integrity()
        good = np.array([[2, 3, 8]], np.int32)
        assert np.array_equal(forward(bench, x, good, weights), expected(made, x, good, weights, bench.store))
    finally:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(before)
    assert np.array_equal(forward(bench, x, ids, weights), expected(made, x, ids, weights, bench.store))


def test_truncated_file_is_an_error(bench: Bench) -> None:
    path = bench.store.record_file(1)
    whole = path.read_bytes()
    try:
        with path.open("r+b") as file:
            file.truncate(bench.store.offset(11) + 4096)
        x, _, weights = inputs(bench, 1, 0)
        with pytest.raises(RecordReadError, match="the file ends"):
            forward(bench, x, np.array([[0, 1, 11]], np.int32), weights)
    finally:
        path.write_bytes(whole)


def test_flipped_byte_is_healed_from_the_checkpoint(
    made: Made, store_path: Path, pool: ThreadPool, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(store_path) as store:
        damage(store.record_file(1), store.offset(5) + 100)
    bench = Bench(store_path, pool, 3, 2, healer_of=made.path)
    x, _, weights = inputs(bench, 1, 0)
    ids = np.array([[2, 5, 8]], np.int32)
    assert np.array_equal(forward(bench, x, ids, weights), expected(made, x, ids, weights, bench.store))
    assert bench.healer is not None
    assert bench.healer.healed == 1
    assert "layer 2, expert 5" in caplog.text
    assert "written back" in caplog.text
    record = np.empty(bench.store.layout.stride, np.uint8)
    bench.store.read_record(1, 5, record)
    bench.check_integrity()
    bench.close()


def test_checkpoint_that_is_damaged_too_heals_nothing(
    made: Made, store_path: Path, pool: ThreadPool, tmp_path: Path
) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(made.path, copy)
    bench = Bench(store_path, pool, 3, 2, healer_of=copy)
    tensor = Checkpoint.open(copy).tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    damage(tensor.file, tensor.offset + 7)
    path, offset = bench.store.record_file(1), bench.store.offset(5) + 100
    before = damage(path, offset)
    x, _, weights = inputs(bench, 1, 0)
    try:
        with pytest.raises(RecordReadError, match=r"layer 2, expert 5 .* cannot be healed"):
            forward(bench, x, np.array([[2, 5, 8]], np.int32), weights)
    finally:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(before)
    bench.check_integrity()
    bench.close()


@pytest.mark.parametrize("bench", [(0, 1), (1, 1)], ids=["staging", "slot"], indirect=True)
def test_a_read_that_cannot_be_started_loses_no_slot(bench: Bench, made: Made) -> None:
    x, ids, weights = inputs(bench, 2, 0)
    open_reader, closed = bench.reader, DiskReader(bench.store, threads=1)
    closed.close()
    bench.layer.fetcher._reader = closed
    with pytest.raises(RuntimeError, match="shutdown"):
        forward(bench, x, ids, weights)
    bench.check_integrity()
    bench.layer.fetcher._reader = open_reader
    assert np.array_equal(forward(bench, x, ids, weights), expected(made, x, ids, weights, bench.store))


def test_ctrl_c_while_reading_threads_start_leaves_none(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    with Store.open(store_path) as store:
        submit, submitted = ThreadPoolExecutor.submit, []

        def submit_or_interrupt(pool: ThreadPoolExecutor, *work: Any) -> Any:
            submitted.append(work)
            if len(submitted) == 3:
                raise KeyboardInterrupt
            return submit(pool, *work)

        monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_or_interrupt)
        with pytest.raises(KeyboardInterrupt):
            DiskReader(store, 4)
    assert set(threading.enumerate()) <= before


STARTS = """
import resource, sys
from moetier.errors import SettingsError
from moetier.tiers.disk import DiskReader
from moetier.store.store import Store
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
with Store.open(sys.argv[1]) as store:
    try:
        DiskReader(store, 256)
    except SettingsError as error:
        print(error)
"""


def test_reading_threads_that_cannot_be_had_are_an_error_at_start(store_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(store_path)], capture_output=True, text=True, timeout=300, check=True
    )
    assert "expected to start 256 threads" in done.stdout
    assert "disk_threads" in done.stdout


FORKS = """
import sys
from moetier.tiers.disk import DiskReader
from moetier.tiers.arena import Arena
from moetier.store.store import Store
from tests.forking import in_children
with Store.open(sys.argv[1]) as store:
    reader, room = DiskReader(store, 2), Arena(1, store.layout.stride).view(0)
    reader.submit(0, 0, room).result()
    in_children(lambda: reader.submit(0, 1, room).result(300))
    reader.close()
"""


def test_a_forked_child_is_told_that_nobody_reads_for_it(store_path: Path) -> None:
    assert said_by_children("-c", FORKS, str(store_path)) == {
        "the disk reader was opened before a fork; open one in this process"
    }
