"""A store belongs to one checkpoint: other weights under the same names, shapes and config are noticed."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from moetier.errors import CheckpointError, StoreError
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint, is_expert_tensor
from moetier.store.match import compare_all, compare_some, open_store
from moetier.store.store import Store
from moetier.store.trim import trim_checkpoint
from moetier.store.verify import verify_store
from tests.store.checkpoints import Tensors, base_config, write_checkpoint, write_shards
from tests.store.older import older_store, older_trimmed, overwrite

WEIGHT = "model.layers.1.mlp.experts.2.up_proj.weight"
NOT_SAMPLED = 400
"""A byte of WEIGHT (1,024 bytes) that no sample covers."""


@pytest.fixture
def made(tmp_path):
    return write_checkpoint(tmp_path / "c", shards=3)


def run(*arguments):
    """`moetier store ...` in a process of its own."""
    code = "import sys; from moetier.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, "store", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"COLUMNS": "500", "PATH": "/usr/bin:/bin"},
    )


@pytest.mark.parametrize("where", [0, 500, -1], ids=["beginning", "middle", "end"])
@pytest.mark.parametrize("name", [WEIGHT, "model.layers.2.mlp.gate.weight"], ids=["expert", "dense"])
def test_a_change_of_one_tensor_is_another_checkpoint(made, tmp_path, name, where):
    build_store(made.path, tmp_path / "s")
    before = Checkpoint.open(made.path)
    known = before.identity()
    overwrite(made.path, name, where if name == WEIGHT else where % 511, b"\xa5")
    after = Checkpoint.open(made.path)
    assert after.headers == before.headers
    assert after.identity() != known
    with pytest.raises(StoreError, match="was built from another checkpoint: expected identity"):
        open_store(tmp_path / "s", after)


def test_every_tensor_contributes(made):
    seen = {Checkpoint.open(made.path).identity()}
    names = list(Checkpoint.open(made.path).tensors)
    for name in names:
        overwrite(made.path, name, 0, b"\x5a")
        seen.add(Checkpoint.open(made.path).identity())
    assert len(seen) == 1 + len(names)


def test_each_expert_of_a_tensor_of_all_experts_contributes(tmp_path):
    shape = (8, 64, 64)
    tensors: Tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": ("BF16", shape, np.zeros(shape, np.uint16)),
        "model.layers.0.mlp.experts.down_proj": ("BF16", (8, 64, 32), np.zeros((8, 64, 32), np.uint16)),
    }
    write_shards(tmp_path, tensors)
    config = base_config(layers=(0,), experts=8, hidden=64, intermediate=32, top_k=2, num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = Checkpoint.open(tmp_path).identity()
    for expert in range(8):
        size = 2 * 64 * 64
        overwrite(tmp_path, "model.layers.0.mlp.experts.gate_up_proj", expert * size + 64, b"\1\1" * (size // 2 - 64))
        after = Checkpoint.open(tmp_path).identity()
        assert after != before, expert
        before = after


def test_the_store_of_a_fine_tune_is_refused_by_every_verb(made, tmp_path):
    build_store(made.path, tmp_path / "s")
    tune = write_checkpoint(tmp_path / "tune", seed=1, shards=3).path
    for verb in (
        ("build", tune, tmp_path / "s", "--check", "1"),
        ("build", tune, tmp_path / "s"),
        ("verify", tmp_path / "s", "--checkpoint", tune),
    ):
        refused = run(*verb)
        assert refused.returncode == 2, refused.stderr
        assert "expected" in refused.stderr
        assert "identity" in refused.stderr
    with Store.open(tmp_path / "s") as store:
        assert store.manifest.checkpoint.identity == Checkpoint.open(made.path).identity()


def test_the_remedy_of_a_store_of_another_build_works(made, tmp_path):
    build_store(made.path, tmp_path / "s")
    tune = write_checkpoint(tmp_path / "tune", seed=1, shards=3).path
    refused = run("build", tune, tmp_path / "s")
    assert f"choose another OUT, or remove {tmp_path / 's'} yourself and run the build again" in refused.stderr
    shutil.rmtree(tmp_path / "s")
    assert run("build", tune, tmp_path / "s", "--check", "4").returncode == 0
    open_store(tmp_path / "s", Checkpoint.open(tune)).close()


def test_a_build_is_not_finished_with_other_weights_than_it_began_with(made, tmp_path):
    out = tmp_path / "s"
    code = """
