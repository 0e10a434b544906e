"""The keys of config.json about experts: tables of the keys that model families use."""

from __future__ import annotations

from typing import Any

from moetier.errors import CheckpointError

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where multimodal models keep the config of their language model."""
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts", "moe_k")
HIDDEN = ("hidden_size", "dim")
INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_inter_dim", "intermediate_size")
LAYERS = ("num_hidden_layers", "n_layers", "num_layers")
LARGEST = {EXPERTS: 1 << 16, TOP_K: 1 << 16, HIDDEN: 1 << 20, INTERMEDIATE: 1 << 20, LAYERS: 9_999}
"""The largest value of a size that is believed: far beyond every model, and small enough to count with."""
SYNONYMS = (EXPERTS, TOP_K)
"""Keys of which each means the same; an intermediate size may be that of dense layers beside that of experts."""
LARGEST_OTHER = (1 << 31) - 1
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
    """Return what config.json says of the number formats of weights; None if it says nothing."""
    return next(iter(quantizations(config)), None)


def quantizations(config: dict[str, Any]) -> list[dict[str, Any]]:
    """All places where config.json says it; the first counts."""
    parts = [config] if (text := text_config(config)) is config else [config, text]
    said = [(key, part.get(key)) for part in parts for key in ("quantization_config", "compression_config")]
    for key, value in said:
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(
                f"config.json: expected an object for {key}, found {value!r:.80}; the file is damaged: "
                "download it again"
            )
    return [value for _, value in said if isinstance(value, dict)]


def size(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    """Return what config.json says under these keys, a positive integer of bounded size; None if it says nothing.

    The first key that is there counts. Keys that mean the same must say the same.
    """
    if keys in SYNONYMS:
        said = {key: config[key] for key in keys if type(config.get(key)) is int}
        if len(set(said.values())) > 1:
            raise CheckpointError(
                f"config.json: expected one number, found {', '.join(f'{k} {_digits(v)}' for k, v in said.items())}, "
                "which mean the same; config.json does not belong to these weights: download both again"
            )
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise CheckpointError(f"config.json: expected a positive integer for {key}, found {value!r:.80}")
        most = LARGEST.get(keys, LARGEST_OTHER)
        if value > most:
            raise CheckpointError(
                f"config.json: expected at most {most:,} for {key}, found {_digits(value)}, which no model has; "
                "config.json does not belong to these weights: download it again"
            )
        return value
    return None


def _digits(value: int) -> str:
    """A number in a few characters, however large it is."""
    return f"{value:,}" if value < 10**15 else f"a number of {len(str(value))} digits"


def required(config: dict[str, Any], keys: tuple[str, ...]) -> int:
    """As `size`, but the absence is an error."""
    value = size(config, keys)
    if value is None:
        raise CheckpointError(
            f"config.json: expected one of {', '.join(keys)}, found none; moetier does not know the config.json of "
            "this family yet: serve it with vLLM as it is if it fits"
        )
    return value


def model_type(config: dict[str, Any]) -> str:
    """model_type of the language model; "" if config.json has none."""
    found = [part.get("model_type") for part in (text_config(config), config)]
    for value in found:
        if value is not None and not isinstance(value, str):
            raise CheckpointError(
                f"config.json: expected a name for model_type, found {value!r:.80}; the file is damaged: download it "
                "again"
            )
    return found[0] or found[1] or ""
