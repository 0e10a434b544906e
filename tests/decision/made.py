"""Small checkpoints that provoke one row of the table each; headers and sizes are true, values mean nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moetier.checkpoint.shards import DTYPE_BITS
from tests.store.checkpoints import Tensors, write_safetensors

HIDDEN, INNER, EXPERTS, TOP_K, LAYERS = 64, 32, 4, 2, 2
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
KNOWN = "model.layers.{layer}.mlp.experts"

Parts = dict[str, Callable[[int, int], tuple[str, tuple[int, ...]]]]
"""What follows a matrix's name -> dtype and shape of it, from rows and columns of the matrix."""


def zeros(dtype: str, *shape: int) -> tuple[str, tuple[int, ...], np.ndarray]:
    return dtype, shape, np.zeros(int(np.prod(shape)) * DTYPE_BITS[dtype] // 8, np.uint8)


def config(**overrides: Any) -> dict[str, Any]:
    """A Qwen3-MoE's config.json; an override of None removes the key."""
    whole = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": INNER, "intermediate_size": 2 * INNER, "vocab_size": 128, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "hidden_act": "silu", "max_position_embeddings": 256,
        **overrides,
    }  # fmt: skip
    return {key: value for key, value in whole.items() if value is not None}


def floats(template: str = KNOWN, names: tuple[str, ...] = PROJECTIONS, layers: int = LAYERS) -> Tensors:
    """BF16 experts of their own tensors under any name."""
    return of_parts({"weight": lambda n, k: ("BF16", (n, k))}, template, names, layers)


def of_parts(
    parts: Parts, template: str = KNOWN, names: tuple[str, ...] = PROJECTIONS, layers: int = LAYERS
) -> Tensors:
    found: Tensors = {}
    for layer in range(layers):
        for expert in range(EXPERTS):
            for at, name in enumerate(names):
                rows, columns = (HIDDEN, INNER) if at == len(names) - 1 else (INNER, HIDDEN)
                for part, shape in parts.items():
                    dtype, size = shape(rows, columns)
                    found[f"{template.format(layer=layer)}.{expert}.{name}.{part}"] = zeros(dtype, *size)
    return found


def fused(template: str, part: str, dtype: str, *shape: int) -> Tensors:
    return {f"{template.format(layer=layer)}.{part}": zeros(dtype, *shape) for layer in range(LAYERS)}


def write(folder: Path, tensors: Tensors, **overrides: Any) -> Path:
    """Write config.json and one file, with a few tensors that are no expert's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(**overrides)))
    dense = {"model.embed_tokens.weight": zeros("BF16", 128, HIDDEN), "model.norm.weight": zeros("BF16", HIDDEN)}
    write_safetensors(folder / "model.safetensors", {**dense, **tensors})
    return folder


def _bits4(n: int, k: int) -> tuple[str, tuple[int, ...]]:
    return "U8", (n, k // 2)


def _words(n: int, k: int) -> tuple[str, tuple[int, ...]]:
    return "I32", (n, k // 8)


def _group(size: int, dtype: str) -> Callable[[int, int], tuple[str, tuple[int, ...]]]:
    return lambda n, k: (dtype, (n, k // size))


def _fp8(dtype: str = "F8_E4M3") -> Callable[[int, int], tuple[str, tuple[int, ...]]]:
    return lambda n, k: (dtype, (n, k))


def _one(dtype: str, *shape: int) -> Callable[[int, int], tuple[str, tuple[int, ...]]]:
    return lambda n, k: (dtype, shape)


UNREAD: dict[str, tuple[Parts, dict[str, Any]]] = {
    "bitsandbytes": ({"weight": _bits4, "weight.absmax": _one("F32", 4)}, {"quant_method": "bitsandbytes"}),
    "auto-round": ({"qweight": _words, "qzeros": _words, "scales": _group(32, "F16")}, {"quant_method": "auto-round"}),
    "gptq": (
        {"qweight": _words, "qzeros": _words, "scales": _group(32, "F16"), "g_idx": lambda n, k: ("I32", (k,))},
        {"quant_method": "gptq"},
    ),
    "awq": ({"qweight": _words, "qzeros": _words, "scales": _group(32, "F16")}, {"quant_method": "awq"}),
    "qweight": ({"qweight": _words, "scales": _group(32, "F16")}, {}),
    "exl": ({"trellis": lambda n, k: ("I16", (n, k)), "suh": _one("F16", 8)}, {"quant_method": "exl3"}),
    "hqq": ({"W_q": _bits4, "scale": _group(32, "F16")}, {"quant_method": "hqq"}),
    "mlx": (
        {"weight": lambda n, k: ("U32", (n, k // 8)), "scales": _group(32, "BF16"), "biases": _group(32, "BF16")},
        {"bits": 4},
    ),
    "nvfp4-compressed-tensors": (
        {"weight_packed": _bits4, "weight_scale": _group(16, "F8_E4M3"), "weight_global_scale": _one("F32", 1)},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ),
    "mxfp4-compressed-tensors": (
        {"weight_packed": _bits4, "weight_scale": _group(32, "U8")},
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    ),
    "mxfp4-weight-scale": ({"weight": _bits4, "weight_scale": _group(32, "U8")}, {"quant_method": "quark"}),
    "mxfp8": ({"weight": _fp8(), "weight_scale": _group(32, "U8")}, {"quant_method": "modelopt"}),
    "fp8-unscaled": ({"weight": _fp8()}, {}),
    "fp8-other": ({"weight": _fp8("F8_E5M2"), "weight_scale": _one("F32")}, {"quant_method": "fp8"}),
    "int4-asymmetric": (
        {"weight_packed": _words, "weight_scale": _group(32, "BF16"), "weight_zero_point": _words},
        {"quant_method": "compressed-tensors"},
    ),
    "int4-act-order": (
        {"weight_packed": _words, "weight_scale": _group(32, "BF16"), "weight_g_idx": lambda n, k: ("I32", (k,))},
        {"quant_method": "compressed-tensors"},
    ),
    "int-packed": (
        {"weight_packed": lambda n, k: ("I32", (n, k // 4)), "weight_scale": _one("BF16", 1)},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
    ),
    "int8": ({"weight": lambda n, k: ("I8", (n, k)), "weight_scale": _one("BF16", 1)}, {}),
    "unknown": ({"weight": lambda n, k: ("I16", (n, k))}, {}),
}
"""Kinds with tensors of their own for each expert that are not read: parts, and config.json's quantization."""

