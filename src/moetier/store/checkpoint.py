"""A checkpoint folder as the store's builder sees it: config, headers and the routed experts, one at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from moetier.errors import CheckpointError, UnsupportedModelError
from moetier.formats import ExpertMatrices, Family, LayerGeometry
from moetier.store import config as keys
from moetier.store.identity import Identity, content_identity, headers_identity, sampled_identity
from moetier.store.names import MoeLayer, find_layers, is_expert_tensor
from moetier.store.origin import Origin
from moetier.store.shards import Shards, Tensor, read_config, read_json
from moetier.store.sources import Converted, LayerSource, open_layer

__all__ = ["Checkpoint", "MoeLayer", "is_expert_tensor"]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Only headers were read; every routed expert's tensors have the right dtype and shape.

    A trimmed checkpoint has everything but the experts, and the identity of the whole one that it was trimmed from.
    """

    path: Path
    config: dict[str, Any]
    shards: Shards
    moe_layers: tuple[MoeLayer, ...]
    """Layers with routed experts by number; the draft layers (MTP) come last."""
    sources: tuple[LayerSource, ...]
    """Reader of each of `moe_layers`; none in a trimmed checkpoint."""
    geometry: LayerGeometry
    family: Family
    config_bytes: bytes
    origin: Origin | None = None
    """What a trimmed checkpoint was trimmed from; None: this one is whole."""

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a folder of config.json and safetensors files; CheckpointError where anything is not as it must be."""
        folder = Path(path)
        config, raw = read_config(folder)
        shards = Shards.open(folder)
        origin = Origin.read(folder)
        if origin is not None:
            return cls._trimmed(folder, config, raw, shards, origin)
        return cls.whole(folder, config, raw, shards)

    @classmethod
    def whole(cls, folder: Path, config: dict[str, Any], raw: bytes, shards: Shards) -> Checkpoint:
        """A checkpoint with its experts, from its parts; raw are the bytes of config.json."""
        text = keys.text_config(config)
        hidden_layers = keys.size(text, keys.LAYERS) or 0
        layers = tuple(find_layers(shards.tensors, hidden_layers))
        if not layers:
            raise CheckpointError(
                f"{folder} (model type {keys.model_type(config) or 'unknown'}) has no routed experts: expected tensors "
                f"such as model.layers.N.mlp.experts.E.gate_proj.weight, found {min(shards.tensors, default='none')} "
                "and others; moetier serves Mixture-of-Experts models, use vLLM as it is for this one"
            )
        experts = keys.required(text, keys.EXPERTS)
        _check_expert_count(shards, layers, experts, hidden_layers)
        sources = tuple(open_layer(shards, layer, experts, config) for layer in layers)
        geometry = _geometry(text, sources, experts)
        return cls(folder, config, shards, layers, sources, geometry, keys.family(config), raw)

    @classmethod
    def _trimmed(cls, folder: Path, config: dict[str, Any], raw: bytes, shards: Shards, origin: Origin) -> Checkpoint:
        found = origin.own_identity(raw, shards)
        if found != origin.own:
            raise CheckpointError(
                f"{folder}: expected the trimmed checkpoint as it was written (identity {origin.own}), found {found}; "
                "a file of it was changed: trim the whole checkpoint again, into another folder"
            )
        entry = origin.geometry
        geometry = LayerGeometry(entry.hidden, entry.intermediate, entry.experts, entry.top_k)
        return cls(folder, config, shards, origin.moe_layers, (), geometry, keys.family(config), raw, origin)

    @property
    def model_type(self) -> str:
        return keys.model_type(self.config)

    @property
    def hidden_layers(self) -> int:
        """Layers of the model itself; MoE layers with this number or a higher one belong to a drafter."""
        return keys.required(keys.text_config(self.config), keys.LAYERS)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name: file, dtype, shape and byte range."""
        return self.shards.tensors

    @property
    def requantized(self) -> bool:
        """Whether any layer's values may change on the way to MXFP4."""
        if self.origin is not None:
            return self.origin.requantized
        return any(source.requantized for source in self.sources)

    @property
    def source_format(self) -> str:
        """Number formats of the experts, such as "mxfp4"; several are joined by +."""
        if self.origin is not None:
            return self.origin.source_format
        return "+".join(sorted({source.format for source in self.sources}))

    def reopened(self) -> Checkpoint:
        """The same folder, opened again: an identity that differs says that it was changed meanwhile."""
        config, raw = read_json(self.path / "config.json")
        return replace(self, config=config, config_bytes=raw, shards=self.shards.reopened())

    def read_expert(self, layer: int, expert: int) -> ExpertMatrices:
        """The matrices of one expert; layer is an index into `moe_layers`. Reads only this expert's bytes."""
        return self.convert(layer, expert).expert

    def convert(self, layer: int, expert: int) -> Converted:
        """As `read_expert`, with what its values lost on the way to MXFP4."""
        self.require_experts()
        return self.sources[layer].convert(expert)

    def require_experts(self) -> None:
        """CheckpointError if this is a trimmed checkpoint."""
        if self.origin is not None:
            raise CheckpointError(
                f"{self.path} was trimmed and has no experts, only a store has them: expected the whole checkpoint "
                f"(identity {self.origin.identity}); download it again"
            )

    def identity(self, *, deep: bool = False) -> str:
        """sha256 (hex) over config.json, the index, every shard's name, size and header, and bytes of every tensor.

        deep: over all content instead. A trimmed checkpoint has the identity of the whole one, and no deep one.
        """
        if deep:
            self.require_experts()
            return content_identity(self.config_bytes, self.shards)
        return self.identities.sampled or self.identities.headers

    @cached_property
    def identities(self) -> Identity:
        """What this checkpoint, or the whole one that it was trimmed from, is known by."""
        if self.origin is not None:
            return self.origin.identities
        return Identity(self.headers, sampled_identity(self.config_bytes, self.shards))

    @property
    def known(self) -> Identity:
        """As `identities`, as far as it is known while the weights are still being fetched."""
        return Identity(self.headers, None) if self.shards.remote else self.identities

    @property
    def headers(self) -> str:
        """The identity of config and headers alone, which is known before any tensor is there."""
        if self.origin is not None:
            return self.origin.identities.headers
        return headers_identity(self.config_bytes, self.shards)


