"""`--delete-source`: nothing goes before every tensor was compared, and never what something else links to."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moetier.errors import CheckpointError, StoreError
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint, is_expert_tensor
from moetier.store.delete import delete_source_of
from moetier.store.trim import trim_checkpoint
from moetier.store.verify import verify_store
from tests.store.checkpoints import write_checkpoint
from tests.store.older import older_store, overwrite

WEIGHT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture
def made(tmp_path):
    """A checkpoint of three shards, its store and its trimmed copy."""
    made = write_checkpoint(tmp_path / "c", shards=3)
    build_store(made.path, tmp_path / "s")
    trim_checkpoint(Checkpoint.open(made.path), tmp_path / "t")
    return made


def delete(made, tmp_path):
    return delete_source_of(made.path, tmp_path / "s", tmp_path / "t")


def command(made, tmp_path, *more):
    code = "import sys; from moetier.cli import main; sys.exit(main())"
    arguments = ("store", "build", made.path, tmp_path / "s", "--check", 1, "--trim", tmp_path / "t")
    arguments += ("--delete-source", "--delete-source", "--json", *more)
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


def all_there(made):
    checkpoint = Checkpoint.open(made.path)
    return all(shard.path.stat().st_size == shard.size for shard in checkpoint.shards.shards)


def dense(made):
    return next(name for name in Checkpoint.open(made.path).tensors if not is_expert_tensor(name))


def test_what_is_whole_elsewhere_is_deleted(made, tmp_path):
    size = sum(path.stat().st_size for path in made.path.glob("*.safetensors"))
    done = delete(made, tmp_path)
    assert (done.bytes, done.stayed) == (size, ())
    assert not list(made.path.glob("*.safetensors"))


@pytest.mark.parametrize("at", [0, 100], ids=["sampled", "not sampled"])
def test_a_dense_tensor_that_changed_since_is_not_deleted(made, tmp_path, at):
    """The case of a merged LoRA: the experts are the same, the rest is not."""
    name = dense(made)
    overwrite(made.path, name, at, b"\x42")
    refused = command(made, tmp_path)
    assert refused.returncode == 2, refused.stdout
    assert all_there(made)
    if at:  # the store still is of it, so what the message says is the whole remedy
        assert "run the command again" in " ".join(refused.stderr.split())
        shutil.rmtree(tmp_path / "t")
        assert command(made, tmp_path).returncode == 0
        trimmed = Checkpoint.open(tmp_path / "t")
        assert trimmed.shards.read(trimmed.tensors[name])[at] == 0x42


def test_an_expert_that_changed_since_is_not_deleted(made, tmp_path):
    overwrite(made.path, WEIGHT, 400, b"\x33\x77\x11")  # which no sample covers
    with pytest.raises(StoreError, match="layer 1, expert 2: the store"):
        delete(made, tmp_path)
    assert all_there(made)


def test_the_experts_of_an_older_store_are_compared_too(made, tmp_path):
    older_store(tmp_path / "s")
    overwrite(made.path, WEIGHT, 400, b"\x33\x77\x11")
    with pytest.raises(StoreError, match="layer 1, expert 2: the store"):
        delete(made, tmp_path)
    assert all_there(made)


def test_without_a_trimmed_copy_nothing_is_deleted_and_the_remedy_works(made, tmp_path):
    shutil.rmtree(tmp_path / "t")
    with pytest.raises(CheckpointError, match=r"nothing was deleted\. Make it with") as raised:
        delete(made, tmp_path)
    assert all_there(made)
    said = re.search(r"`moetier (.*)`", str(raised.value))
    assert said is not None
    code = "import sys; from moetier.cli import main; sys.exit(main())"
    assert subprocess.run([sys.executable, "-c", code, *said[1].split()]).returncode == 0
    assert delete(made, tmp_path).bytes


def test_bad_records_keep_the_source_and_the_remedy_works(made, tmp_path):
    records = tmp_path / "s" / "layer-00001.records"
    raw = bytearray(records.read_bytes())
    raw[10] ^= 1
    records.write_bytes(raw)
    with pytest.raises(
        StoreError, match=f"1 bad records; nothing was deleted. Remove {records} and run the same command"
    ):
        delete(made, tmp_path)
    assert all_there(made)
    records.unlink()
    done = command(made, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes_deleted"]
    assert not verify_store(tmp_path / "s").bad


def test_a_copy_that_is_the_source_itself_is_refused(made, tmp_path):
    """A trimmed file that was replaced by a link to the whole one: deleting that would leave nothing."""
    copy = next((tmp_path / "t").glob("*.safetensors"))
    linked = made.path / copy.name
    (tmp_path / "t" / "twin.safetensors").symlink_to(linked)
    with pytest.raises(StoreError, match="is the same file as"):
        delete(made, tmp_path)
    assert all_there(made)


class Cache:
    """A repository in a hub's cache: revisions that link to contents under blobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "models--org--model"
        (self.folder / "blobs").mkdir(parents=True)

    def add(self, revision: str, source: Path) -> Path:
        snapshot = self.folder / "snapshots" / revision
        snapshot.mkdir(parents=True)
        for file in source.iterdir():
            blob = self.folder / "blobs" / f"{hash(file.read_bytes()) & (1 << 64) - 1:016x}"
            blob.write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
        return snapshot


