"""Mutations of companions, dtypes, scales and config.json: each a function from a random generator to a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.store.mutants import ENCODERS, E, H, J, bf16, fp8, int4, layer_tensors, made, mxfp4, tensor
from tests.store.mutate_files import any_kind, random, scale_of, weight_of, with_draft


# companions ---------------------------------------------------------------------------------------------------------
def activation_scales(rng):
    m = random(rng)
    part = ("input_scale", "activation_scale")[int(rng.integers(2))]
    for name in m.experts():
        if name.endswith((".weight", ".weight_packed")):
            m.add(f"{name.rpartition('.')[0]}.{part}", tensor("F32", np.array(0.01, "<f4")))
    return m


def shapes_or_none(rng):
    return made(rng, "int4", encode=int4(shape=rng.random() < 0.5))


def companion(rng):
    m = random(rng)
    known = {name.rpartition(".")[2] for name in m.experts()}
    parts = [
        "pre_quant_scale",
        "smooth_scale",
        "bias",
        "weight_scale_2",
        "weight_global_scale",
        "weight_zero_point",
        "weight_g_idx",
        "weight_scale",
        "scale",
        "weight_scale_inv",
        "zero_point",
        "rotation",
        "lora_A",
        "weight_scale_3",
        "alpha",
    ]
    part = m.pick([part for part in parts if part not in known])
    names = (
        [weight_of(m)] if rng.random() < 0.5 else [n for n in m.experts() if n.endswith((".weight", ".weight_packed"))]
    )
    for name in names:
        m.add(f"{name.rpartition('.')[0]}.{part}", tensor("F32", np.full(1, 2, "<f4")))
    return m.meaningless()


def wrong_shape_note(rng):
    m = random(rng, "int4")
    name = m.pick([n for n in m.experts() if n.endswith("weight_shape")])
    m.edit(name, value=tensor("I64", np.array([J, H + 8], "<i8")))
    return m.meaningless()


def without_scale(rng):
    m = random(rng, "fp8 block", "mxfp4", "nvfp4", "int4", "fp8 row")
    m.edit(scale_of(m))
    return m


def below_the_experts(rng):
    m = random(rng)
    m.add(
        f"model.layers.1.mlp.experts.{('scale', 'gate_up_proj_bias', 'gate_up_proj')[int(rng.integers(3))]}",
        bf16(np.ones((E, 4)))[0],
    )
    return m.meaningless()


# dtypes -------------------------------------------------------------------------------------------------------------
def other_dtypes(rng):
    encoders = {
        "mxfp4": (mxfp4("U8"), mxfp4("F4"), mxfp4("I8", "U8")),
        "int4": (int4(dtype="F32"),),
        "fp8 block": (fp8((128, 128), dtype="BF16"), fp8((128, 128), "scale", "F8_E8M0")),
    }
    kind = tuple(encoders)[int(rng.integers(3))]
    return made(rng, kind, encode=encoders[kind][int(rng.integers(len(encoders[kind])))])


def formats_by_layer(rng):
    m = random(rng)
    other = any_kind(rng)
    for name in m.experts(1):
        m.edit(name)
    parts, m.values[1] = layer_tensors(rng, ENCODERS[other], "model.layers.1.mlp.experts")
    for name, value in parts.items():
        m.add(name, value)
    return m


def relabelled(rng):
    """Another dtype of the same size, which the format does not have."""
    m = random(rng)
    name = m.pick([n for n in m.experts() if not n.endswith("weight_shape")])
    dtype, shape, raw = m.tensors[name]
    same_size = {
        "F8_E4M3": ("F8_E5M2", "I8", "BOOL"),
        "I8": ("F8_E5M2", "BOOL"),
        "U8": ("F8_E5M2", "BOOL"),
        "BF16": ("I16", "U16"),
        "F16": ("I16", "U16"),
        "F32": ("I32", "U32"),
        "I32": ("F32", "U32"),
        "F8_E8M0": ("F8_E4M3", "I8"),
    }
    m.edit(name, value=(m.pick(list(same_size[dtype])), shape, raw))
    return m


def wider(rng):
    m = random(rng)
    name = m.pick([n for n in m.experts() if not n.endswith("weight_shape")])
    _, shape, raw = m.tensors[name]
    m.edit(name, value=("F64", shape, raw[:1] * 8 * int(np.prod(shape, dtype=int))))
    return m


# scales -------------------------------------------------------------------------------------------------------------
def blocks(rng):
    block = ((32, 32), (64, 16), (1, 32), (16, 64), (128, 128))[int(rng.integers(5))]
    m = made(rng, "fp8 block", encode=fp8(block))
    m.config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    return m


def groups(rng):
    group = (16, 32, 0)[int(rng.integers(3))]
    m = made(rng, "int4", encode=int4(group))
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "group_size": group or None,
        "strategy": "group" if group else "channel",
    }
    m.config["quantization_config"] = compressed(weights)
    return m


def compressed(weights, **more) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
        **more,
    }


def other_block(rng):
    m = made(rng, "fp8 block", encode=fp8((32, 32)))
    said = ([64, 64], [16, 32], None, [0, 32], [32], "32", [32.0, 32.0])[int(rng.integers(7))]
    m.config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": said}
    return m


def other_group(rng):
    m = made(rng, "int4", encode=int4(16))
    strategy = ("group", "channel", "tensor")[int(rng.integers(3))]
    m.config["quantization_config"] = compressed({"num_bits": 4, "type": "int", "strategy": strategy, "group_size": 32})
    return m.meaningless()


def not_a_number(rng):
    m = random(rng, "mxfp4", "fp8 block", "fp8 row", "fp8 tensor", "nvfp4")
    name = scale_of(m)
    dtype, shape, raw = m.tensors[name]
    bad = {"F8_E8M0": b"\xff", "F32": b"\0\0\xc0\x7f", "F8_E4M3": b"\x7f"}[dtype]
    m.edit(name, value=(dtype, shape, bad + raw[len(bad) :]))
    return m


def turned(rng):
    m = random(rng, "mxfp4", "nvfp4", "int4", "fp8 row")
    name = m.pick([n for n in m.experts() if "scale" in n and len(m.tensors[n][1]) == 2])
    dtype, shape, raw = m.tensors[name]
    m.edit(name, value=(dtype, shape[::-1], raw))
    return m


def cut(rng):
    m = random(rng, "mxfp4", "nvfp4", "int4")
    name = m.pick([n for n in m.experts() if "scale" in n and len(m.tensors[n][1]) == 2])
    dtype, (n, k), raw = m.tensors[name]
    m.edit(name, value=(dtype, (n - 1, k), raw[: len(raw) * (n - 1) // n]))
    return m


# config -------------------------------------------------------------------------------------------------------------
def nested(rng):
    m = random(rng)
    m.config = {"model_type": "outer", ("text_config", "llm_config")[int(rng.integers(2))]: m.config}
    return m


def aliases(rng):
    m = random(rng)
    m.config["n_routed_experts"] = m.config.pop("num_experts")
    m.config["moe_topk"] = m.config.pop("num_experts_per_tok")
    m.config |= {"rope_theta": 1e4, "unknown": [1, None], "vision_config": {"hidden_size": 3}}
    return m


def first_dense(rng):
    m = random(rng)
    for name in m.experts(0):
        m.edit(name)
    del m.values[0]
    key = int(rng.integers(5))
    m.config.pop("decoder_sparse_step"), m.config.pop("mlp_only_layers")
    m.config |= (
        {"first_k_dense_replace": 1},
        {"mlp_layer_types": ["dense", "sparse"]},
        {"mlp_only_layers": [0]},
        {"moe_layer_freq": [0, 1]},
        {},
    )[key]
    if key == 4:
        m.add("model.layers.0.mlp.gate_proj.weight", bf16(np.ones((4, H)))[0])
    return m


def left_out(rng):
    m = random(rng)
    if rng.random() < 0.5:
        m.config["num_nextn_predict_layers"] = 1
        return m
    return with_draft(m, experts=(E - 1, E + 2)[int(rng.integers(2))])


def said_right(rng):
    said = {
        "fp8 block": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        "mxfp4": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        "fp8 tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
        "bf16": {"quant_method": "fp8", "modules_to_not_convert": ["mlp.experts"]},
        "int4": compressed({"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}, transform_config={}),
        "fp8 row": {**compressed({"num_bits": 8, "type": "float", "strategy": "channel"}), "format": "float-quantized"},
    }
    kind = tuple(said)[int(rng.integers(len(said)))]
    m = made(rng, kind)
    m.config["quantization_config"] = said[kind]
    return m


def wrong_size(rng):
    m = random(rng)
    key = ("hidden_size", "moe_intermediate_size", "num_experts", "num_hidden_layers", "num_experts_per_tok")[
        int(rng.integers(5))
    ]
    values = (m.config[key] + 1, m.config[key] * 2, m.config[key] - 1, 0, -1, "2", 2.5, None, 3_000_000_000, True)
    m.config[key] = values[int(rng.integers(len(values)))]
    if key == "num_experts_per_tok" and m.config[key] in (1, 3) and m.config[key] is not True:
        m.config[key] = E + 1
    return m


def wrong_layers(rng):
    m = random(rng)
    m.config |= (
        {"mlp_only_layers": [1]},
        {"decoder_sparse_step": 2},
        {"first_k_dense_replace": 1},
        {"mlp_layer_types": ["dense", "sparse"]},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
    )[int(rng.integers(6))]
    return m.meaningless()


def inputs_changed(rng):
    m = random(rng, "int4", "nvfp4", "fp8 tensor", "mxfp4")
    apply = [{"targets": ["re:.*down_proj$"], "location": "input"}]
    said = (
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {
            "quant_method": "compressed-tensors",
            "transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}},
        },
        {"quant_method": "quarot"},
        {"quant_method": "x", "rotation": {"online": True}},
        {"quant_method": "smoothquant"},
        {"quant_method": "x", "smoothquant": True},
    )
    m.config["quantization_config"] = said[int(rng.integers(len(said)))]
    return m.meaningless()


def said_wrong(rng):
    kind = any_kind(rng)
    m = made(rng, kind)
    others = {"fp8": "fp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
    own = next((name for start, name in others.items() if kind.startswith(start)), None)
    said = [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "mxfp4"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        compressed({"num_bits": 8, "type": "int", "strategy": "channel"}),
        compressed({"num_bits": 4, "type": "int", "symmetric": False, "group_size": 32}),
    ]
    wrong = [
        s for s, names in zip(said, (("fp8", "mxfp4"), ("mxfp4",), ("nvfp4",), (), ()), strict=True) if own not in names
    ]
    m.config["quantization_config"] = wrong[int(rng.integers(len(wrong)))]
    return m.meaningless()