def _check_expert_count(shards: Shards, layers: tuple[MoeLayer, ...], experts: int, hidden_layers: int) -> None:
    """No layer may hold more experts than config.json says, they would be left out in silence; nor a drafter fewer."""
    by_prefix = {layer.name: layer for layer in layers}
    found: dict[MoeLayer, int] = {}
    for name in shards.tensors:
        prefix, _, rest = name.rpartition(".experts.")
        layer, expert = by_prefix.get(f"{prefix}.experts"), rest.partition(".")[0]
        if layer is None or not expert.isdecimal():
            continue
        if int(expert) >= experts:
            raise CheckpointError(
                f"layer {layer.number}: config.json says {experts} experts, but there is tensor {name}; "
                "config.json does not belong to these weights"
            )
        found[layer] = max(found.get(layer, 0), int(expert) + 1)
    for layer, count in found.items():
        if count != experts and layer.number >= hidden_layers:
            raise UnsupportedModelError(
                f"draft layer {layer.number} ({layer.name}) has {count} experts and the model {experts}: expected one "
                "geometry for all layers of a store; drafters of another size are not supported yet"
            )


def _geometry(config: dict[str, Any], sources: tuple[LayerSource, ...], experts: int) -> LayerGeometry:
    """One geometry for every layer, the tensors' shapes against config.json's sizes."""
    first = sources[0]
    expected = (keys.size(config, keys.HIDDEN) or first.hidden, keys.size(config, keys.INTERMEDIATE))
    for source in sources:
        found = (source.hidden, source.intermediate)
        wanted = (expected[0], expected[1] or first.intermediate)
        if found != wanted:
            raise CheckpointError(
                f"layer {source.layer.number} ({source.layer.name}): expected experts of hidden size {wanted[0]} and "
                f"intermediate size {wanted[1]} by config.json, found {found[0]} and {found[1]} in its tensors"
            )
    return LayerGeometry(first.hidden, first.intermediate, experts, keys.required(config, keys.TOP_K))
