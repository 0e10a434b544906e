"""Healing: a bad record is made anew from the checkpoint, as the very bytes of the build, or not at all."""

import shutil

import numpy as np
import pytest

from moetier.errors import RecordReadError
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.heal import Healer
from moetier.store.store import Store
from moetier.store.verify import verify_store
from tests.store.checkpoints import write_checkpoint


@pytest.fixture
def made(tmp_path):
    """A checkpoint and a copy of its records as they were built."""
    made = write_checkpoint(tmp_path / "c", hidden=96, intermediate=64)
    build_store(made.path, tmp_path / "s", slices=2)
    shutil.copytree(tmp_path / "s", tmp_path / "whole")
    return made


def spoil(store, layer, expert, size=100):
    with store.record_file(layer).open("r+b") as file:
        file.seek(store.offset(expert) + 50)
        file.write(bytes(size))


def same(tmp_path):
    return all((tmp_path / "s" / p.name).read_bytes() == p.read_bytes() for p in (tmp_path / "whole").iterdir())


def test_a_bad_record_comes_back_in_memory_and_on_the_disk(made, tmp_path):
    with Store.open(tmp_path / "s") as store:
        healer = Healer(store, Checkpoint.open(made.path))
        record, right = (np.empty(store.manifest.record_stride, np.uint8) for _ in range(2))
        store.read_record(1, 2, right)
        spoil(store, 1, 2)
        with pytest.raises(RecordReadError):
            store.read_record(1, 2, record)
        healer.heal(1, 2, "bad", record)
        assert healer.healed == 1
        assert np.array_equal(record, right)
        store.read_record(1, 2, record)
    assert same(tmp_path)


def test_another_checkpoint_heals_nothing(made, tmp_path):
    other = write_checkpoint(tmp_path / "d", hidden=96, intermediate=64, seed=1)
    with Store.open(tmp_path / "s") as store, pytest.raises(RecordReadError, match=r"cannot be healed: the checkpoint"):
        Healer(store, Checkpoint.open(other.path)).heal(0, 0, "bad", np.empty(store.manifest.record_stride, np.uint8))
    assert same(tmp_path)


def test_weights_that_were_changed_heal_nothing(made, tmp_path):
    """The header and so the identity are the same, but a value is not: only the record's checksum can tell."""
    checkpoint = Checkpoint.open(made.path)
    tensor = checkpoint.tensors["model.layers.2.mlp.experts.2.up_proj.weight"]
    raw = bytearray(tensor.file.read_bytes())
    raw[tensor.offset] ^= 1
    tensor.file.write_bytes(raw)
    with Store.open(tmp_path / "s") as store:
        healer = Healer(store, checkpoint)
        spoil(store, 1, 2)
        before = store.record_file(1).read_bytes()
        with pytest.raises(
            RecordReadError, match=r"what was wrong; it cannot be healed: the checkpoint .* gives slice 0: checksum"
        ):
            healer.heal(1, 2, "what was wrong", np.empty(store.manifest.record_stride, np.uint8))
        assert store.record_file(1).read_bytes() == before
    assert [(bad.layer, bad.expert) for bad in verify_store(tmp_path / "s").bad] == [(2, 2)]


def test_a_checkpoint_that_is_gone_heals_nothing(made, tmp_path):
    checkpoint = Checkpoint.open(made.path)
    shutil.rmtree(made.path)
    with Store.open(tmp_path / "s") as store:
        healer = Healer(store, checkpoint)
        with pytest.raises(RecordReadError, match="cannot be healed: tensor"):
            healer.heal(0, 0, "bad", np.empty(store.manifest.record_stride, np.uint8))


def test_every_record_of_a_ruined_layer_comes_back(made, tmp_path):
    with Store.open(tmp_path / "s") as store:
        store.record_file(0).write_bytes(bytes(store.record_file(0).stat().st_size))
        healer = Healer(store, Checkpoint.open(made.path))
        for expert in range(4):
            healer.heal(0, expert, "bad", np.empty(store.manifest.record_stride, np.uint8))
    assert same(tmp_path)
