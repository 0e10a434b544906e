"""Tensor inventories of released models, made from their public configs: names, dtypes and shapes, no weights.

The shapes are those that vLLM 0.33 and transformers 5.19 load. What makes them trustworthy is the sum: DeepSeek-V4.1-
Flash's is its index's total_size to the byte (tests/plan/test_headers.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

Tensors = Iterator[tuple[str, str, list[int]]]
BITS = {"BF16": 16, "F32": 32, "F8_E4M3": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "I32": 32}

V41_FLASH: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "text_config": {
        "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304,
        "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
        "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "n_routed_experts": 384,
        "n_shared_experts": 1, "num_experts_per_tok": 6, "hc_mult": 4, "sliding_window": 128,
        "max_position_embeddings": 1048576, "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "candidate_source_layer_id": 20,
        "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682], "engram_head_dim": 256,
        "engram_n_heads": 8, "engram_max_ngram_size": 4, "num_nextn_predict_layers": 3, "dspark_block_size": 5,
        "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256, "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3, "swiglu_limit": 10.0,
    },
    "vision_config": {
        "num_hidden_layers": 32, "hidden_size": 1024, "intermediate_size": 2816, "patch_size": 14,
        "downsample_ratio": 3,
    },
}  # fmt: skip

V4_FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048,
    "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 6, "num_hash_layers": 3, "hc_mult": 4, "sliding_window": 128,
    "max_position_embeddings": 1048576, "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "num_nextn_predict_layers": 1,
    "swiglu_limit": 10.0,
}  # fmt: skip

GLM_52: dict[str, Any] = {
    "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1048576,
}  # fmt: skip

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
}  # fmt: skip

KIMI_K27: dict[str, Any] = {
    "model_type": "kimi_k25",
    "text_config": DEEPSEEK_V3 | {
        "model_type": "kimi_k2", "vocab_size": 163840, "n_routed_experts": 384, "num_attention_heads": 64,
        "num_key_value_heads": 64, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
        "max_position_embeddings": 262144,
    },
}  # fmt: skip

QWEN3_235B: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096, "moe_intermediate_size": 1536,
    "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 262144,
}  # fmt: skip

QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
    "full_attention_interval": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
}  # fmt: skip

GLM4_AIR: dict[str, Any] = {
    "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "max_position_embeddings": 131072,
}  # fmt: skip

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
}  # fmt: skip


def tensors(config: dict[str, Any]) -> Tensors:
    """(name, dtype, shape) of every tensor of a model with this config."""
    text = config.get("text_config", config)
    kind = text["model_type"]
    if kind.startswith("deepseek_v4"):
        yield from _deepseek_v4(text, config.get("vision_config"))
    elif kind == "gpt_oss":
        yield from _gpt_oss(text)
    else:
        yield from _classic(text, "language_model.model." if kind == "kimi_k2" else "model.")


def nbytes(dtype: str, shape: list[int]) -> int:
    return prod(shape) * BITS[dtype] // 8


def write(config: dict[str, Any], folder: Path, shard_bytes: int) -> int:
    """A checkpoint folder of true headers over holes, and its bytes of weights. Takes no room on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, Any]] = []
    filled, total = shard_bytes, 0
    for name, dtype, shape in tensors(config):
        size = nbytes(dtype, shape)
        if filled + size > shard_bytes and filled:
            shards.append({})
            filled = 0
        shards[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": [filled, filled + size]}
        filled, total = filled + size, total + size
    weight_map = {}
    for number, header in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(header, file)
        raw = json.dumps(header, separators=(",", ":")).encode()
        end = max(entry["data_offsets"][1] for entry in header.values())
        with (folder / file).open("wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            out.truncate(8 + len(raw) + end)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _linear(name: str, rows: int, columns: int, block: int = 0) -> Tensors:
    """A matrix in bf16, or in FP8 with an FP32 scale for each square block."""
    if not block:
        yield f"{name}.weight", "BF16", [rows, columns]
        return
    yield f"{name}.weight", "F8_E4M3", [rows, columns]
    yield f"{name}.weight_scale_inv", "F32", [-(-rows // block), -(-columns // block)]


def _fp8(name: str, rows: int, columns: int, block: int) -> Tensors:
    """A matrix in FP8 as DeepSeek V4 has it, with an E8M0 scale for each square block."""
    yield f"{name}.weight", "F8_E4M3", [rows, columns]
    yield f"{name}.scale", "F8_E8M0", [-(-rows // block), -(-columns // block)]


def _mxfp4(name: str, rows: int, columns: int) -> Tensors:
    yield f"{name}.weight", "I8", [rows, columns // 2]
    yield f"{name}.scale", "F8_E8M0", [rows, columns // 32]


def _deepseek_v4(c: dict[str, Any], vision: dict[str, Any] | None) -> Tensors:
    """DeepSeek V4 and V4.1: layers, draft layers, tables and vision tower."""
    hidden, vocabulary, new = c["hidden_size"], c["vocab_size"], c["model_type"].startswith("deepseek_v41")
    yield "embed.weight", "BF16", [vocabulary, hidden]
    yield "head.weight", "BF16", [vocabulary, hidden]
    yield "norm.weight", "BF16", [hidden]
    if not new:
        yield from _mixing("", hidden, c["hc_mult"], ("head",))
    for layer in range(c["num_hidden_layers"]):
        name, hashed = f"layers.{layer}", layer < c.get("num_hash_layers", 0)
        yield from _v4_layer(name, c, c["n_routed_experts"], new, hashed)
        if hashed:
            yield f"{name}.ffn.gate.tid2eid", "I32", [vocabulary, c["num_experts_per_tok"]]
        yield from (_v41_extras if new else _v4_compressor)(name, layer, c)
    drafts = c["num_nextn_predict_layers"]
    for layer in range(drafts):
        yield from _v4_layer(f"mtp.{layer}", c, c.get("dspark_n_routed_experts", c["n_routed_experts"]), new)
    if new:
        rank = c["dspark_markov_rank"]
        yield "mtp.0.main_norm.weight", "BF16", [hidden]
        yield from _fp8("mtp.0.main_proj", hidden, hidden * len(c["dspark_target_layer_ids"]), 32)
        last = f"mtp.{drafts - 1}"
        yield f"{last}.norm.weight", "BF16", [hidden]
        yield f"{last}.markov_head.embed.weight", "BF16", [vocabulary, rank]
        yield f"{last}.markov_head.head.weight", "BF16", [vocabulary, rank]
        yield f"{last}.confidence_head.proj.weight", "BF16", [1, hidden + rank]
    if vision:
        yield from _v41_vision(vision, hidden)


def _mixing(prefix: str, hidden: int, streams: int, kinds: tuple[str, ...]) -> Tensors:
    rows = {"head": streams}
    for kind in kinds:
        wide = rows.get(kind, streams * (streams + 2))
        yield f"{prefix}hc_{kind}_fn", "F32", [wide, streams * hidden]
        yield f"{prefix}hc_{kind}_base", "F32", [wide]
        yield f"{prefix}hc_{kind}_scale", "F32", [3 if wide > streams else 1]


def _v4_layer(name: str, c: dict[str, Any], experts: int, new: bool, hashed: bool = False) -> Tensors:
    """hashed: it routes by token id."""
    hidden, inner, block = c["hidden_size"], c["moe_intermediate_size"], 32 if new else 128
    heads, width, groups = c["num_attention_heads"], c["head_dim"], c["o_groups"]
    ranks = c["o_lora_rank"] * groups
    yield from _fp8(f"{name}.attn.wq_a", c["q_lora_rank"], hidden, block)
    yield from _fp8(f"{name}.attn.wq_b", heads * width, c["q_lora_rank"], block)
    yield from _fp8(f"{name}.attn.wkv", width, hidden, block)
    yield from _fp8(f"{name}.attn.wo_a", ranks, heads * width // groups, block)
    yield from _fp8(f"{name}.attn.wo_b", hidden, ranks, block)
    yield f"{name}.attn.q_norm.weight", "BF16", [c["q_lora_rank"]]
    yield f"{name}.attn.kv_norm.weight", "BF16", [width]
    yield f"{name}.attn.attn_sink", "F32", [heads]
    yield from _mixing(f"{name}.", hidden, c["hc_mult"], ("attn", "ffn"))
    yield f"{name}.attn_norm.weight", "BF16", [hidden]
    yield f"{name}.ffn_norm.weight", "BF16", [hidden]
    yield f"{name}.ffn.gate.weight", "BF16", [experts, hidden]
    if not hashed:
        yield f"{name}.ffn.gate.bias", "F32", [experts]
    if new:
        yield f"{name}.ffn.gate.bias_vl", "F32", [experts]
    shapes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
    for expert in range(experts):
        for matrix, shape in shapes.items():
            yield from _mxfp4(f"{name}.ffn.experts.{expert}.{matrix}", *shape)
    for matrix, shape in shapes.items():
        yield from _fp8(f"{name}.ffn.shared_experts.{matrix}", *shape, block)


def _v41_extras(name: str, layer: int, c: dict[str, Any]) -> Tensors:
    """Indexer, compressor and table of the layers that have one."""
    hidden, width, keys = c["hidden_size"], c["head_dim"], c["index_head_dim"]
    if layer in c["index_source_layer_ids"]:
        yield from _fp8(f"{name}.attn.indexer.wq_b", c["index_n_heads"] * keys, c["q_lora_rank"], 32)
        yield f"{name}.attn.indexer.weights_proj.weight", "BF16", [c["index_n_heads"], hidden]
    if layer in c["kv_source_layer_ids"]:
        yield f"{name}.attn.indexer.wk.weight", "BF16", [keys, width]
        yield f"{name}.attn.indexer.k_norm.weight", "BF16", [keys]
        yield f"{name}.attn.compressor.wkv.weight", "BF16", [width, hidden]
        yield f"{name}.attn.compressor.norm.weight", "BF16", [width]
        if c["compress_ratios"][layer] > 1:
            yield f"{name}.attn.compressor.wgate.weight", "BF16", [width, hidden]
    if layer in c["engram_layer_ids"]:
        rows = c["engram_num_embeddings"][c["engram_layer_ids"].index(layer)]
        row, streams = c["engram_head_dim"], c["hc_mult"]
        yield f"{name}.engram.embed.weight", "F8_E4M3", [rows, row]
        yield f"{name}.engram.embed.scale", "F8_E8M0", [rows, row // 32]
        yield f"{name}.engram.q_weight", "BF16", [streams, hidden]
        yield f"{name}.engram.k_weight", "BF16", [streams, hidden]
        columns = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"] * row
        yield from _fp8(f"{name}.engram.wkv", hidden * (streams + 1), columns, 32)


def _v4_compressor(name: str, layer: int, c: dict[str, Any]) -> Tensors:
    hidden, ratio = c["hidden_size"], c["compress_ratios"][layer]
    if not ratio:
        return
    overlap = 2 if ratio == 4 else 1
    parts = {"attn.compressor": c["head_dim"] * overlap}
    if ratio == 4:
        parts["attn.indexer.compressor"] = c["index_head_dim"] * overlap
        yield from _fp8(f"{name}.attn.indexer.wq_b", c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"], 128)
        yield f"{name}.attn.indexer.weights_proj.weight", "BF16", [c["index_n_heads"], hidden]
    for part, width in parts.items():
        yield f"{name}.{part}.wkv.weight", "BF16", [width, hidden]
        yield f"{name}.{part}.wgate.weight", "BF16", [width, hidden]
        yield f"{name}.{part}.ape", "F32", [ratio, width]
        yield f"{name}.{part}.norm.weight", "BF16", [width // overlap]


def _v41_vision(v: dict[str, Any], hidden: int) -> Tensors:
    width, inner = v["hidden_size"], v["intermediate_size"]
    yield "vision.patch_embed.proj.weight", "BF16", [width, 3 * v["patch_size"] ** 2]
    yield "vision.patch_embed.proj.bias", "BF16", [width]
    for block in range(v["num_hidden_layers"]):
        name = f"vision.blocks.{block}"
        yield f"{name}.attn.wqkv.weight", "BF16", [3 * width, width]
        yield f"{name}.attn.wqkv.bias", "BF16", [3 * width]
        yield f"{name}.attn.wo.weight", "BF16", [width, width]
        yield f"{name}.attn.wo.bias", "BF16", [width]
        yield f"{name}.mlp.w1.weight", "BF16", [2 * inner, width]
        yield f"{name}.mlp.w2.weight", "BF16", [width, inner]
        yield f"{name}.norm1.weight", "BF16", [width]
        yield f"{name}.norm2.weight", "BF16", [width]
    yield "vision.norm.weight", "BF16", [width]
    yield "aligner.w1.weight", "BF16", [hidden, width * v["downsample_ratio"] ** 2]
    yield "aligner.w1.bias", "BF16", [hidden]
    yield "aligner.w2.weight", "BF16", [hidden, hidden]
    yield "aligner.w2.bias", "BF16", [hidden]
    for mark in ("start", "end", "newline"):
        yield f"image_{mark}", "BF16", [hidden]


def _classic(c: dict[str, Any], root: str) -> Tensors:
    """DeepSeek V3, GLM, Kimi and Qwen: `layers.N.self_attn` and `layers.N.mlp`."""
    hidden, vocabulary, kind = c["hidden_size"], c["vocab_size"], c["model_type"]
    block = 128 if kind in ("deepseek_v3", "glm_moe_dsa") else 0
    yield f"{root}embed_tokens.weight", "BF16", [vocabulary, hidden]
    yield f"{root}norm.weight", "BF16", [hidden]
    yield f"{root.removesuffix('model.')}lm_head.weight", "BF16", [vocabulary, hidden]
    layers, drafts = c["num_hidden_layers"], c.get("num_nextn_predict_layers", 0)
    for layer in range(layers + drafts):
        name = f"{root}layers.{layer}"
        yield f"{name}.input_layernorm.weight", "BF16", [hidden]
        yield f"{name}.post_attention_layernorm.weight", "BF16", [hidden]
        linear = kind == "qwen3_next" and (layer + 1) % c["full_attention_interval"]
        yield from (_gated_delta if linear else _latent if "kv_lora_rank" in c else _heads)(name, c, block)
        if layer < c.get("first_k_dense_replace", 0):
            yield from _mlp(f"{name}.mlp", hidden, c["intermediate_size"], block)
            continue
        yield from _moe(f"{name}.mlp", c, block)
        if layer >= layers:
            yield f"{name}.enorm.weight", "BF16", [hidden]
            yield f"{name}.hnorm.weight", "BF16", [hidden]
            yield from _linear(f"{name}.eh_proj", hidden, 2 * hidden)


def _latent(name: str, c: dict[str, Any], block: int) -> Tensors:
    hidden, heads, rope = c["hidden_size"], c["num_attention_heads"], c["qk_rope_head_dim"]
    query, latent, nope, value = c["q_lora_rank"], c["kv_lora_rank"], c["qk_nope_head_dim"], c["v_head_dim"]
    attn = f"{name}.self_attn"
    yield from _linear(f"{attn}.q_a_proj", query, hidden, block)
    yield from _linear(f"{attn}.q_b_proj", heads * (nope + rope), query, block)
    yield from _linear(f"{attn}.kv_a_proj_with_mqa", latent + rope, hidden, block)
    yield from _linear(f"{attn}.kv_b_proj", heads * (nope + value), latent, block)
    yield from _linear(f"{attn}.o_proj", hidden, heads * value, block)
    yield f"{attn}.q_a_layernorm.weight", "BF16", [query]
    yield f"{attn}.kv_a_layernorm.weight", "BF16", [latent]
    if "index_n_heads" in c:
        keys = c["index_head_dim"]
        yield from _linear(f"{attn}.indexer.wq_b", c["index_n_heads"] * keys, query, block)
        yield from _linear(f"{attn}.indexer.wk", keys, hidden, block)
        yield f"{attn}.indexer.weights_proj.weight", "BF16", [c["index_n_heads"], hidden]
        yield f"{attn}.indexer.k_norm.weight", "BF16", [keys]
        yield f"{attn}.indexer.k_norm.bias", "BF16", [keys]


def _heads(name: str, c: dict[str, Any], block: int) -> Tensors:
    hidden, width = c["hidden_size"], c["head_dim"]
    query, keys = c["num_attention_heads"] * width, c["num_key_value_heads"] * width
    gated = 2 if c["model_type"] == "qwen3_next" else 1
    yield from _linear(f"{name}.self_attn.q_proj", query * gated, hidden, block)
    yield from _linear(f"{name}.self_attn.k_proj", keys, hidden, block)
    yield from _linear(f"{name}.self_attn.v_proj", keys, hidden, block)
    yield from _linear(f"{name}.self_attn.o_proj", hidden, query, block)
    if c["model_type"].startswith("qwen3"):
        yield f"{name}.self_attn.q_norm.weight", "BF16", [width]
        yield f"{name}.self_attn.k_norm.weight", "BF16", [width]


def _gated_delta(name: str, c: dict[str, Any], block: int) -> Tensors:
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    attn = f"{name}.linear_attn"
    yield from _linear(f"{attn}.in_proj_qkvz", 2 * keys + 2 * values, hidden, block)
    yield from _linear(f"{attn}.in_proj_ba", 2 * heads, hidden, block)
    yield f"{attn}.conv1d.weight", "BF16", [2 * keys + values, 1, c["linear_conv_kernel_dim"]]
    yield f"{attn}.A_log", "BF16", [heads]
    yield f"{attn}.dt_bias", "BF16", [heads]
    yield f"{attn}.norm.weight", "BF16", [c["linear_value_head_dim"]]
    yield from _linear(f"{attn}.out_proj", hidden, values, block)


def _mlp(name: str, hidden: int, inner: int, block: int) -> Tensors:
    yield from _linear(f"{name}.gate_proj", inner, hidden, block)
    yield from _linear(f"{name}.up_proj", inner, hidden, block)
    yield from _linear(f"{name}.down_proj", hidden, inner, block)


def _moe(name: str, c: dict[str, Any], block: int) -> Tensors:
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    experts = c.get("n_routed_experts") or c["num_experts"]
    yield f"{name}.gate.weight", "BF16", [experts, hidden]
    if "n_routed_experts" in c:
        yield f"{name}.gate.e_score_correction_bias", "F32", [experts]
    for expert in range(experts):
        if c["model_type"] == "kimi_k2":
            yield from _int4(f"{name}.experts.{expert}", hidden, inner)
        else:
            yield from _mlp(f"{name}.experts.{expert}", hidden, inner, block)
    if c.get("n_shared_experts"):
        yield from _mlp(f"{name}.shared_experts", hidden, inner * c["n_shared_experts"], block)
    if "shared_expert_intermediate_size" in c:
        yield from _mlp(f"{name}.shared_expert", hidden, c["shared_expert_intermediate_size"], block)
        yield f"{name}.shared_expert_gate.weight", "BF16", [1, hidden]


def _int4(name: str, hidden: int, inner: int) -> Tensors:
    """Kimi's experts: eight 4-bit values in an int32, a bf16 scale for each 32."""
    for matrix, (rows, columns) in {
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)
    }.items():  # fmt: skip
        yield f"{name}.{matrix}.weight_packed", "I32", [rows, columns // 8]
        yield f"{name}.{matrix}.weight_scale", "BF16", [rows, columns // 32]
        yield f"{name}.{matrix}.weight_shape", "I32", [2]


def _gpt_oss(c: dict[str, Any]) -> Tensors:
    hidden, inner, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    width, heads = c["head_dim"], c["num_attention_heads"]
    yield "model.embed_tokens.weight", "BF16", [c["vocab_size"], hidden]
    yield "model.norm.weight", "BF16", [hidden]
    yield "lm_head.weight", "BF16", [c["vocab_size"], hidden]
    for layer in range(c["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, rows in (("q", heads * width), ("k", c["num_key_value_heads"] * width)):
            yield f"{name}.self_attn.{part}_proj.weight", "BF16", [rows, hidden]
            yield f"{name}.self_attn.{part}_proj.bias", "BF16", [rows]
        yield f"{name}.self_attn.v_proj.weight", "BF16", [c["num_key_value_heads"] * width, hidden]
        yield f"{name}.self_attn.v_proj.bias", "BF16", [c["num_key_value_heads"] * width]
        yield f"{name}.self_attn.o_proj.weight", "BF16", [hidden, heads * width]
        yield f"{name}.self_attn.o_proj.bias", "BF16", [hidden]
        yield f"{name}.self_attn.sinks", "BF16", [heads]
        yield f"{name}.input_layernorm.weight", "BF16", [hidden]
        yield f"{name}.post_attention_layernorm.weight", "BF16", [hidden]
        yield f"{name}.mlp.router.weight", "BF16", [experts, hidden]
        yield f"{name}.mlp.router.bias", "BF16", [experts]
        for matrix, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            yield f"{name}.mlp.experts.{matrix}_blocks", "U8", [experts, rows, columns // 32, 16]
            yield f"{name}.mlp.experts.{matrix}_scales", "U8", [experts, rows, columns // 32]
            yield f"{name}.mlp.experts.{matrix}_bias", "BF16", [experts, rows]
