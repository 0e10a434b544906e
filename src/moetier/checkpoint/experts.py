"""The layers of routed experts that a store is built from: complete, of one geometry, each with its reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moetier.checkpoint import config as keys
from moetier.checkpoint.layers import LeftOut, check_trunk, hidden_layers, split_drafts
from moetier.checkpoint.names import MoeLayer
from moetier.checkpoint.shards import Shards
from moetier.checkpoint.sources import LayerSource, open_layer
from moetier.contract import LayerGeometry
from moetier.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True)
class Experts:
    """Layers that a store will hold, and the draft layers that it will not."""

    layers: tuple[MoeLayer, ...]
    sources: tuple[LayerSource, ...]
    geometry: LayerGeometry
    left_out: tuple[LeftOut, ...]


def open_experts(config: dict[str, Any], shards: Shards, found: list[MoeLayer]) -> Experts:
    """Open the layers that have experts; CheckpointError where one is missing or not as config.json says."""
    text, hidden = keys.text_config(config), hidden_layers(config)
    experts = keys.required(text, keys.EXPERTS)
    check_trunk(config, shards, found)
    trunk = [layer for layer in found if layer.number < hidden]
    for layer in trunk:
        _check_expert_count(shards, layer, experts)
    sources = {layer: open_layer(shards, layer, experts, config) for layer in trunk}
    geometry = _geometry(text, list(sources.values()), experts)

    def differs(layer: MoeLayer) -> str:
        if (count := _count(shards, layer)) != experts:
            return f"it has {count} experts and the model {experts}"
        top_k = keys.size(text, keys.DRAFT_TOP_K)
        if top_k not in (None, geometry.top_k):
            return f"it uses {top_k} experts a token and the model {geometry.top_k}"
        try:
            source = sources[layer] = open_layer(shards, layer, experts, config, draft=True)
        except (CheckpointError, UnsupportedModelError) as error:
            return f"its experts cannot be read: {error}"
        if (source.hidden, source.intermediate) != (geometry.hidden, geometry.intermediate):
            return (
                f"its experts have hidden size {source.hidden} and intermediate size {source.intermediate}, the "
                f"model's {geometry.hidden} and {geometry.intermediate}"
            )
        return ""

    layers, left_out = split_drafts(config, shards, found, differs)
    return Experts(tuple(layers), tuple(sources[layer] for layer in layers), geometry, tuple(left_out))


def _check_expert_count(shards: Shards, layer: MoeLayer, experts: int) -> None:
    """No layer may hold more experts than config.json says: they would be left out in silence."""
    for name in shards.below(layer.name):
        number = name[len(layer.name) + 1 :].partition(".")[0]
        if number.isdecimal() and int(number) >= experts:
            raise CheckpointError(
                f"layer {layer.number}: config.json says {experts} experts, but there is tensor {name}; "
                "config.json does not belong to these weights"
            )


def _count(shards: Shards, layer: MoeLayer) -> int:
    """Experts that a layer has by its tensors."""
    count = 0
    for name in shards.below(layer.name):
        number = name[len(layer.name) + 1 :].partition(".")[0]
        shape = shards.tensors[name].shape
        count = max(count, int(number) + 1 if number.isdecimal() else shape[0] if len(shape) > 1 else 0)
    return count


def _geometry(text: dict[str, Any], sources: list[LayerSource], experts: int) -> LayerGeometry:
    """One geometry for every layer, the tensors' shapes against config.json's sizes."""
    first = sources[0]
    expected = (keys.size(text, keys.HIDDEN) or first.hidden, keys.size(text, keys.INTERMEDIATE))
    for source in sources:
        found = (source.hidden, source.intermediate)
        wanted = (expected[0], expected[1] or first.intermediate)
        if found != wanted:
            raise CheckpointError(
                f"layer {source.layer.number} ({source.layer.name}): expected experts of hidden size {wanted[0]} and "
                f"intermediate size {wanted[1]} by config.json, found {found[0]} and {found[1]} in its tensors"
            )
    return LayerGeometry(first.hidden, first.intermediate, experts, keys.required(text, keys.TOP_K))
