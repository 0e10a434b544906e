"""Small random-weight models of other families: MXFP4 experts for us, the same weights dequantized for stock vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moetier.contract import E2M1_VALUES, Matrix, e8m0_to_float, unpack_codes
from tests.store.checkpoints import Tensors, random_matrix, write_shards

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS, VOCABULARY = 128, 64, 16, 4, 3, 512

COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "head_dim": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v3": {
        **COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
    },
}
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "lm_head", "shared_experts"]}


def write_models(folder: Path, family: str) -> tuple[Path, Path]:
    """(MXFP4 checkpoint, the same in bf16) of a random model."""
    generator = np.random.default_rng(7)
    config = CONFIGS[family]
    dense = _dense_tensors(config, generator)
    packed, plain = dict(dense), dict(dense)
    for layer in range(config.get("first_k_dense_replace", 0), LAYERS):
        for expert in range(EXPERTS):
            for name, (rows, k) in {
                "gate_proj": (INTERMEDIATE, HIDDEN),
                "up_proj": (INTERMEDIATE, HIDDEN),
                "down_proj": (HIDDEN, INTERMEDIATE),
            }.items():
                matrix = random_matrix(generator, rows, k, scales=(121, 124))
                tensor = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                packed[f"{tensor}.weight"] = ("I8", matrix.codes.shape, matrix.codes)
                packed[f"{tensor}.scale"] = ("F8_E8M0", matrix.scales.shape, matrix.scales)
                plain[f"{tensor}.weight"] = _bf16(dequantize(matrix))
    for name, tensors, extra in (("mxfp4", packed, {"quantization_config": QUANTIZATION}), ("bf16", plain, {})):
        write_shards(folder / name, tensors, shards=2)
        (folder / name / "config.json").write_text(json.dumps({**config, **extra}))
    return folder / "mxfp4", folder / "bf16"


def dequantize(matrix: Matrix) -> np.ndarray:
    """float64 [N, K]."""
    values = E2M1_VALUES[unpack_codes(matrix.codes)].astype(np.float64)
    return values * np.repeat(e8m0_to_float(matrix.scales), 32, axis=1)


def _bf16(values: np.ndarray) -> tuple[str, tuple[int, ...], np.ndarray]:
    bits = values.astype(np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return "BF16", values.shape, rounded


def _dense_tensors(config: dict[str, Any], generator: np.random.Generator) -> Tensors:
    def weight(*shape: int) -> tuple[str, tuple[int, ...], np.ndarray]:
        return _bf16(generator.standard_normal(shape) / np.sqrt(shape[-1]))

    def ones(size: int) -> tuple[str, tuple[int, ...], np.ndarray]:
        return _bf16(np.ones(size))

    tensors: Tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": weight(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = ones(HIDDEN)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = ones(HIDDEN)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        heads = config["num_attention_heads"]
        if "kv_lora_rank" in config:
            nope, rope, value, rank = (
                config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
            )
            tensors[f"{attention}.q_proj.weight"] = weight(heads * (nope + rope), HIDDEN)
            tensors[f"{attention}.kv_a_proj_with_mqa.weight"] = weight(rank + rope, HIDDEN)
            tensors[f"{attention}.kv_a_layernorm.weight"] = ones(rank)
            tensors[f"{attention}.kv_b_proj.weight"] = weight(heads * (nope + value), rank)
            tensors[f"{attention}.o_proj.weight"] = weight(HIDDEN, heads * value)
        else:
            size, kv = config["head_dim"], config["num_key_value_heads"]
            tensors[f"{attention}.q_proj.weight"] = weight(heads * size, HIDDEN)
            tensors[f"{attention}.k_proj.weight"] = weight(kv * size, HIDDEN)
            tensors[f"{attention}.v_proj.weight"] = weight(kv * size, HIDDEN)
            tensors[f"{attention}.o_proj.weight"] = weight(HIDDEN, heads * size)
            tensors[f"{attention}.q_norm.weight"] = ones(size)
            tensors[f"{attention}.k_norm.weight"] = ones(size)
        dense = layer < config.get("first_k_dense_replace", 0)
        if not dense:
            tensors[f"{mlp}.gate.weight"] = weight(EXPERTS, HIDDEN)
        if not dense and config["model_type"] == "deepseek_v3":
            bias = (0.01 * generator.standard_normal(EXPERTS)).astype(np.float32)
            tensors[f"{mlp}.gate.e_score_correction_bias"] = ("F32", bias.shape, bias)
        for name, inner in (("", config["intermediate_size"]), (".shared_experts", INTERMEDIATE)):
            if dense == (name == "") and (dense or config.get("n_shared_experts")):
                tensors[f"{mlp}{name}.gate_proj.weight"] = weight(inner, HIDDEN)
                tensors[f"{mlp}{name}.up_proj.weight"] = weight(inner, HIDDEN)
                tensors[f"{mlp}{name}.down_proj.weight"] = weight(HIDDEN, inner)
    return tensors
