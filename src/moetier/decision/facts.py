"""Facts of a checkpoint's experts, from headers and config files: those that every row of the table looks at."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from moetier.checkpoint import config as keys
from moetier.checkpoint.names import MoeLayer, find_layers
from moetier.checkpoint.shards import Tensor, read_json
from moetier.errors import CheckpointError

MARK = ".experts."
TOKENIZER = "tokenizer_config.json"
WHOLE_TOKENIZER = "tokenizer.json"
NOT_ROUTED = re.compile(r"shared|vision|visual|audio")
DRAFTER = re.compile(r"(?:^|\.)(?:mtp|nextn|draft\w*|eagle\w*|dspark)\b")
COUNT = re.compile(r"experts?(?:_num|$)")
NO_COUNT = re.compile(r"shared|per_tok|group|top_?k|zero|copies|parallel|interval")


@dataclass(frozen=True)
class ExpertParts:
    """The tensors that tell how a layer's experts are stored."""

    matrices: dict[str, dict[str, Tensor]]
    """The first expert's: matrix (gate_proj, w1, ...) -> what follows its name (weight, ...) -> tensor."""
    fused: dict[str, Tensor]
    """Tensors of all experts at once, by what follows `.experts.`, such as gate_up_proj."""
    others: dict[str, Tensor]
    """Suffixes of other experts' matrices: one tensor each."""
    experts: int
    """One more than the highest number, or the first size of a fused tensor."""


@dataclass(frozen=True)
class TokenizerFiles:
    """Facts of a tokenizer's files."""

    config: dict[str, Any] = field(default_factory=dict)
    """tokenizer_config.json; {} where there is none, or none that can be read: vLLM says so itself."""
    whole: bool = True
    """Whether there is a tokenizer.json, which needs no code of its own."""

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles:
        """Read those of a checkpoint's folder."""
        path = folder / TOKENIZER
        try:
            config = read_json(path)[0] if path.exists() else {}
        except CheckpointError:
            config = {}
        return cls(config, (folder / WHOLE_TOKENIZER).exists())


