"""Neighbours of a weight: read, harmless, or refused by name; and what config.json says against what tensors are."""

import numpy as np
import pytest

from moetier.errors import CheckpointError, MoetierError, UnsupportedModelError
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from tests.store.mutants import ENCODERS, E, H, J, fp8, int4, made, same, stored_values, tensor
from tests.store.mutate_weights import compressed

KINDS = list(ENCODERS)
WEIGHT = "model.layers.1.mlp.experts.2.up_proj"
TWO = tensor("F32", np.full(1, 2, "<f4"))


def mutant(kind, **more):
    return made(np.random.default_rng(0), kind, **more)


def accepted(folder, m):
    m.write(folder / "c")
    build_store(folder / "c", folder / "s", check=E)
    assert same(stored_values(folder / "s"), m)


def refused(folder, m, message):
    m.write(folder / "c")
    with pytest.raises(MoetierError, match=message):
        Checkpoint.open(folder / "c")


@pytest.mark.parametrize(
    "part", ["pre_quant_scale", "bias", "weight_g_idx", "weight_zero_point", "weight_global_scale", "x"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_companion_that_nobody_reads_is_refused_until_it_is_gone(tmp_path, kind, part):
    m = mutant(kind)
    m.add(f"{WEIGHT}.{part}", TWO)
    m.write(tmp_path / "with")
    with pytest.raises(UnsupportedModelError, match=rf"{WEIGHT}.{part} in .*expected only .*found this: .*; \w+"):
        Checkpoint.open(tmp_path / "with")
    m.edit(f"{WEIGHT}.{part}")
    m.write(tmp_path / "without")
    Checkpoint.open(tmp_path / "without")


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_scale_is_refused(tmp_path, kind):
    m = mutant(kind)
    known = {name.rpartition(".")[2] for name in m.experts()}
    for number, part in enumerate(
        p for p in ("scale", "weight_scale", "weight_scale_inv", "weight_scale_2") if p not in known
    ):
        if (kind, part) == ("mxfp4", "weight_scale_2") or not kind.startswith("mxfp4"):
            m.add(f"{WEIGHT}.{part}", TWO)
            refused(tmp_path / str(number), m, "a second scale of the weight")
            m.edit(f"{WEIGHT}.{part}")


@pytest.mark.parametrize("part", ["input_scale", "activation_scale"])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_activations_are_harmless(tmp_path, kind, part):
    m = mutant(kind)
    for name in m.experts():
        if name.endswith((".weight", ".weight_packed")):
            m.add(f"{name.rpartition('.')[0]}.{part}", TWO)
    m.add("model.layers.0.self_attn.k_proj.k_scale", TWO)
    accepted(tmp_path, m)


def test_a_shape_note_that_is_wrong_is_refused_when_it_is_read(tmp_path):
    m = mutant("int4")
    m.edit(f"{WEIGHT}.weight_shape", value=tensor("I64", np.array([J, H + 8], "<i8")))
    m.write(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"weight_shape in .*expected \[32, 64\].*found \[32, 72\]"):
        build_store(tmp_path / "c", tmp_path / "s")


ONLINE = {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": "input"}]}
MERGED = {"type": "hadamard", "apply": [{"targets": ["re:.*(gate|up)_proj$"], "location": "weight_input"}]}
ATTENTION = {"type": "hadamard", "apply": [{"targets": ["re:.*self_attn$"], "location": "k_cache"}]}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
FP8_ROW = {"num_bits": 8, "type": "float", "strategy": "channel"}


def transformed(**groups):
    return compressed(INT4, transform_config={"config_groups": groups})


SAID = {
    "a rotation when it runs": ("int4", transformed(R4=ONLINE), "transform_config .R4"),
    "a rotation that is in the weights": ("int4", transformed(R1=MERGED), ""),
    "a rotation of attention": ("int4", transformed(R3=ATTENTION), ""),
    "awq": ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ'"),
    "spinquant": ("int4", {"quant_method": "spinquant"}, "spinquant"),
    "smoothquant": ("fp8 tensor", {"quant_method": "x", "smoothquant_alpha": 0.5}, "smoothquant_alpha"),
    "groups": ("int4", compressed(INT4), ""),
    "other groups": ("int4", compressed({**INT4, "group_size": 128}), "scale for 1 x 128 .* found one for 1 x 32"),
    "rows": ("int4", compressed({**INT4, "strategy": "channel", "group_size": None}), "expected a scale for 1 x"),
    "asymmetric": ("int4", compressed({**INT4, "symmetric": False}), "asymmetric"),
    "reordered": ("int4", compressed({**INT4, "actorder": "group"}), "columns in another order"),
    "reordered before": ("int4", compressed({**INT4, "actorder": "static"}), ""),
    "other bits": ("int4", compressed({**INT4, "num_bits": 8}), "int of 8 bits experts by config.json"),
    "other format": ("bf16", compressed(INT4), "expected int4 experts by config.json"),
    "other format, left unquantized": ("bf16", {**compressed(INT4), "ignore": ["re:.*mlp.experts.*"]}, ""),
    "fp8 rows": ("fp8 row", {**compressed(FP8_ROW), "format": "float-quantized"}, ""),
    "fp8 matrices": ("fp8 tensor", {**compressed(FP8_ROW), "format": "float-quantized"}, "expected a scale for 1 x"),
    "deepseek v4": ("mxfp4", {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}, ""),
    "modelopt": ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, ""),
    "modelopt of another format": ("nvfp4", {"quant_method": "modelopt", "quant_algo": "FP8"}, "expected fp8 experts"),
    "mixed": ("nvfp4", {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, ""),
    "unquantized": ("bf16", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "expected fp8 or mxfp4 experts"),
    "other dtype": ("mxfp4", {"quant_method": "x", "expert_dtype": "fp8"}, "expert_dtype 'fp8'"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "said", "message"), SAID.values(), ids=SAID)
def test_what_config_json_says_of_the_experts_must_be_so(tmp_path, kind, said, message):
    m = mutant(kind)
    m.config["quantization_config"] = said
    if message:
        refused(tmp_path, m, message)
    else:
        accepted(tmp_path, m)


def test_blocks_of_compressed_tensors_are_read(tmp_path):
    m = mutant("fp8 block", encode=fp8((32, 32), "weight_scale"))
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]}
    m.config["quantization_config"] = {**compressed(weights), "format": "float-quantized"}
    accepted(tmp_path, m)


def test_what_a_nested_config_says_counts_too(tmp_path):
    m = mutant("int4", encode=int4(16))
    m.config = {"text_config": {**m.config, "quantization_config": compressed(INT4)}, "model_type": "outer"}
    refused(tmp_path, m, "expected a scale for 1 x 32 .* found one for 1 x 16")
