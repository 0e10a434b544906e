"""Layers are complete against config.json; a drafter that does not fit is left out, said and noted."""

import json

import numpy as np
import pytest

from moetier.engine.model import TieredModel
from moetier.errors import CheckpointError, StoreError, UnsupportedModelError
from moetier.plan.headers import read_folder
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.store import Store
from moetier.store.trim import trim_checkpoint
from moetier.store.verify import verify_store
from moetier.vllm_arguments import drafts_itself
from tests.plan import released
from tests.store.mutants import E, made, safetensors, same, stored_values
from tests.store.mutate_files import with_draft


def mutant(kind="bf16"):
    m = made(np.random.default_rng(0), kind)
    m.spread(2)
    return m


def without(m, layer):
    for name in m.experts(layer):
        m.edit(name)
    return m


@pytest.mark.parametrize("reader", [Checkpoint.open, read_folder], ids=["store", "plan"])
def test_a_layer_without_its_experts_is_refused_by_number_until_they_are_back(tmp_path, reader):
    m = without(mutant(), 1)
    m.more["model-rest.safetensors"] = b""
    m.write(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"routed experts in layer 1 .*model-rest.safetensors.*download"):
        reader(tmp_path / "c")
    mutant().write(tmp_path / "whole")
    reader(tmp_path / "whole")


RULES = {
    "none, but a dense one is there": ({}, True, True),
    "none": ({}, False, False),
    "first_k_dense_replace": ({"first_k_dense_replace": 1}, False, True),
    "first_k_dense_replace 0": ({"first_k_dense_replace": 0}, True, False),
    "num_dense_layers": ({"num_dense_layers": 1}, False, True),
    "mlp_layer_types": ({"mlp_layer_types": ["dense", "sparse"]}, False, True),
    "mlp_layer_types, sparse": ({"mlp_layer_types": ["sparse", "sparse"]}, True, False),
    "moe_layer_freq": ({"moe_layer_freq": [0, 1]}, False, True),
    "moe_layer_freq 1": ({"moe_layer_freq": 1}, True, False),
    "moe_layers_enum": ({"moe_layers_enum": "1"}, False, True),
    "moe_layers_enum, both": ({"moe_layers_enum": "0,1"}, True, False),
    "mlp_only_layers": ({"mlp_only_layers": [0], "decoder_sparse_step": 1}, False, True),
    "decoder_sparse_step": ({"decoder_sparse_step": 2}, False, True),
    "moe_layer_start_index": ({"moe_layer_start_index": 1, "moe_layer_interval": 1}, False, True),
    "the default of glm4_moe": ({"model_type": "glm4_moe"}, False, True),
}


@pytest.mark.parametrize(("keys", "dense", "fine"), RULES.values(), ids=RULES)
def test_which_layers_are_dense_is_read_off_config_json(tmp_path, keys, dense, fine):
    m = without(mutant(), 0)
    del m.values[0], m.config["decoder_sparse_step"], m.config["mlp_only_layers"]
    m.config |= keys
    if dense:
        m.add("model.layers.0.mlp.gate_proj.weight", ("BF16", (1, 1), b"\0\0"))
    m.write(tmp_path / "c")
    if fine:
        build_store(tmp_path / "c", tmp_path / "s", check=E)
        assert same(stored_values(tmp_path / "s"), m)
        return
    with pytest.raises(CheckpointError, match="expected routed experts in layer 0 "):
        Checkpoint.open(tmp_path / "c")


def test_experts_where_config_json_has_a_dense_layer_or_none_are_refused(tmp_path):
    for number, (change, message) in enumerate(
        (
            ({"mlp_only_layers": [1]}, "layer 1 is dense by config.json"),
            ({"num_hidden_layers": 1}, "says 1 layers, but"),
        )
    ):
        m = mutant()
        m.config |= change
        m.write(tmp_path / str(number))
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(tmp_path / str(number))


@pytest.mark.parametrize("layers", [3_000_000_000, 10_000])
def test_more_layers_than_any_model_has_are_refused_at_once(tmp_path, layers):
    m = mutant()
    m.config["num_hidden_layers"] = layers
    m.write(tmp_path / "c")
    with pytest.raises(CheckpointError, match="expected at most 9,999 for num_hidden_layers"):
        Checkpoint.open(tmp_path / "c")


def narrow(m):
    return with_draft(m, experts=E - 1)


def wide(m):
    return with_draft(m, "mtp.layers.{}.mlp.experts", experts=E + 2)


def missing(m):
    m.config["num_nextn_predict_layers"] = 1
    return m


def unindexed(m):
    with_draft(m)
    names = m.experts(2)
    m.more["model-mtp.safetensors"] = safetensors({name: m.tensors[name] for name in names})
    del m.values[2]
    return without(m, 2)


def unlisted(m):
    with_draft(m)
    for name in m.experts(2):
        del m.index[name]
    del m.values[2]
    return m


def other_top_k(m):
    with_draft(m)
    del m.values[2]
    m.config["dspark_num_experts_per_tok"] = 1
    return m


