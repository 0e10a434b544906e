"""Bytes of KV cache for a token and for a sequence, from what config.json says about attention.

Sizes of packed rows are those of vLLM 0.33: 656 bytes of an MLA row in fp8_ds_mla (512 FP8, 16 of scales, 64 bf16 of
RoPE), 584 of DeepSeek V4 (448 FP8, 64 bf16 of RoPE, 8 of scales), 288 of V4.1 in NVFP4, 132 of an indexer's key in FP8
and 68 in FP4.
"""

from __future__ import annotations

from typing import Any

from moetier.errors import CheckpointError
from moetier.plan.geometry import KvFormat, KvLayout

INDEX_FP8 = 132
INDEX_FP4 = 68
MLA_PACKED = 656
V4_ROW = {"bf16": 1024, "fp8_ds_mla": 584}
V41_ROW = {**V4_ROW, "nvfp4_ds_mla": 288}
RECURRENT_BYTES = 2
"""Linear attention's states in bf16, which is vLLM's default."""


def kv_layout(config: dict[str, Any], layers: int) -> KvLayout:
    """The KV cache of the language model with this (inner) config; CheckpointError if nothing tells its size."""
    kind = str(config.get("model_type", ""))
    if kind.startswith("deepseek_v41"):
        return _deepseek_v41(config, layers)
    if kind.startswith("deepseek_v4"):
        return _deepseek_v4(config, layers)
    if config.get("kv_lora_rank"):
        return _latent(config, layers)
    if config.get("num_attention_heads"):
        return _heads(config, layers, known=kind in KNOWN)
    raise CheckpointError(
        f"config.json of model type {kind or 'unknown'}: expected kv_lora_rank or num_attention_heads, found neither, "
        "so the KV cache has no known size; give --kv-bytes-per-token"
    )


