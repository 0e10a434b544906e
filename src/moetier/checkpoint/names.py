"""How checkpoints spell the tensors of routed experts: tables, so that a new model is a line and not code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from moetier.errors import CheckpointError


@dataclass(frozen=True)
class LayerSpelling:
    """Name of a layer's experts; `{layer}` stands for a number. drafts: it counts on from the last hidden layer."""

    template: str
    drafts: bool = False

    def number(self, written: int, hidden_layers: int) -> int:
        """The layer's number in the checkpoint, from the one that is written in a name.

        Drafters are counted from 0 or, as Qwen4's modules in vLLM, from the last hidden layer on.
        """
        return written + hidden_layers if self.drafts and written < hidden_layers else written


LAYERS = (
    LayerSpelling("model.layers.{layer}.mlp.experts"),  # DeepSeek V2/V3, GLM, Kimi, Qwen
    LayerSpelling("layers.{layer}.ffn.experts"),  # DeepSeek V4
    LayerSpelling("mtp.{layer}.ffn.experts", drafts=True),  # DeepSeek V4
    LayerSpelling("model.layers.{layer}.ffn.experts"),
    LayerSpelling("model.layers.{layer}.block_sparse_moe.experts"),  # Mixtral, MiniMax
    LayerSpelling("model.language_model.layers.{layer}.mlp.experts"),  # multimodal Qwen, GLM
    LayerSpelling("language_model.model.layers.{layer}.mlp.experts"),  # multimodal Kimi
    LayerSpelling("mtp.layers.{layer}.mlp.experts", drafts=True),  # Qwen3-Next
)

MODULES = (
    *LAYERS,
    LayerSpelling("model.layers.{layer}.mtp_block.mlp.experts"),
    LayerSpelling("language_model.model.layers.{layer}.ffn.experts"),
    LayerSpelling("language_model.model.layers.{layer}.block_sparse_moe.experts"),
    LayerSpelling("model.layers.{layer}.mtp_block.block_sparse_moe.experts"),
    LayerSpelling("language_model.mtp.layers.{layer}.mlp.experts", drafts=True),
)
"""Names of the modules that compute a layer's experts: those of the tensors, and what frameworks make of them."""

MATRICES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Spellings of (gate, up, down) of one expert."""

FUSED = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "w13")
"""Matrices of all experts in one tensor, [experts, ...]."""


def _pattern(spelling: LayerSpelling) -> str:
    return re.escape(spelling.template).replace(r"\{layer\}", r"(0|[1-9]\d{0,3})")


_MEMBER = rf"(?:\d{{1,5}}\.(?:{'|'.join(m for triple in MATRICES for m in triple)})\.|(?:{'|'.join(FUSED)})(?=[._]|$))"
_PATTERNS = [(spelling, re.compile(rf"({_pattern(spelling)})\.{_MEMBER}")) for spelling in LAYERS]
_MODULES = [(spelling, re.compile(_pattern(spelling))) for spelling in MODULES]


@dataclass(frozen=True)
class MoeLayer:
    """A layer with routed experts: its number in the checkpoint and the name before `.E.` of its tensors."""

    number: int
    name: str
    drafts: bool = field(default=False, compare=False)
    """Whether its name says that it is a drafter's."""


def is_expert_tensor(name: str) -> bool:
    """Whether the tensor belongs to a routed expert, so that it lies in the store. Shared experts do not."""
    return ".experts." in name and any(pattern.match(name) for _, pattern in _PATTERNS)


def module_layer(name: str, hidden_layers: int | None) -> int | None:
    """Number of the layer whose experts the module of this name computes; None for a name that is not known.

    A drafter's name is not known where hidden_layers is not.
    """
    for spelling, pattern in _MODULES:
        match = pattern.fullmatch(name)
        if match is not None and (hidden_layers is not None or not spelling.drafts):
            return spelling.number(int(match[1]), hidden_layers or 0)
    return None


def find_layers(names: Iterable[str], hidden_layers: int) -> list[MoeLayer]:
    """Layers that have routed experts, by number; draft layers (MTP) count on from `hidden_layers`."""
    found: dict[int, MoeLayer] = {}
    for name in names:
        if ".experts." not in name:
            continue
        for spelling, pattern in _PATTERNS:
            match = pattern.match(name)
            if match is None:
                continue
            number = spelling.number(int(match[2]), hidden_layers)
            layer = MoeLayer(number, match[1], spelling.drafts)
            if found.setdefault(number, layer) != layer:
                raise CheckpointError(
                    f"layer {number} has experts under two names, {found[number].name} and {match[1]}; "
                    "the folder mixes two checkpoints"
                )
            break
    return [found[number] for number in sorted(found)]