LOST = {
    "narrow": (narrow, "it has 2 experts and the model 3"),
    "wide": (wide, "it has 5 experts and the model 3"),
    "missing": (missing, "config.json announces it, no tensor is there"),
    "unindexed": (unindexed, "may be in model-mtp.safetensors, which the index does not name"),
    "unlisted": (unlisted, r"holds tensors of it, where the index does not place them"),
    "other top-k": (other_top_k, "it uses 1 experts a token and the model 2"),
}


@pytest.mark.parametrize(("change", "reason"), LOST.values(), ids=LOST)
def test_a_drafter_that_does_not_fit_is_left_out_said_and_noted(tmp_path, caplog, change, reason):
    m = change(mutant())
    m.write(tmp_path / "c")
    build_store(tmp_path / "c", tmp_path / "s", check=E)
    assert same(stored_values(tmp_path / "s"), m)
    lines = [record.message for record in caplog.records if "draft layer 2" in record.message]
    assert len(lines) == 1
    assert reason in lines[0]
    assert not verify_store(tmp_path / "s", checkpoint=tmp_path / "c").bad
    with Store.open(tmp_path / "s") as store:
        ((number, said),) = ((entry.number, entry.reason) for entry in store.manifest.left_out)
        assert number == 2
        assert reason in said
        with pytest.raises(StoreError, match=r"no experts of draft layer 2, which was left out .*start without specul"):
            store.layer_index(2)
        with pytest.raises(StoreError, match="left out when it was built"):
            store.require_drafter()
    checkpoint = Checkpoint.open(tmp_path / "c")
    trim_checkpoint(checkpoint, tmp_path / "t")
    trimmed = Checkpoint.open(tmp_path / "t")
    drafts = {name for name in checkpoint.tensors if "layers.2." in name or name.startswith("mtp.")}
    assert drafts <= set(trimmed.tensors)  # what no store has is kept
    assert trimmed.identity() == checkpoint.identity()
    read_folder(tmp_path / "c", 1.0)


def test_a_drafter_that_fits_is_in_the_store(tmp_path):
    for number, template in enumerate(("model.layers.{}.mlp.experts", "mtp.layers.{}.mlp.experts")):
        m = with_draft(mutant("mxfp4"), template, key="mtp_num_hidden_layers")
        m.write(tmp_path / f"c{number}")
        build_store(tmp_path / f"c{number}", tmp_path / f"s{number}", check=E)
        assert same(stored_values(tmp_path / f"s{number}"), m)
        with Store.open(tmp_path / f"s{number}") as store:
            assert store.manifest.left_out == ()
            store.require_drafter()


def test_a_dense_drafter_is_no_loss(tmp_path, caplog):
    m = missing(mutant())
    m.add("model.layers.2.mlp.gate_proj.weight", ("BF16", (1, 1), b"\0\0"))
    m.write(tmp_path / "c")
    assert Checkpoint.open(tmp_path / "c").left_out == ()
    assert "left out" not in caplog.text


def test_two_modules_do_not_share_a_layer(tmp_path):
    m = with_draft(mutant("mxfp4"), "mtp.layers.{}.mlp.experts")
    m.write(tmp_path / "c")
    build_store(tmp_path / "c", tmp_path / "s")
    checkpoint = Checkpoint.open(tmp_path / "c")
    settings = Settings(store=tmp_path / "s", threads=1)
    with Store.open(settings.store) as store, TieredModel(settings, store, E, 8, checkpoint) as model:
        model.claim(0, "language_model.model.layers.0.mlp.experts")
        with pytest.raises(UnsupportedModelError, match=r"one module for layer 0 .*start without --speculative-config"):
            model.claim(0, "model.layers.0.mlp.experts")


@pytest.mark.parametrize(
    ("arguments", "itself"),
    [
        (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'], True),
        (["--speculative-config.method=qwen3_next_mtp"], True),
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'], False),
        (["--speculative-config", '{"method": "mtp", "model": "another"}'], False),
        ([], False),
    ],
)
def test_who_asks_for_the_checkpoints_own_drafter(arguments, itself):
    assert drafts_itself(arguments) is itself


def test_a_store_of_before_that_notes_nothing_opens(tmp_path):
    mutant().write(tmp_path / "c")
    build_store(tmp_path / "c", tmp_path / "s")
    body = json.loads((tmp_path / "s" / "store.json").read_text())
    del body["left_out"], body["seal"]
    from moetier.store.manifest import _digest

    (tmp_path / "s" / "store.json").write_text(json.dumps({**body, "seal": _digest(body)}))
    with Store.open(tmp_path / "s") as store:
        assert store.manifest.left_out == ()


@pytest.mark.parametrize(
    ("config", "layers", "left"),
    [(released.V41_FLASH, 40, 3), (released.GLM4_AIR, 46, 0), (released.QWEN3_NEXT, 48, 0), (released.GPT_OSS, 36, 0)],
    ids=["deepseek-v4.1-flash", "glm-4.5-air", "qwen3-next", "gpt-oss"],
)
def test_released_checkpoints_open(tmp_path, config, layers, left):
    released.write(config, tmp_path / "c", 1 << 33)
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert (len(checkpoint.moe_layers), len(checkpoint.left_out)) == (layers, left)
