"""A finished store with damaged files is made whole by its build: what the messages say is what helps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moetier.errors import StoreError
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.store import Store
from moetier.store.verify import verify_store
from tests.store.checkpoints import Tensors, base_config, write_checkpoint, write_shards
from tests.store.older import older_store, overwrite


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def made(tmp_path):
    """A checkpoint and its store, with something of a server's in it."""
    made = write_checkpoint(tmp_path / "c")
    build_store(made.path, tmp_path / "s")
    (tmp_path / "s" / "heat.json").write_text("{}")
    return made


DAMAGES = {
    "records are gone": lambda s: (s / "layer-00001.records").unlink(),
    "records are short": lambda s: os.truncate(s / "layer-00001.records", 4096),
    "checksums are gone": lambda s: (s / "layer-00001.sums").unlink(),
    "checksums are short": lambda s: os.truncate(s / "layer-00001.sums", 8),
    "checksums are others": lambda s: (s / "layer-00001.sums").write_bytes(bytes(32)),
    "all layers are gone": lambda s: [path.unlink() for path in s.glob("layer-*")],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_layers_are_built_anew_and_the_others_stay(made, tmp_path, damage):
    whole = files(tmp_path / "s")
    kept = (tmp_path / "s" / "layer-00002.records").stat().st_ino
    damage(tmp_path / "s")
    with pytest.raises(StoreError, match=r"moetier store build CHECKPOINT .*s`, which builds this layer anew"):
        Store.open(tmp_path / "s")
    report = build_store(made.path, tmp_path / "s")
    assert files(tmp_path / "s") == whole
    assert not (tmp_path / "s.partial").exists()
    assert report.layers_built >= 1
    if report.layers_built == 1:
        assert (tmp_path / "s" / "layer-00002.records").stat().st_ino == kept
    assert build_store(made.path, tmp_path / "s").already_complete


def test_the_remedy_of_a_failed_check_works_on_a_finished_store(made, tmp_path):
    """A record that went bad on the disk: the message names a file to remove, and the build makes the layer anew."""
    whole = files(tmp_path / "s")
    records = tmp_path / "s" / "layer-00001.records"
    with records.open("r+b") as file:
        for expert in range(4):
            file.seek(4096 * expert + 10)
            file.write(b"\xff\x00\xff")
    with pytest.raises(StoreError, match="differs from the checkpoint's") as raised:
        build_store(made.path, tmp_path / "s", check=4)
    said = re.search(r"remove (\S+) and run the same command again", str(raised.value))
    assert said is not None
    Path(said[1]).unlink()
    assert build_store(made.path, tmp_path / "s", check=4).experts_checked == 8
    assert files(tmp_path / "s") == whole


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "partial"])
def test_records_of_other_weights_are_not_patched(made, tmp_path, finished):
    """Records whose checksums fit and whose weights do not: the whole store is another's, and has to go."""
    out = tmp_path / "s"
    other = write_checkpoint(tmp_path / "other", seed=1)
    if not finished:
        out.rename(tmp_path / "s.partial")
        manifest = json.loads((tmp_path / "s.partial" / "store.json").read_text())
        plan = {key: manifest[key] for key in ("format", "contract", "layout", "slices", "record_stride")}
        plan["identity"] = Checkpoint.open(other.path).identity()
        (tmp_path / "s.partial" / "store.json").unlink()
        (tmp_path / "s.partial" / "build.json").write_text(json.dumps(plan))
    else:
        older_store(out)
    with pytest.raises(StoreError) as raised:
        build_store(other.path, out, check=4)
    if finished:
        assert "into another folder" in str(raised.value)
        out = tmp_path / "another"
    else:
        said = re.search(r"remove (\S+) and run the same command again", str(raised.value))
        assert said is not None
        assert Path(said[1]) == tmp_path / "s.partial"
        for path in Path(said[1]).iterdir():
            path.unlink()
        Path(said[1]).rmdir()
    assert build_store(other.path, out, check=4).experts_checked == 8