def test_blobs_of_another_revision_stay_and_are_named(tmp_path):
    first = write_checkpoint(tmp_path / "first", shards=3)
    second = tmp_path / "second"
    shutil.copytree(first.path, second)
    overwrite(second, dense(first), 0, b"\x42")  # one shard differs
    cache = Cache(tmp_path / "hub")
    one, two = cache.add("1" * 40, first.path), cache.add("2" * 40, second)
    build_store(one, tmp_path / "s")
    done = command(replace(first, path=one), tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["stayed"]) == 2
    assert all(str(two) in line for line in found["stayed"])
    assert not list(one.glob("*.safetensors"))
    for shard in Checkpoint.open(two).shards.shards:  # whole, as it was
        assert shard.path.read_bytes() == (second / shard.path.name).read_bytes()
    differing = [f.name for f in second.glob("*.safetensors") if f.read_bytes() != (first.path / f.name).read_bytes()]
    assert found["bytes_deleted"] == sum((first.path / name).stat().st_size for name in differing) > 0


@pytest.mark.parametrize("through", ["itself", "a link"])
def test_the_only_revision_frees_its_blobs(tmp_path, through):
    made = write_checkpoint(tmp_path / "first", shards=3)
    cache = Cache(tmp_path / "hub")
    one = cache.add("1" * 40, made.path)
    if through == "a link":
        (tmp_path / "link").symlink_to(one)
        one = tmp_path / "link"
    build_store(one, tmp_path / "s")
    trim_checkpoint(Checkpoint.open(one), tmp_path / "t")
    done = delete_source_of(one, tmp_path / "s", tmp_path / "t")
    assert done.bytes == sum(p.stat().st_size for p in made.path.glob("*.safetensors"))
    assert len(list((cache.folder / "blobs").iterdir())) == 2, "config.json and the index"


def test_what_a_link_of_ones_own_leads_to_stays(made, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in list(made.path.glob("*.safetensors")):
        shutil.move(file, elsewhere / file.name)
        file.symlink_to(elsewhere / file.name)
    done = delete(made, tmp_path)
    assert done.bytes == 0
    assert len(done.stayed) == len(list(elsewhere.iterdir())) == 3
    assert not list(made.path.glob("*.safetensors"))


def test_hard_links_free_nothing_and_are_said(made, tmp_path):
    first = sorted(made.path.glob("*.safetensors"))[0]
    os.link(first, tmp_path / "other-name")
    done = delete(made, tmp_path)
    assert len(done.stayed) == 1
    assert "hard links" in done.stayed[0]
    assert (tmp_path / "other-name").exists()
