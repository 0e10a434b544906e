"""A trimmed checkpoint: everything but the experts, and the identity of the whole one."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from moetier.errors import CheckpointError, StoreError
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint, is_expert_tensor
from moetier.store.store import Store
from moetier.store.trim import trim_checkpoint
from tests.store.checkpoints import write_checkpoint


@pytest.fixture
def made(tmp_path):
    made = write_checkpoint(tmp_path / "c", shards=5)
    (made.path / "tokenizer.json").write_text("{}")
    (made.path / "encoding").mkdir()
    (made.path / "encoding" / "chat.py").write_text("pass")
    return made


def kept_tensors(checkpoint):
    return {n: bytes(checkpoint.shards.read(t)) for n, t in checkpoint.tensors.items() if not is_expert_tensor(n)}


def test_it_holds_every_other_tensor_and_file_and_no_expert(made, tmp_path):
    whole = Checkpoint.open(made.path)
    trim_checkpoint(whole, tmp_path / "t")
    trimmed = Checkpoint.open(tmp_path / "t")
    assert kept_tensors(trimmed) == kept_tensors(whole)
    assert not [name for name in trimmed.tensors if is_expert_tensor(name)]
    assert {t: (x.dtype, x.shape) for t, x in trimmed.tensors.items()}.items() <= {
        t: (x.dtype, x.shape) for t, x in whole.tensors.items()
    }.items()
    assert (tmp_path / "t" / "encoding" / "chat.py").read_text() == "pass"
    assert (tmp_path / "t" / "tokenizer.json").exists()
    assert not [p for p in (tmp_path / "t").rglob("*") if p.suffix in (".tmp", ".lock")]
    assert not (tmp_path / "t.partial").exists()


def test_safetensors_reads_its_files(made, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    trim_checkpoint(Checkpoint.open(made.path), tmp_path / "t")
    weight_map = json.loads((tmp_path / "t" / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map
    for name, file in weight_map.items():
        with safetensors.safe_open(tmp_path / "t" / file, framework="np") as opened:
            assert name in opened.keys()  # noqa: SIM118 (not a dict)


def test_it_stands_for_the_whole_one(made, tmp_path):
    whole = Checkpoint.open(made.path)
    build_store(made.path, tmp_path / "s")
    trim_checkpoint(whole, tmp_path / "t")
    trimmed = Checkpoint.open(tmp_path / "t")
    for what in ("geometry", "family", "moe_layers", "model_type", "source_format", "requantized", "hidden_layers"):
        assert getattr(trimmed, what) == getattr(whole, what), what
    assert trimmed.identity() == whole.identity()
    Store.open(tmp_path / "s", trimmed.identity()).close()
    assert build_store(tmp_path / "t", tmp_path / "s").already_complete


def test_what_needs_experts_is_refused(made, tmp_path):
    trim_checkpoint(Checkpoint.open(made.path), tmp_path / "t")
    trimmed = Checkpoint.open(tmp_path / "t")
    for use in (
        lambda: trimmed.read_expert(0, 0),
        lambda: trimmed.identity(deep=True),
        lambda: build_store(tmp_path / "t", tmp_path / "other"),
        lambda: trim_checkpoint(trimmed, tmp_path / "u"),
    ):
        with pytest.raises(CheckpointError, match="was trimmed and has no experts"):
            use()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "moetier-origin.json"])
def test_a_changed_file_is_noticed(made, tmp_path, file):
    trim_checkpoint(Checkpoint.open(made.path), tmp_path / "t")
    path = tmp_path / "t" / file
    content = json.loads(path.read_text())
    content["rope_theta"] = 2
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"trim the whole checkpoint again"):
        Checkpoint.open(tmp_path / "t")


def test_it_resumes_and_is_left_alone_when_done(made, tmp_path):
    whole = Checkpoint.open(made.path)
    trim_checkpoint(whole, tmp_path / "t")
    shutil.copytree(tmp_path / "t", tmp_path / "u.partial")
    (tmp_path / "u.partial" / "moetier-origin.json").unlink()
    first, second = sorted((tmp_path / "u.partial").glob("*.safetensors"))[:2]
    os.truncate(second, 100)
    before = first.stat().st_mtime_ns
    trim_checkpoint(whole, tmp_path / "u")
    assert (tmp_path / "u" / first.name).stat().st_mtime_ns == before
    assert kept_tensors(Checkpoint.open(tmp_path / "u")) == kept_tensors(whole)
    before = (tmp_path / "u").stat().st_mtime_ns
    trim_checkpoint(whole, tmp_path / "u")
    assert (tmp_path / "u").stat().st_mtime_ns == before


def test_what_is_in_the_way_is_not_touched(made, tmp_path):
    whole = Checkpoint.open(made.path)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="exists and is not the trimmed"):
        trim_checkpoint(whole, tmp_path / "t")
    with pytest.raises(StoreError, match="exists and is not the trimmed"):
        trim_checkpoint(whole, made.path)
    with pytest.raises(StoreError, match="lies in the checkpoint"):
        trim_checkpoint(whole, made.path / "inside")


def command(*arguments):
    code = "import sys; from moetier.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


def test_the_source_is_deleted_only_when_asked_twice_with_check_and_trim(made, tmp_path):
    build = ("store", "build", made.path, tmp_path / "s")
    for wrong in (
        ("--delete-source",),
        ("--delete-source", "--delete-source", "--check", "1"),
        ("--delete-source", "--delete-source", "--trim", tmp_path / "t"),
        ("--delete-source", "--check", "1", "--trim", tmp_path / "t"),
    ):
        refused = command(*build, *wrong)
        assert refused.returncode == 2
        assert "give it twice" in refused.stderr
    assert not (tmp_path / "s").exists()
    size = sum(path.stat().st_size for path in made.path.glob("*.safetensors"))
    kept = kept_tensors(Checkpoint.open(made.path))
    done = command(*build, "--delete-source", "--delete-source", "--check", "1", "--trim", tmp_path / "t", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes_deleted"] == size
    assert not list(made.path.glob("*.safetensors"))
    assert (made.path / "config.json").exists()
    trimmed = Checkpoint.open(tmp_path / "t")
    assert kept_tensors(trimmed) == kept
    with Store.open(tmp_path / "s", trimmed.identity()) as store:
        record = np.empty(store.manifest.record_stride, np.uint8)
        store.read_record(1, 3, record)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "interrupted"])
def test_a_store_in_the_checkpoint_is_not_copied(tmp_path, whole):
    made = write_checkpoint(tmp_path / "c")
    build_store(made.path, made.path / "store")
    if not whole:
        (made.path / "store" / "store.json").unlink()
    trim_checkpoint(Checkpoint.open(made.path), tmp_path / "t")
    assert (tmp_path / "t" / "config.json").exists()
    assert not (tmp_path / "t" / "store").exists()
