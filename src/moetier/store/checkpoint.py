"""A checkpoint folder as the store's builder sees it: config, headers and the routed experts, one at a time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moetier.decision.activation import family as family_of
from moetier.decision.decide import require_readable
from moetier.decision.facts import Facts, TokenizerFiles
from moetier.errors import CheckpointError, UnsupportedModelError
from moetier.formats import ExpertMatrices, Family, LayerGeometry
from moetier.store import config as keys
from moetier.store.names import MoeLayer, is_expert_tensor
from moetier.store.origin import Origin
from moetier.store.shards import Shards, Tensor, read_config, read_json
from moetier.store.sources import Converted, LayerSource, open_layer

__all__ = ["Checkpoint", "MoeLayer", "is_expert_tensor"]

HASH_CHUNK = 1 << 22


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
        facts = Facts(str(folder), config, shards.tensors)
        require_readable(facts)
        hidden_layers, layers = facts.hidden_layers, facts.layers
        experts = keys.required(text, keys.EXPERTS)
        _check_expert_count(shards, layers, experts, hidden_layers)
        sources = tuple(open_layer(shards, layer, experts, config) for layer in layers)
        geometry = _geometry(text, sources, experts)
        family = family_of(config, (layer.number for layer in facts.own_layers))
        return cls(folder, config, shards, layers, sources, geometry, family, raw)

    @classmethod
    def _trimmed(cls, folder: Path, config: dict[str, Any], raw: bytes, shards: Shards, origin: Origin) -> Checkpoint:
        found = identity_of(raw, shards)
        if found != origin.own:
            raise CheckpointError(
                f"{folder}: expected the trimmed checkpoint as it was written (identity {origin.own}), found {found}; "
                "a file of it was changed: trim the whole checkpoint again"
            )
        entry = origin.geometry
        geometry = LayerGeometry(entry.hidden, entry.intermediate, entry.experts, entry.top_k)
        hidden_layers = keys.size(keys.text_config(config), keys.LAYERS) or 0
        family = family_of(config, (layer.number for layer in origin.moe_layers if layer.number < hidden_layers))
        return cls(folder, config, shards, origin.moe_layers, (), geometry, family, raw, origin)

    @property
    def facts(self) -> Facts:
        """What decides whether and how it is served."""
        trimmed = (None, ()) if self.origin is None else (self.origin.source_format, self.origin.moe_layers)
        return Facts(str(self.path), self.config, self.tensors, TokenizerFiles.read(self.path), *trimmed)

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
        """sha256 (hex) over config.json, the index and every shard's name, size and header; deep: also its content.

        A trimmed checkpoint has that of the whole one, and no deep one.
        """
        if deep:
            self.require_experts()
        return self.origin.identity if self.origin is not None else identity_of(self.config_bytes, self.shards, deep)


def identity_of(config_bytes: bytes, shards: Shards, deep: bool = False) -> str:
    """The identity of what is in a folder."""
    digest = hashlib.sha256(b"moetier checkpoint 1")
    parts = [config_bytes, shards.index]
    parts += [f"{s.path.name} {s.size} {s.header_sha256}".encode() for s in shards.shards]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    if deep:
        digest.update(b"content")
        for shard in shards.shards:
            _hash_file(shard.path, digest)
    return digest.hexdigest()


def _hash_file(path: Path, digest: hashlib._Hash) -> None:
    try:
        with path.open("rb") as file:
            while chunk := file.read(HASH_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; check the disk") from error


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