FUSED_UNREAD: dict[str, Tensors] = {
    "fp8-fused": {
        **fused(KNOWN, "gate_up_proj", "F8_E4M3", EXPERTS, HIDDEN, 2 * INNER),
        **fused(KNOWN, "down_proj", "F8_E4M3", EXPERTS, INNER, HIDDEN),
    },
    "separate-fused": {
        name: tensor
        for part in PROJECTIONS
        for name, tensor in fused(KNOWN, f"{part}.weight", "BF16", EXPERTS, HIDDEN, HIDDEN).items()
    },
    "packed-fused": {
        **fused(KNOWN, "gate_up_proj", "U8", EXPERTS, HIDDEN, INNER),
        **fused(KNOWN, "down_proj", "U8", EXPERTS, INNER, HIDDEN),
    },
}
"""Kinds with one tensor for all experts that are not read."""

READ: dict[str, tuple[str, Parts, dict[str, Any]]] = {
    "mxfp4": ("mxfp4", {"weight": lambda n, k: ("I8", (n, k // 2)), "scale": _group(32, "F8_E8M0")}, {}),
    "nvfp4": (
        "nvfp4",
        {"weight": _bits4, "weight_scale": _group(16, "F8_E4M3"), "weight_scale_2": _one("F32")},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "fp8": ("fp8", {"weight": _fp8(), "weight_scale_inv": _one("F32", 1, 1)}, {"weight_block_size": [128, 128]}),
    "int4": (
        "int4",
        {"weight_packed": _words, "weight_scale": _group(32, "BF16")},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ),
    "float": ("bf16", {"weight": lambda n, k: ("BF16", (n, k))}, {}),
}
"""Kinds that are read: their name in store.json, parts, and config.json's quantization."""


def _gpt_oss(folder: Path) -> Path:
    blocks = {
        **fused(KNOWN, "gate_up_proj_blocks", "U8", EXPERTS, 2 * INNER, HIDDEN // 32, 16),
        **fused(KNOWN, "gate_up_proj_scales", "U8", EXPERTS, 2 * INNER, HIDDEN // 32),
        **fused(KNOWN, "gate_up_proj_bias", "BF16", EXPERTS, 2 * INNER),
        **fused(KNOWN, "down_proj_blocks", "U8", EXPERTS, HIDDEN, INNER // 32, 16),
        **fused(KNOWN, "down_proj_scales", "U8", EXPERTS, HIDDEN, INNER // 32),
        **fused(KNOWN, "down_proj_bias", "BF16", EXPERTS, HIDDEN),
    }
    return write(folder, blocks, architectures=["GptOssForCausalLM"], model_type="gpt_oss")


def _tokenizer_code(folder: Path) -> Path:
    write(folder, floats(), model_type="x_moe", architectures=["Qwen3MoeForCausalLM"])
    told = {"tokenizer_class": "XTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def _drafter(folder: Path) -> Path:
    more = {f"model.layers.{LAYERS}.mlp.experts.{EXPERTS + 1}.{name}.weight": ("BF16", 1) for name in PROJECTIONS}
    extra = {name: zeros("BF16", INNER, HIDDEN) for name in more}
    one = {k.replace("layers.0.", f"layers.{LAYERS}."): v for k, v in floats(layers=1).items()}
    return write(folder, {**floats(), **one, **extra}, num_nextn_predict_layers=1)


ROWS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "dense": (
        lambda f: write(
            f, {"model.layers.0.mlp.gate_proj.weight": zeros("BF16", INNER, HIDDEN)},
            model_type="llama", architectures=["LlamaForCausalLM"], num_experts=None, num_experts_per_tok=None,
            moe_intermediate_size=None,
        ),
        "is a dense model",
    ),
    "names": (lambda f: write(f, floats("model.layers.{layer}.moe.experts")), "does not know yet: .*moe.experts.0"),
    "more-names": (
        lambda f: write(f, {**floats(layers=1), **floats("model.layers.1.moe.experts", layers=1)}),
        "and others under names",
    ),
    "keys": (lambda f: write(f, floats(), num_experts=None), "of a family whose config.json moetier does not know"),
    "kind": (
        lambda f: write(f, of_parts(UNREAD["awq"][0]), quantization_config=UNREAD["awq"][1]),
        "format that moetier does not read: AWQ",
    ),
    "sizes": (lambda f: write(f, floats(), num_experts_per_tok=EXPERTS + 1), "top-k 5 is larger"),
    "biases": (_gpt_oss, "experts with biases"),
    "activation": (lambda f: write(f, floats(), hidden_act="gelu_pytorch_tanh"), "activation gelu_pytorch_tanh"),
    "alpha": (lambda f: write(f, floats(), swiglu_alpha=1.702), "swiglu_alpha 1.702"),
    "unknown-keys": (
        lambda f: write(f, floats(), moe_gate_limit=7.0),
        r"says moe_gate_limit 7.0 in config.json, where moetier does not know what it does",
    ),
    "clamp": (
        lambda f: write(
            f, floats(), model_type="exaone_moe", architectures=["ExaoneMoeForCausalLM"], swiglu_limits=[0, 7.0]
        ),
        r"clamp differs by layer \(swiglu_limits: none, 7\)",
    ),
    "on-input": (
        lambda f: write(f, floats(), moe_apply_router_weight_on_input=True),
        "multiplies the router's weight into the experts' input",
    ),
    "zero": (lambda f: write(f, floats(), zero_expert_num=4), "4 zero-computation experts"),
    "latent": (lambda f: write(f, floats(), moe_latent_size=32), "latent experts, 32 wide in a model 64 wide"),
    "router-scale": (
        lambda f: write(f, {**floats(), "model.layers.0.router.per_expert_scale": zeros("BF16", EXPERTS)}),
        "scales each expert in its router",
    ),
    "architecture": (
        lambda f: write(f, floats(), model_type="x_moe", architectures=["XForCausalLM"]),
        "does not know: XForCausalLM",
    ),
    "support": (
        lambda f: write(f, floats(), model_type="glm_moe_dsa", architectures=["GlmMoeDsaForCausalLM"]),
        "is known to fail here: glm_moe_dsa",
    ),
    "config-code": (
        lambda f: write(
            f, floats(), model_type="x_moe", architectures=["Qwen3MoeForCausalLM"],
            auto_map={"AutoConfig": "configuration_x.XConfig"},
        ),
        r"brings Python code .* \(auto_map in config.json: configuration_x",
    ),
    "tokenizer-code": (_tokenizer_code, r"brings Python code .* \(auto_map in tokenizer_config.json: tokenization_x"),
    "drafter": (_drafter, r"brings a drafter .* 6 experts"),
}  # fmt: skip
"""Row of the table -> a checkpoint that provokes it, and what is said."""
