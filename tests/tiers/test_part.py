"""The parts of a record cover it once, are read alone, and are computed as the whole record's slices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moetier.contract import LayerGeometry, RecordLayout, oracle
from moetier.errors import RecordReadError, SettingsError
from moetier.kernels.cpu import CpuExperts, ThreadPool
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.heal import Healer
from moetier.store.store import Store
from moetier.tiers.arena import Arena
from moetier.tiers.disk import DiskReader
from moetier.tiers.part import Part
from tests.store.checkpoints import Made, write_checkpoint

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, SLICES = 6, 3, 96, 256, 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("part")
    made = write_checkpoint(
        folder / "model", experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, top_k=TOP_K, scales=(118, 124)
    )
    build_store(made.path, folder / "store", slices=SLICES)
    return made


@pytest.fixture
def store_path(made: Made) -> Path:
    return made.path.parent / "store"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("hidden", "intermediate"), [(96, 256), (256, 128), (4096, 2048)])
def test_parts_cover_the_record_once(ranks: int, hidden: int, intermediate: int) -> None:
    geometry = LayerGeometry(hidden, intermediate, EXPERTS, TOP_K, SLICES)
    parts = [Part(geometry, rank, ranks) for rank in range(ranks)]
    stride = RecordLayout.of(geometry).stride
    assert [part.begin for part in parts] + [stride] == [0] + [part.end for part in parts]
    for part in parts:
        assert part.start % 4096 == part.room % 4096 == 0
        assert part.shift % 64 == 0
        assert part.start <= part.begin
        assert part.end <= part.start + part.room <= stride
        assert part.room < part.end - part.begin + 2 * 4096
        assert part.narrow.intermediate == intermediate // ranks


def test_ranks_that_do_not_divide_the_slices() -> None:
    with pytest.raises(SettingsError, match=r"size 8: expected one that divides the 4 slices.*--slices 8"):
        Part(LayerGeometry(96, 256, EXPERTS, TOP_K, SLICES), 0, 8)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_gives_the_bits_of_the_oracle_of_its_slices(made: Made, store_path: Path, ranks: int) -> None:
    generator = np.random.default_rng(ranks)
    x = oracle.to_bf16(generator.standard_normal((5, HIDDEN)).astype(np.float32))
    ids = np.argsort(generator.random((5, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    weights = generator.random((5, TOP_K)).astype(np.float32)
    with Store.open(store_path) as store:
        pool, family = ThreadPool(2), store.manifest.layer_family
        for rank in range(ranks):
            part = Part(store.manifest.layer_geometry, rank, ranks)
            reader = DiskReader(store, 2, part=part)
            arena = Arena(EXPERTS, part.room, part.shift)
            for expert in range(EXPERTS):
                reader.read(1, expert, arena.view(expert))
            assert reader.counters.bytes == EXPERTS * part.room < EXPERTS * (store.layout.stride // ranks + 2 * 4096)
            addresses = np.array([arena.address(expert) for expert in range(EXPERTS)], np.uint64)
            out = np.empty(x.shape, np.uint16)
            CpuExperts(part.narrow, family, pool, max_tokens=8).forward(x, ids, weights, addresses, out)
            experts = {e: made.experts[made.layers[1], e] for e in range(EXPERTS)}
            expected = oracle.moe_layer(
                oracle.from_bf16(x), ids, weights, slices_of(experts, part), EXPERTS, family, part.count
            )
            assert np.array_equal(out, expected)
            reader.close()
        pool.close()


def slices_of(experts: dict, part: Part) -> dict:
    """The experts cut to a part, through a record as the store has it."""
    whole, narrow = part.layout, RecordLayout.of(part.narrow)
    cut = {}
    for expert, matrices in experts.items():
        record, own = np.empty(whole.stride, np.uint8), np.zeros(narrow.stride, np.uint8)
        whole.pack(matrices, record)
        size = part.count * whole.slice_bytes
        own[:size] = record[part.begin : part.begin + size]
        cut[expert] = narrow.unpack(own)
    return cut


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_damage_in_the_part_of_another_rank_is_that_ranks_business(store_path: Path) -> None:
    with Store.open(store_path) as store:
        first, second = (Part(store.manifest.layer_geometry, rank, 2) for rank in (0, 1))
        at = store.offset(3) + second.begin + 200
        flip(store.record_file(1), at)
        try:
            for part in (first, second):
                reader = DiskReader(store, 1, part=part)
                out = Arena(1, part.room).view(0)
                if part is first:
                    reader.read(1, 3, out)
                else:
                    with pytest.raises(RecordReadError, match=r"expert 3 .*slice 2: checksum .* expected"):
                        reader.read(1, 3, out)
                reader.close()
        finally:
            flip(store.record_file(1), at)


def test_damaged_part_is_healed(made: Made, store_path: Path) -> None:
    with Store.open(store_path) as store:
        part = Part(store.manifest.layer_geometry, 1, 4)
        sound, healed = (Arena(1, part.room).view(0) for _ in range(2))
        reader = DiskReader(store, 1, Healer(store, Checkpoint.open(made.path)), part)
        reader.read(1, 2, sound)
        flip(store.record_file(1), store.offset(2) + part.begin)
        reader.read(1, 2, healed)
        begin, end = part.shift, part.shift + part.end - part.begin
        assert np.array_equal(sound[begin:end], healed[begin:end])
        record = np.empty(store.layout.stride, np.uint8)
        store.read_record(1, 2, record)
        reader.close()
