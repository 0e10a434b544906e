"""What a checkpoint's config.json says about its experts: tables of the keys that model families use."""

from __future__ import annotations

from typing import Any

from moetier.errors import CheckpointError
from moetier.formats import Family

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where multimodal models keep the config of their language model."""
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts", "moe_k")
HIDDEN = ("hidden_size", "dim")
INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_inter_dim", "intermediate_size")
LAYERS = ("num_hidden_layers", "n_layers")
DRAFT_LAYERS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "n_mtp_layers",
    "num_mtp_modules",
)
DRAFT_TOP_K = ("dspark_num_experts_per_tok", "mtp_num_experts_per_tok")

ROUTE_WEIGHT_BEFORE_DOWN = ("deepseek_v4",)
"""Model types, by prefix, that multiply by the route weight before the down projection."""


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json that describes the language model."""
    nested = (config.get(key) for key in TEXT_CONFIGS)
    return next((part for part in nested if isinstance(part, dict)), config)


def quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    """What config.json says of the number formats of weights; None if it says nothing."""
    for part in (config, text_config(config)):
        for key in ("quantization_config", "compression_config"):
            if isinstance(value := part.get(key), dict):
                return value
    return None


def size(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    """The first of the keys that config.json has, as a positive integer; None if it has none."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise CheckpointError(f"config.json: expected a positive integer for {key}, found {value!r}")
        return value
    return None


def required(config: dict[str, Any], keys: tuple[str, ...]) -> int:
    """As `size`, but the absence is an error."""
    value = size(config, keys)
    if value is None:
        raise CheckpointError(
            f"config.json: expected one of {', '.join(keys)}, found none; "
            "the model is no Mixture-of-Experts model or of an unknown family"
        )
    return value


def model_type(config: dict[str, Any]) -> str:
    """model_type of the language model; "" if config.json has none."""
    return str(text_config(config).get("model_type") or config.get("model_type") or "")


def family(config: dict[str, Any]) -> Family:
    """Clamp and place of the route weight."""
    limit = text_config(config).get("swiglu_limit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < 2**100):
        raise CheckpointError(f"config.json: expected a positive number for swiglu_limit, found {limit!r}")
    return Family(
        swiglu_limit=None if limit is None else float(limit),
        route_weight_before_down=model_type(config).startswith(ROUTE_WEIGHT_BEFORE_DOWN),
    )