import os, sys
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
real = Checkpoint.convert
Checkpoint.convert = lambda self, layer, expert: os._exit(9) if layer == 1 else real(self, layer, expert)
build_store(sys.argv[1], sys.argv[2])
"""
    assert subprocess.run([sys.executable, "-c", code, str(made.path), str(out)]).returncode == 9
    write_checkpoint(made.path, shards=3, seed=5)
    refused = run("build", made.path, out)
    assert refused.returncode == 2
    remedy = f"remove {out}.partial and run the build again"
    assert remedy in refused.stderr
    shutil.rmtree(f"{out}.partial")
    assert run("build", made.path, out, "--check", "4").returncode == 0


def test_the_start_compares_experts_and_names_the_one_that_differs(made, tmp_path):
    """Bytes that no sample covers: only the experts themselves tell."""
    build_store(made.path, tmp_path / "s")
    for expert in range(4):
        overwrite(made.path, WEIGHT.replace(".2.", f".{expert}."), NOT_SAMPLED, b"\x33\x77\x11")
    checkpoint = Checkpoint.open(made.path)
    other = pytest.raises(StoreError, match=r"layer 1, expert [0-3]: the store .* holds other weights")
    with open_store(tmp_path / "s", checkpoint) as store, other as raised:
        compare_some(store, checkpoint)
    assert f"`moetier store build {made.path} OUT --check 4` into another folder" in str(raised.value)
    assert run("build", made.path, tmp_path / "other", "--check", "4").returncode == 0
    with open_store(tmp_path / "other", checkpoint) as store:
        assert compare_all(store, checkpoint) == 8


def test_what_was_compared_is_told(made, tmp_path):
    build_store(made.path, tmp_path / "s", slices=1)
    checkpoint = Checkpoint.open(made.path)
    with open_store(tmp_path / "s", checkpoint) as store:
        found = compare_some(store, checkpoint, each=3)
        assert (found.experts, found.layers, found.skipped) == (6, 2, ())
        assert str(found).startswith("6 experts of 2 layers compared with the checkpoint's in ")
        hurried = compare_some(store, checkpoint, each=3, seconds=-1)
        assert (hurried.experts, hurried.skipped) == (2, ()), "one of each layer is always compared"
        out_of_time = compare_some(store, checkpoint, limit=-1)
        assert (out_of_time.experts, out_of_time.skipped) == (0, (1, 2))
        assert str(out_of_time).endswith("too slow, not compared: layers 1, 2")
    trim_checkpoint(checkpoint, tmp_path / "t")
    with open_store(tmp_path / "s", Checkpoint.open(tmp_path / "t")) as store:
        assert compare_some(store, Checkpoint.open(tmp_path / "t")) is None


class TestOlderStores:
    """Stores whose identity is of headers only."""

    def test_it_opens_with_a_loud_line(self, made, tmp_path, caplog):
        build_store(made.path, tmp_path / "s")
        older_store(tmp_path / "s")
        checkpoint = Checkpoint.open(made.path)
        with open_store(tmp_path / "s", checkpoint) as store:
            assert compare_some(store, checkpoint).experts == 4
        assert "knew a checkpoint by its headers only" in caplog.text

    def test_other_headers_are_refused(self, made, tmp_path):
        build_store(made.path, tmp_path / "s")
        older_store(tmp_path / "s")
        other = write_checkpoint(tmp_path / "d", top_k=1, shards=3).path
        with pytest.raises(StoreError, match="was built from another checkpoint"):
            open_store(tmp_path / "s", Checkpoint.open(other))

    def test_the_start_finds_other_experts(self, made, tmp_path):
        build_store(made.path, tmp_path / "s")
        older_store(tmp_path / "s")
        tune = Checkpoint.open(write_checkpoint(tmp_path / "tune", seed=1, shards=3).path)
        with (
            open_store(tmp_path / "s", tune) as store,
            pytest.raises(StoreError, match=r"layer \d, expert \d: the store"),
        ):
            compare_some(store, tune)

    def test_the_build_compares_every_expert_and_records_more(self, made, tmp_path, caplog):
        build_store(made.path, tmp_path / "s")
        older_store(tmp_path / "s")
        done = run("build", made.path, tmp_path / "s", "--json")
        assert json.loads(done.stdout)["experts_checked"] == 8
        open_store(tmp_path / "s", Checkpoint.open(made.path)).close()
        assert "headers only" not in caplog.text
        assert json.loads(run("build", made.path, tmp_path / "s", "--json").stdout)["experts_checked"] == 0

    def test_the_build_refuses_other_experts(self, made, tmp_path):
        build_store(made.path, tmp_path / "s")
        older_store(tmp_path / "s")
        overwrite(made.path, WEIGHT, NOT_SAMPLED, b"\x33\x77\x11")
        before = (tmp_path / "s" / "store.json").read_bytes()
        refused = run("build", made.path, tmp_path / "s")
        assert refused.returncode == 2
        assert "layer 1, expert 2: the store" in refused.stderr
        assert (tmp_path / "s" / "store.json").read_bytes() == before

    def test_a_trimmed_checkpoint_opens_them_whatever_their_age(self, made, tmp_path, caplog):
        build_store(made.path, tmp_path / "new")
        trim_checkpoint(Checkpoint.open(made.path), tmp_path / "new-t")
        for kind, older in (("s", older_store), ("t", older_trimmed)):
            source = "new-t" if kind == "t" else "new"
            shutil.copytree(tmp_path / source, tmp_path / f"old-{kind}")
            older(tmp_path / f"old-{kind}")
        for store in ("new", "old-s"):
            for trimmed in ("new-t", "old-t"):
                caplog.clear()
                open_store(tmp_path / store, Checkpoint.open(tmp_path / trimmed)).close()
                assert ("headers only" in caplog.text) == ((store, trimmed) != ("new", "new-t"))
                again = f"build WHOLE_CHECKPOINT {tmp_path / store} --trim OTHER_FOLDER`"
                assert (again in caplog.text) == ((store, trimmed) == ("new", "old-t"))
        assert run("build", made.path, tmp_path / "new", "--trim", tmp_path / "again").returncode == 0
        caplog.clear()
        open_store(tmp_path / "new", Checkpoint.open(tmp_path / "again")).close()
        assert not caplog.text


class TestTrimmed:
    """The trimmed copy is noticed to be another one, by its tensors."""

    def dense(self, checkpoint):
        return next(name for name in checkpoint.tensors if not is_expert_tensor(name))

    def test_a_changed_tensor_in_it_is_noticed(self, made, tmp_path):
        trim_checkpoint(Checkpoint.open(made.path), tmp_path / "t")
        overwrite(tmp_path / "t", self.dense(Checkpoint.open(made.path)), 0, b"\x42")
        with pytest.raises(CheckpointError, match="trim the whole checkpoint again, into another folder"):
            Checkpoint.open(tmp_path / "t")

    @pytest.mark.parametrize("at", [0, 100], ids=["sampled", "not sampled"])
    def test_it_is_not_there_if_a_tensor_of_the_source_is_another(self, made, tmp_path, at):
        trim_checkpoint(Checkpoint.open(made.path), tmp_path / "t")
        overwrite(made.path, self.dense(Checkpoint.open(made.path)), at, b"\x42")
        with pytest.raises(StoreError, match=r"exists and is not the trimmed .*expected (identity|a free name)"):
            trim_checkpoint(Checkpoint.open(made.path), tmp_path / "t")
        shutil.rmtree(tmp_path / "t")  # as it says
        trim_checkpoint(Checkpoint.open(made.path), tmp_path / "t")
        Checkpoint.open(tmp_path / "t")

    def test_an_interrupted_one_is_not_finished_with_old_tensors(self, made, tmp_path):
        trim_checkpoint(Checkpoint.open(made.path), tmp_path / "t")
        (tmp_path / "t").rename(tmp_path / "t.partial")
        (tmp_path / "t.partial" / "moetier-origin.json").unlink()
        name = self.dense(Checkpoint.open(made.path))
        overwrite(made.path, name, 100, b"\x42")
        whole = Checkpoint.open(made.path)
        trim_checkpoint(whole, tmp_path / "t")
        trimmed = Checkpoint.open(tmp_path / "t")
        assert np.array_equal(trimmed.shards.read(trimmed.tensors[name]), whole.shards.read(whole.tensors[name]))


class TestDeep:
    """`--deep` compares the whole content each time it is asked for."""

    def test_content_that_changed_is_refused(self, made, tmp_path):
        build_store(made.path, tmp_path / "s", deep=True)
        overwrite(made.path, WEIGHT, NOT_SAMPLED, b"\x33\x77\x11")
        for verb in (
            ("build", made.path, tmp_path / "s", "--deep"),
            ("verify", tmp_path / "s", "--checkpoint", made.path),
        ):
            refused = run(*verb)
            assert refused.returncode == 2
            assert "was built from other weights" in refused.stderr

    def test_the_same_content_is_said_to_be_the_same(self, made, tmp_path):
        build_store(made.path, tmp_path / "s", deep=True)
        again = run("build", made.path, tmp_path / "s", "--deep")
        assert again.returncode == 0
        assert "it is of the checkpoint's very content" in again.stdout
        assert "very content" not in run("build", made.path, tmp_path / "s").stdout

    def test_a_store_that_was_not_built_deep_is_compared_and_records_it(self, made, tmp_path):
        build_store(made.path, tmp_path / "s")
        assert json.loads(run("build", made.path, tmp_path / "s", "--deep", "--json").stdout)["experts_checked"] == 8
        with Store.open(tmp_path / "s") as store:
            assert store.manifest.checkpoint.content == Checkpoint.open(made.path).identity(deep=True)
        overwrite(made.path, "model.layers.1.mlp.gate.weight", 100, b"\x42")  # no expert, and not sampled
        assert run("build", made.path, tmp_path / "s", "--deep").returncode == 2

    def test_a_store_whose_experts_differ_does_not_become_deep(self, made, tmp_path):
        build_store(made.path, tmp_path / "s")
        overwrite(made.path, WEIGHT, NOT_SAMPLED, b"\x33\x77\x11")
        refused = run("build", made.path, tmp_path / "s", "--deep")
        assert refused.returncode == 2
        assert "layer 1, expert 2" in refused.stderr

    def test_a_trimmed_checkpoint_has_no_content_to_compare(self, made, tmp_path):
        build_store(made.path, tmp_path / "s", deep=True)
        trim_checkpoint(Checkpoint.open(made.path), tmp_path / "t")
        refused = run("build", tmp_path / "t", tmp_path / "s", "--deep")
        assert refused.returncode == 2
        assert "was trimmed and has no experts" in refused.stderr


def test_verify_compares_experts_of_a_store_that_is_not_deep(made, tmp_path):
    build_store(made.path, tmp_path / "s")
    for expert in range(4):
        overwrite(made.path, WEIGHT.replace(".2.", f".{expert}."), NOT_SAMPLED, b"\x33\x77\x11")
    with pytest.raises(StoreError, match=r"layer 1, expert [0-3]"):
        verify_store(tmp_path / "s", checkpoint=made.path)