@dataclass(frozen=True)
class Facts:
    """A checkpoint as its headers and JSON files describe it; no weight was read."""

    name: str
    """As the user calls it."""
    config: dict[str, Any]
    tensors: Mapping[str, Tensor] = field(repr=False)
    tokenizer: TokenizerFiles = field(default_factory=TokenizerFiles, repr=False)
    trimmed_format: str | None = None
    """Number format of the experts, where a store has them and this folder does not."""
    trimmed_layers: tuple[MoeLayer, ...] = ()
    left_out: tuple[str, ...] = ()
    """Why draft layers are not in a store of it, where whoever opened the experts found a reason."""
    headers: bool = True
    """False: of a bundled model or a geometry file, whose tensors nobody looked at."""

    @cached_property
    def text(self) -> dict[str, Any]:
        """config.json's part about the language model."""
        return keys.text_config(self.config)

    @cached_property
    def model_type(self) -> str:
        return keys.model_type(self.config) or "unknown"

    @cached_property
    def model_types(self) -> tuple[str, ...]:
        """The language model's, then that of the whole config.json where it differs."""
        return tuple(dict.fromkeys(kind for kind in (self.model_type, self.config.get("model_type")) if kind))

    @cached_property
    def architectures(self) -> tuple[str, ...]:
        found = self.config.get("architectures") or self.text.get("architectures")
        return tuple(str(name) for name in found) if isinstance(found, list) else ()

    @cached_property
    def hidden_layers(self) -> int:
        return keys.size(self.text, keys.LAYERS) or 0

    @cached_property
    def layers(self) -> tuple[MoeLayer, ...]:
        """Layers whose experts' names are known, draft layers last."""
        return self.trimmed_layers or tuple(find_layers(self.tensors, self.hidden_layers))

    @cached_property
    def parts(self) -> dict[MoeLayer, ExpertParts]:
        """How each of `layers` stores its experts; empty for a trimmed checkpoint."""
        by_name = {layer.name: layer for layer in self.layers}
        found = {layer: ExpertParts({}, {}, {}, 0) for layer in self.layers}
        counts = dict.fromkeys(self.layers, 0)
        for name, tensor in self.tensors.items():
            prefix, mark, rest = name.partition(MARK)
            layer = by_name.get(prefix + MARK[:-1]) if mark else None
            if layer is None:
                continue
            number, _, member = rest.partition(".")
            if not number.isdecimal():
                found[layer].fused[rest] = tensor
                counts[layer] = max(counts[layer], tensor.shape[0] if len(tensor.shape) > 2 else 0)
                continue
            counts[layer] = max(counts[layer], int(number) + 1)
            matrix, _, part = member.partition(".")
            if number == "0":
                found[layer].matrices.setdefault(matrix, {})[part] = tensor
            else:
                found[layer].others.setdefault(part, tensor)
        if self.trimmed_format is not None:
            return {}
        return {layer: replace(one, experts=counts[layer]) for layer, one in found.items()}

    @cached_property
    def unknown_names(self) -> dict[str, str]:
        """Where routed experts seem to be under names that are not known: the part before `.experts.` -> one tensor."""
        known = {layer.name for layer in self.layers}
        found: dict[str, str] = {}
        for name, tensor in self.tensors.items():
            prefix, mark, rest = name.partition(MARK)
            place = prefix + MARK[:-1]
            if not mark or place in known or NOT_ROUTED.search(name):
                continue
            if re.match(r"\d+\.", rest) or len(tensor.shape) > 2 or not known:
                found.setdefault(place, name)
        return found

    @cached_property
    def expert_count(self) -> int | None:
        """Routed experts by any key that sounds like their number; None for a dense model."""
        for part in (self.text, self.config, *_inner(self.text)):
            for key, value in part.items():
                counts = key in keys.EXPERTS or (COUNT.search(key) and not NO_COUNT.search(key))
                if counts and type(value) is int and value > 1:
                    return value
        return None

    def looks_like_experts(self) -> Iterator[str]:
        """Names of tensors that may be routed experts, the likeliest first."""
        yield from self.unknown_names.values()
        wide = (name for name, t in self.tensors.items() if len(t.shape) > 2 and t.shape[0] == self.expert_count)
        yield from (name for name in wide if not NOT_ROUTED.search(name))
        yield from (name for name in self.tensors if "expert" in name and not NOT_ROUTED.search(name))

    def drafts(self, name: str) -> bool:
        """Whether a tensor belongs to a drafter, by its name or its layer's number."""
        number = re.search(r"layers\.(\d{1,6})\.", name)
        return bool(DRAFTER.search(name)) or (number is not None and 0 < self.hidden_layers <= int(number[1]))

    @cached_property
    def announced_drafts(self) -> int:
        """Draft layers that config.json announces."""
        values = (self.text.get(key, self.config.get(key)) for key in keys.DRAFT_LAYERS)
        return next((value for value in values if type(value) is int and value > 0), 0)

    @property
    def own_layers(self) -> tuple[MoeLayer, ...]:
        """Layers of the model itself."""
        return tuple(layer for layer in self.layers if not 0 < self.hidden_layers <= layer.number)

    @property
    def own_parts(self) -> dict[MoeLayer, ExpertParts]:
        """Those of `parts` that are the model's own: a drafter that cannot be read is left out."""
        return {layer: self.parts[layer] for layer in self.own_layers if layer in self.parts}

    @property
    def draft_layers(self) -> tuple[MoeLayer, ...]:
        return tuple(layer for layer in self.layers if 0 < self.hidden_layers <= layer.number)


def _inner(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Parts such as ffn_config that some families keep their experts in."""
    yield from (value for key, value in config.items() if isinstance(value, dict) and ("ffn" in key or "moe" in key))
