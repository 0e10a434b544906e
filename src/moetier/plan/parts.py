"""Which part of a model a tensor belongs to, by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from moetier.checkpoint.shards import Tensor
from moetier.plan.geometry import Parts

EXAMPLES = 8
LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,4})\.")
DRAFTER = re.compile(r"^(?:model\.)?(?:mtp|draft|eagle|dspark|nextn)\b")
EXPERT = re.compile(r"\.experts\.")
RULES = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        ("tables", r"\bengram\.embed\b"),
        ("vision", r"\b(?:vision|visual|vision_tower|mm_projector|vision_model|aligner|multi_modal_projector|audio)\b"),
        ("vision", r"^image_(?:start|end|newline)"),
        ("shared_experts", r"\bshared_experts?(?:_gate)?\b|\bshared_mlp\b"),
        ("router", r"\b(?:mlp|ffn|block_sparse_moe|moe)\.(?:gate|router|gate_weight)\b"),
        ("embedding", r"\bembed_tokens\b|^embed\.|\bwte\b|\bword_embeddings\b"),
        ("head", r"^(?:language_model\.)?(?:lm_head|head|output)\."),
        ("attention", r"attn\b|\battention\b|\bindexer\b|\bself_attention\b"),
        ("norms", r"norm|\bhc_|\bengram\b|\bbias\b"),
        ("dense_mlp", r"\b(?:mlp|ffn|feed_forward)\.(?:gate_proj|up_proj|down_proj|gate_up_proj|w[123])\b"),
    )
)
"""First match wins."""


@dataclass(frozen=True)
class Sorted:
    """Bytes by part, and names that fit none."""

    parts: Parts
    unclassified: tuple[str, ...]


def part_of(name: str, hidden_layers: int) -> str:
    """The field of `Parts` that a tensor counts towards."""
    layer = LAYER.search(name)
    drafts = DRAFTER.search(name) is not None or (layer is not None and int(layer[1]) >= hidden_layers)
    if EXPERT.search(name):
        return "drafter_experts" if drafts else "experts"
    if drafts:
        return "drafter"
    return next((part for part, rule in RULES if rule.search(name)), "unclassified")


def sort_tensors(tensors: Iterable[Tensor], hidden_layers: int) -> Sorted:
    """Sum the bytes of tensors by part."""
    sums: dict[str, int] = {}
    unknown: list[str] = []
    for tensor in tensors:
        part = part_of(tensor.name, hidden_layers)
        sums[part] = sums.get(part, 0) + tensor.nbytes
        if part == "unclassified" and len(unknown) < EXAMPLES:
            unknown.append(tensor.name)
    return Sorted(Parts(**sums), tuple(unknown))
