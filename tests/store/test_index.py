"""Which files and tensors are the checkpoint's: with an index what it says, without one a whole set."""

import json
import shutil

import numpy as np
import pytest

from moetier.errors import CheckpointError
from moetier.plan.headers import read_folder
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.trim import trim_checkpoint
from tests.store.mutants import ENCODERS, INDEX, bf16, layer_tensors, made, safetensors, same, stored_values

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EXPERTS = "model.layers.1.mlp.experts"


def mutant(kind="int4", index=True):
    found = made(np.random.default_rng(0), kind)
    found.spread(2, index)
    return found


def build(folder, m):
    """Write, build and compare with the values that are meant."""
    if not (folder / "c").exists():
        m.write(folder / "c")
    build_store(folder / "c", folder / "s", check=3)
    assert same(stored_values(folder / "s"), m)


@pytest.mark.parametrize("stale", ["int4", "fp8 block", "bf16"])
def test_copies_where_the_index_does_not_place_them_are_named_and_ignored(tmp_path, caplog, stale):
    m = mutant()
    other, _ = layer_tensors(m.rng, ENCODERS[stale], EXPERTS)
    for name, value in other.items():
        m.files[FIRST if m.index.get(name) != FIRST else SECOND][name] = value
    dense = "lm_head.weight"
    m.files[FIRST if m.index[dense] != FIRST else SECOND][dense] = bf16(np.zeros((4, 64)))[0]
    build(tmp_path, m)
    lines = [record.message for record in caplog.records if "tensors ignored" in record.message]
    assert len(lines) == 1, lines
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert dense in {name for shard in checkpoint.shards.shards for name in shard.ignored}
    trim_checkpoint(checkpoint, tmp_path / "t")
    kept = Checkpoint.open(tmp_path / "t")
    assert np.any(kept.shards.read(kept.tensors[dense]))
    plain = mutant()
    plain.write(tmp_path / "plain")
    found, wanted = (read_folder(path, 1.0).parts for path in (tmp_path / "c", tmp_path / "plain"))
    assert found == wanted


def test_a_file_that_the_index_does_not_name_is_named_and_not_read(tmp_path, caplog):
    m = mutant()
    m.more["model-mtp.safetensors"] = b"no safetensors file"
    build(tmp_path, m)
    assert f"model-mtp.safetensors not read, which {INDEX} does not name" in caplog.text


def test_a_tensor_that_the_index_forgot_is_said_to_be_there(tmp_path):
    m = mutant()
    name = next(name for name in m.experts(1) if name.endswith("weight_packed"))
    file = m.index.pop(name)
    m.write(tmp_path / "c")
    with pytest.raises(CheckpointError, match=rf"{name} is missing .*; {file} holds one of that name, where the index"):
        Checkpoint.open(tmp_path / "c")


def without_index(folder, m):
    m.write(folder / "c")
    return folder / "c"


def test_a_consolidated_file_beside_shards_is_refused_until_one_of_them_goes(tmp_path):
    m = mutant(index=False)
    folder = without_index(tmp_path, m)
    (folder / "model.safetensors").write_bytes(safetensors(m.tensors))
    with pytest.raises(CheckpointError, match=r"expected one set .*model.safetensors and model-\*-of-00002.* remove"):
        Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    build(tmp_path, m)


@pytest.mark.parametrize("reader", [Checkpoint.open, read_folder], ids=["store", "plan"])
@pytest.mark.parametrize("file", [FIRST, SECOND])
def test_a_set_with_a_gap_is_refused_until_it_is_whole(tmp_path, reader, file):
    m = mutant(index=False)
    folder = without_index(tmp_path, m)
    (folder / file).rename(tmp_path / file)
    with pytest.raises(CheckpointError, match=rf"found 1 of them and not number {int(file[6:11])}, .*download"):
        reader(folder)
    (tmp_path / file).rename(folder / file)
    build(tmp_path, m)


def test_two_sets_are_refused(tmp_path):
    folder = without_index(tmp_path, mutant(index=False))
    shutil.copy(folder / FIRST, folder / "model-00001-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"model-\*-of-00002.safetensors and model-\*-of-00003"):
        Checkpoint.open(folder)


def test_an_enormous_set_is_refused_at_once(tmp_path):
    folder = without_index(tmp_path, mutant(index=False))
    (folder / FIRST).rename(folder / "model-00001-of-999999999.safetensors")
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError, match="found 1 of them and not number 2"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "file",
    ["../c/model.safetensors", "/tmp/x.safetensors", "sub/" + FIRST, "./" + FIRST, "", "x.bin", ".x.safetensors"],
)
def test_an_index_that_leaves_the_folder_is_refused(tmp_path, file):
    m = mutant()
    m.index = dict.fromkeys(m.index, file)
    m.write(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"expected the name of a .* file beside it, found"):
        Checkpoint.open(tmp_path / "c")


def test_two_indexes_are_fine_as_long_as_they_agree(tmp_path, caplog):
    m = mutant()
    m.more["consolidated.safetensors.index.json"] = json.dumps(
        {"weight_map": {**m.index, "output.weight": "consolidated.safetensors"}}
    ).encode()
    build(tmp_path, m)
    assert "consolidated.safetensors.index.json not read" in caplog.text
    name = next(iter(m.index))
    other = {"weight_map": {name: "consolidated.safetensors"}}
    (tmp_path / "c" / "consolidated.safetensors.index.json").write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match="place tensors in different files; remove"):
        Checkpoint.open(tmp_path / "c")
    (tmp_path / "c" / "consolidated.safetensors.index.json").unlink()
    Checkpoint.open(tmp_path / "c")


def test_links_spaces_and_other_scripts_are_fine(tmp_path):
    m = mutant()
    blobs, snapshot = tmp_path / "Modell groß 模型 (v1)", tmp_path / "c"
    m.write(blobs)
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    (snapshot / "._model-00001-of-00002.safetensors").write_bytes(b"what a Mac leaves")
    build(tmp_path, m)
