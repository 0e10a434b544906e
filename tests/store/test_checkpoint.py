"""Opening a checkpoint: what is found, and one clear error for each thing that is wrong."""

import json
import re

import numpy as np
import pytest

from moetier.checkpoint.json_files import QUANTIZATION
from moetier.contract import Family, LayerGeometry
from moetier.errors import CheckpointError, MoetierError
from moetier.store.check import first_difference
from moetier.store.checkpoint import Checkpoint, MoeLayer, is_expert_tensor
from tests.store.checkpoints import write_checkpoint, write_safetensors
from tests.store.older import overwrite


def rewrite(path, change):
    """Change config.json by a dict."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))


def test_nano_is_read_whole(nano):
    checkpoint = Checkpoint.open(nano)
    assert checkpoint.geometry == LayerGeometry(hidden=256, intermediate=64, experts=32, top_k=4)
    assert checkpoint.moe_layers == tuple(MoeLayer(n, f"model.layers.{n}.mlp.experts") for n in range(1, 6))
    assert checkpoint.family == Family()
    assert (checkpoint.source_format, checkpoint.requantized, checkpoint.model_type) == ("mxfp4", False, "glm4_moe")


@pytest.mark.parametrize("naming", ["hf", "deepseek_v4"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("sizes", [(64, 32), (96, 160)], ids=["h64-i32", "h96-i160"])
def test_every_expert_is_what_was_written(tmp_path, naming, shards, sizes):
    made = write_checkpoint(
        tmp_path / "c", naming=naming, shards=shards, hidden=sizes[0], intermediate=sizes[1], layers=(0, 3)
    )
    checkpoint = Checkpoint.open(made.path)
    assert [layer.number for layer in checkpoint.moe_layers] == [0, 3]
    for (number, expert), wanted in made.experts.items():
        assert first_difference(checkpoint.read_expert(made.layers.index(number), expert), wanted) is None


def test_deepseek_v4_family_comes_from_the_config(tmp_path):
    overrides = {"model_type": "deepseek_v4", "swiglu_limit": 10}
    made = write_checkpoint(tmp_path, naming="deepseek_v4", config_overrides=overrides)
    assert Checkpoint.open(made.path).family == Family(swiglu_limit=10.0, route_weight_before_down=True)


def test_the_language_model_of_a_multimodal_config_is_found(tmp_path):
    made = write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "outer", "text_config": config}))
    checkpoint = Checkpoint.open(made.path)
    assert (checkpoint.model_type, checkpoint.geometry.experts) == ("glm4_moe", 4)


def test_one_file_without_an_index_opens(tmp_path):
    made = write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-00001-of-00001.safetensors").rename(tmp_path / "model.safetensors")
    assert len(Checkpoint.open(made.path).moe_layers) == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.experts.12.gate_proj.weight", True),
        ("model.layers.3.mlp.experts.12.gate_proj.scale", True),
        ("layers.40.ffn.experts.383.w2.scale", True),
        ("mtp.0.ffn.experts.5.w1.weight", True),
        ("model.layers.3.mlp.experts.gate_up_proj", True),
        ("model.layers.3.mlp.experts.gate_up_proj_blocks", True),
        ("model.layers.3.mlp.shared_experts.gate_proj.weight", False),
        ("model.layers.3.mlp.shared_expert.gate_proj.weight", False),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.3.mlp.gate.e_score_correction_bias", False),
        ("model.layers.0.mlp.gate_proj.weight", False),
        ("layers.3.ffn.shared_experts.w1.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_routed_expert_names(name, expected):
    assert is_expert_tensor(name) is expected


def test_expert_names_of_nano_are_exactly_those_the_store_holds(nano):
    checkpoint = Checkpoint.open(nano)
    names = [name for name in checkpoint.tensors if is_expert_tensor(name)]
    assert len(names) == 5 * 32 * 6
    assert not [name for name in checkpoint.tensors if ".experts." in name and name not in set(names)]


def test_identity_changes_with_every_part_and_with_all_content_when_deep(tmp_path):
    made = write_checkpoint(tmp_path / "a")
    first = Checkpoint.open(made.path)
    seen = {first.identity()}
    deep = first.identity(deep=True)

    overwrite(made.path, "model.layers.1.mlp.experts.0.up_proj.weight", 400, b"\x7e")  # between two samples
    assert Checkpoint.open(made.path).identity() in seen
    assert Checkpoint.open(made.path).identity(deep=True) != deep

    rewrite(made.path, {"rope_theta": 1.0})
    seen.add(Checkpoint.open(made.path).identity())
    index = made.path / "model.safetensors.index.json"
    index.write_text(index.read_text() + " ")
    seen.add(Checkpoint.open(made.path).identity())
    seen.add(Checkpoint.open(write_checkpoint(tmp_path / "b", shards=2).path).identity())
    assert len(seen) == 4


def remove_tensor(path, name):
    """Take one tensor out of a checkpoint of one shard."""
    from moetier.checkpoint.shards import read_shard

    file = path / "model-00001-of-00001.safetensors"
    raw = file.read_bytes()
    tensors = {
        t.name: (t.dtype, t.shape, np.frombuffer(raw, np.uint8, t.nbytes, t.offset))
        for t in read_shard(file).tensors.values()
        if t.name != name
    }
    write_safetensors(file, tensors)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][name]
    index.write_text(json.dumps(content))


def truncate(path):
    file = path / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def bad_scale(path):
    """Set a scale of layer 2, expert 3 to the byte of NaN."""
    checkpoint = Checkpoint.open(path)
    tensor = checkpoint.tensors["model.layers.2.mlp.experts.3.up_proj.scale"]
    raw = bytearray(tensor.file.read_bytes())
    raw[tensor.offset + 5] = 255
    tensor.file.write_bytes(raw)


DAMAGES = {
    "truncated shard": (truncate, "model-00001-of-00001.safetensors: expected .* bytes by its header, found"),
    "missing shard": (lambda p: (p / "model-00001-of-00001.safetensors").unlink(), "shard .* is missing"),
    "missing expert": (
        lambda p: remove_tensor(p, "model.layers.2.mlp.experts.3.down_proj.weight"),
        "tensor model.layers.2.mlp.experts.3.down_proj.weight is missing",
    ),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json cannot be read"),
    "config is no JSON": (lambda p: (p / "config.json").write_text("{"), "config.json: expected JSON"),
    "config with a key twice": (
        lambda p: (p / "config.json").write_text('{"a": 1, "a": 2}'),
        "key 'a' twice",
    ),
    "other hidden size": (lambda p: rewrite(p, {"hidden_size": 128}), "expected experts of hidden size 128"),
    "other intermediate size": (lambda p: rewrite(p, {"moe_intermediate_size": 64}), "intermediate size 64"),
    "too many experts in the config": (lambda p: rewrite(p, {"n_routed_experts": 5}), "experts.4.* is missing"),
    "too few experts in the config": (lambda p: rewrite(p, {"n_routed_experts": 3}), "says 3 experts, but there is"),
    "no top-k": (lambda p: rewrite(p, {"num_experts_per_tok": None}), "expected one of num_experts_per_tok"),
    "top-k over experts": (lambda p: rewrite(p, {"num_experts_per_tok": 9}), "top-k 9 is larger"),
    "top-k of another type": (lambda p: rewrite(p, {"num_experts_per_tok": "2"}), "positive integer"),
    "two numbers of experts": (lambda p: rewrite(p, {"num_experts": 3}), "which mean the same"),
    "two top-k": (lambda p: rewrite(p, {"moe_topk": 1}), "which mean the same"),
    "quantization that is no object": (lambda p: rewrite(p, {"quantization_config": "fp8"}), "expected an object"),
    "a packing that no source reads": (
        lambda p: rewrite(p, {"quantization_config": {"quant_method": "awq"}}),
        "experts by config.json",
    ),
    "hf_quant_config.json of another format": (
        lambda p: (p / QUANTIZATION).write_text('{"quantization": {"quant_algo": "FP8"}}'),
        "fp8 experts by config.json",
    ),
    "hf_quant_config.json that is no JSON": (lambda p: (p / QUANTIZATION).write_text("{"), "expected JSON"),
    "layers of another type": (
        lambda p: rewrite(p, {"mlp_layer_types": None, "first_k_dense_replace": "2"}),
        "expected an integer for",
    ),
    "swiglu limit of another type": (lambda p: rewrite(p, {"swiglu_limit": "7"}), "positive number for swiglu_limit"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_wrong_is_said(tmp_path, damage, message):
    made = write_checkpoint(tmp_path / "c")
    damage(made.path)
    with pytest.raises(MoetierError, match=message):
        Checkpoint.open(made.path)


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("U8", (32, 16), r"expected shape \[32, 32\], found \[32, 16\]"),
        ("BF16", (32, 32), "expected dtype I8 or U8 or F4 .mxfp4 experts., found BF16"),
    ],
    ids=["shape", "dtype"],
)
def test_a_tensor_of_another_kind_is_named(tmp_path, dtype, shape, message):
    made = write_checkpoint(tmp_path / "c")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    remove_tensor(made.path, name)
    size = int(np.prod(shape)) * (2 if dtype == "BF16" else 1)
    write_safetensors(made.path / "extra.safetensors", {name: (dtype, shape, np.zeros(size, np.uint8))})
    index = made.path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][name] = "extra.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"tensor {re.escape(name)} in .*extra.safetensors: {message}"):
        Checkpoint.open(made.path)


def test_a_scale_of_nan_is_refused_with_its_place(tmp_path):
    made = write_checkpoint(tmp_path / "c")
    bad_scale(made.path)
    checkpoint = Checkpoint.open(made.path)
    with pytest.raises(CheckpointError, match=r"layers.2.*experts.3.up_proj.scale in .*255 \(NaN\) at \[2, 1\]"):
        checkpoint.read_expert(1, 3)


def test_a_model_without_experts_is_refused(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"lm_head.weight": ("U8", (4,), np.zeros(4, np.uint8))})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"dense model \(model type llama\).*has no routed experts"):
        Checkpoint.open(tmp_path)


def test_nothing_or_a_file_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="found nothing"):
        Checkpoint.open(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="found a file"):
        Checkpoint.open(tmp_path / "file")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"expected a checkpoint \(\*.safetensors\), found none"):
        Checkpoint.open(tmp_path)


def test_a_shard_that_shrinks_after_opening_is_noticed(tmp_path):
    made = write_checkpoint(tmp_path / "c")
    checkpoint = Checkpoint.open(made.path)
    file = made.path / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="truncated"):
        checkpoint.read_expert(1, 3)


def test_gguf_is_refused_with_what_to_give_instead(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for given in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(CheckpointError, match=r"give the folder that holds config\.json .*GGUF is not read"):
            Checkpoint.open(given)