def test_a_kill_while_it_is_repaired_loses_nothing(made, tmp_path):
    whole = files(tmp_path / "s")
    (tmp_path / "s" / "layer-00001.sums").unlink()
    code = """
import os, sys
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
Checkpoint.convert = lambda *_: os._exit(9)
build_store(sys.argv[1], sys.argv[2])
"""
    killed = subprocess.run([sys.executable, "-c", code, str(made.path), str(tmp_path / "s")], capture_output=True)
    assert killed.returncode == 9
    assert not (tmp_path / "s").exists(), "what is not whole must not look like a store"
    assert build_store(made.path, tmp_path / "s").layers_built == 1
    assert files(tmp_path / "s") == whole


def test_what_requantization_lost_is_still_told_of_the_layers_that_stay(tmp_path):
    shapes = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    rng = np.random.default_rng(0)
    tensors: Tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": ("F16", shape, rng.normal(size=shape).astype("<f2"))
        for layer in (0, 1)
        for expert in range(4)
        for name, shape in shapes.items()
    }
    write_shards(tmp_path / "c", tensors)
    config = base_config(layers=(0, 1), experts=4, hidden=64, intermediate=32, top_k=2)
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    build_store(tmp_path / "c", tmp_path / "s")
    whole = files(tmp_path / "s")
    sums = sorted((tmp_path / "s").glob("*.sums"))
    assert len(sums) > 1
    sums[0].unlink()
    build_store(tmp_path / "c", tmp_path / "s")
    assert files(tmp_path / "s") == whole


def test_nothing_of_an_older_store_is_kept_unseen(made, tmp_path):
    """Its layers may be of other weights under the same headers."""
    older_store(tmp_path / "s")
    (tmp_path / "s" / "layer-00001.sums").unlink()
    other = write_checkpoint(tmp_path / "other", seed=1)
    assert build_store(other.path, tmp_path / "s").layers_built == 2
    build_store(other.path, tmp_path / "fresh")
    (tmp_path / "s" / "heat.json").unlink()
    assert files(tmp_path / "s") == files(tmp_path / "fresh")


@pytest.mark.parametrize("change", [True, False], ids=["changed", "same"])
def test_of_a_deep_store_layers_stay_only_if_the_content_is_the_same(made, tmp_path, change):
    build_store(made.path, tmp_path / "deep", deep=True)
    (tmp_path / "deep" / "layer-00001.sums").unlink()
    if change:
        overwrite(made.path, "model.layers.2.mlp.experts.2.up_proj.weight", 400, b"\x33\x77\x11")
    assert build_store(made.path, tmp_path / "deep").layers_built == (2 if change else 1)
    with Store.open(tmp_path / "deep") as store:
        assert store.manifest.checkpoint.content == Checkpoint.open(made.path).identity(deep=True)


def test_another_build_in_the_way_is_said_and_the_remedy_works(made, tmp_path):
    (tmp_path / "s" / "layer-00001.sums").unlink()
    (tmp_path / "s.partial").mkdir()
    (tmp_path / "s.partial" / "build.json").write_text("{}")
    with pytest.raises(StoreError, match=r"remove .*s\.partial and run the build again"):
        build_store(made.path, tmp_path / "s")
    (tmp_path / "s.partial" / "build.json").unlink()
    (tmp_path / "s.partial" / "build.lock").unlink()
    (tmp_path / "s.partial").rmdir()
    build_store(made.path, tmp_path / "s")
    assert not verify_store(tmp_path / "s").bad


def test_a_damaged_manifest_says_what_helps(made, tmp_path):
    (tmp_path / "s" / "store.json").write_text("{")
    with pytest.raises(StoreError, match="into another folder, or remove this one first"):
        build_store(made.path, tmp_path / "s")
    build_store(made.path, tmp_path / "another")
    assert np.array_equal(
        np.fromfile(tmp_path / "another" / "layer-00001.records", np.uint8),
        np.fromfile(tmp_path / "s" / "layer-00001.records", np.uint8),
    )


def test_files_that_a_killed_writer_left_go(made, tmp_path):
    left = tmp_path / "s" / f"store.json.{'0' * 16}.tmp"
    left.write_bytes(b"half")
    (tmp_path / "s" / "heat.json.tmp").write_bytes(b"a user's")
    build_store(made.path, tmp_path / "s")
    assert not left.exists()
    assert (tmp_path / "s" / "heat.json.tmp").exists()