KNOWN = ("glm4_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "gpt_oss", "minimax_m2", "mixtral")


def stated(bytes_per_token: float) -> KvLayout:
    """A KV cache whose size the user gave."""
    return KvLayout(
        formats={"stated": KvFormat(bytes_per_token=bytes_per_token)},
        default="stated",
        heads=1,
        assumed="its size is the user's word; each rank holds all of it and reads all of it",
    )


def _int(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise CheckpointError(f"config.json: expected a whole number for {key}, found {value!r:.80}")
    return value


def _ratios(config: dict[str, Any], layers: int) -> list[int]:
    """Tokens for each entry of a layer's compressed cache; 0: a sliding window only."""
    ratios = config.get("compress_ratios")
    if ratios is None:
        kinds = config.get("layer_types") or [
            "heavily_compressed_attention" if i < 2 or i % 2 == 0 else "compressed_sparse_attention"
            for i in range(layers)
        ]
        rates = config.get("compress_rates") or {}
        by_kind = {
            "sliding_attention": 0,
            "compressed_sparse_attention": rates.get("compressed_sparse_attention", 4),
            "heavily_compressed_attention": rates.get("heavily_compressed_attention", 128),
        }
        ratios = [by_kind.get(kind) for kind in kinds]
    if not isinstance(ratios, list) or len(ratios) < layers or not all(type(r) is int and r >= 0 for r in ratios):
        raise CheckpointError(
            f"config.json: expected a compress ratio for each of {layers} layers, found {ratios!r:.80}"
        )
    return ratios[:layers]


def _compressed(config: dict[str, Any], layers: int, rows: dict[str, int], entries: float, scan: float) -> KvLayout:
    """A window of each layer and compressed entries, of which a query reads index_topk."""
    window = _int(config, "sliding_window", 128)
    windows, width = layers * window, _int(config, "head_dim", 512)
    formats = {
        name: KvFormat(bytes_per_token=entries * row + scan, bytes_per_sequence=windows * min(row, 1024))
        for name, row in rows.items()
    }
    return KvLayout(
        formats=formats,
        default="fp8_ds_mla",
        heads=1,
        sparse=True,
        scan_bytes_per_token=scan,
        pair_macs=layers * _int(config, "num_attention_heads") * 2 * width,
        span=window + _int(config, "index_topk", 512),
    )


def _deepseek_v4(config: dict[str, Any], layers: int) -> KvLayout:
    """Each layer keeps a compressed cache and a window; those of ratio 4 an indexer too."""
    ratios = _ratios(config, layers)
    entries = sum(1 / ratio for ratio in ratios if ratio)
    scan = sum(INDEX_FP8 / ratio for ratio in ratios if ratio == 4)
    return _compressed(config, layers, V4_ROW, entries, scan)


def _deepseek_v41(config: dict[str, Any], layers: int) -> KvLayout:
    """Few layers own a cache and an indexer's keys, the others read theirs; each has a window of its own."""
    ratios = _ratios(config, layers)
    owners = config.get("kv_source_layer_ids")
    if not isinstance(owners, list) or not all(type(i) is int and 0 <= i < layers and ratios[i] for i in owners):
        raise CheckpointError(f"config.json: expected numbers of layers in kv_source_layer_ids, found {owners!r:.80}")
    entries = sum(1 / ratios[i] for i in owners)
    return _compressed(config, layers, V41_ROW, entries, entries * INDEX_FP4)


def _latent(config: dict[str, Any], layers: int) -> KvLayout:
    """MLA: one latent row a layer; with an indexer (DSA) also its keys, on the layers that run one."""
    row = _int(config, "kv_lora_rank") + _int(config, "qk_rope_head_dim", 64)
    scan = 0.0
    if config.get("index_topk"):
        kinds = config.get("indexer_types")
        if kinds is None:
            every, offset = max(_int(config, "index_topk_freq", 1), 1), _int(config, "index_skip_topk_offset", 2)
            kinds = ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(layers)]
        scan = float(INDEX_FP8 * sum(kind == "full" for kind in kinds))
    formats = {
        "bf16": KvFormat(bytes_per_token=layers * row * 2 + scan),
        "fp8": KvFormat(bytes_per_token=layers * row + scan),
    }
    if row == 576:
        formats["fp8_ds_mla"] = KvFormat(bytes_per_token=layers * MLA_PACKED + scan)
    default = "fp8_ds_mla" if scan and row == 576 else "bf16"
    heads = _int(config, "num_attention_heads", 0)
    width = _int(config, "qk_nope_head_dim", 128) + _int(config, "qk_rope_head_dim", 64)
    return KvLayout(
        formats=formats,
        default=default,
        heads=1,
        sparse=bool(scan),
        scan_bytes_per_token=scan,
        pair_macs=layers * heads * (width + _int(config, "v_head_dim", 128)),
        span=_int(config, "index_topk") if scan else None,
    )


def _heads(config: dict[str, Any], layers: int, known: bool) -> KvLayout:
    """Keys and values of each KV head, on layers with full attention; windows and recurrent states are bounded."""
    heads = _int(config, "num_attention_heads")
    kv_heads = _int(config, "num_key_value_heads", heads)
    width = _int(config, "head_dim", 0) or _int(config, "hidden_size") // max(heads, 1)
    kinds = config.get("layer_types")
    if kinds is None and config.get("model_type") == "qwen3_next":
        every = _int(config, "full_attention_interval", 4)
        kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    if kinds is None and config.get("model_type") == "gpt_oss":
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    kinds = (kinds or ["full_attention"] * layers)[:layers]
    linear, sliding = kinds.count("linear_attention"), kinds.count("sliding_attention")
    states = linear * _recurrent(config) if linear else 0
    window = _int(config, "sliding_window", 0) if sliding else 0

    def format_of(size: int) -> KvFormat:
        row = 2 * kv_heads * width * size
        return KvFormat(
            bytes_per_token=(layers - linear - sliding) * row, bytes_per_sequence=sliding * window * row + states
        )

    assumed = "" if known else "keys and values of every KV head on every layer, since the model type is not known"
    return KvLayout(
        formats={"bf16": format_of(2), "fp8": format_of(1)},
        default="bf16",
        heads=max(kv_heads, 1),
        pair_macs=(layers - linear - sliding) * heads * 2 * width,
        assumed=assumed,
    )


def _recurrent(config: dict[str, Any]) -> int:
    """Bytes of one gated-delta layer's state of a sequence: the recurrent matrix and the convolution's tail."""
    key, value = _int(config, "linear_key_head_dim", 128), _int(config, "linear_value_head_dim", 128)
    key_heads, value_heads = _int(config, "linear_num_key_heads", 16), _int(config, "linear_num_value_heads", 32)
    kernel = _int(config, "linear_conv_kernel_dim", 4)
    tail = (2 * key * key_heads + value * value_heads) * max(kernel - 1, 0)
    return RECURRENT_BYTES * (value_heads * key * value + tail)
