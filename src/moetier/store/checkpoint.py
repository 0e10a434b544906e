"""A checkpoint folder as the store's builder sees it: config, headers and the routed experts, one at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from moetier.checkpoint import config as keys
from moetier.checkpoint.experts import open_experts
from moetier.checkpoint.layers import LeftOut
from moetier.checkpoint.names import MoeLayer, is_expert_tensor
from moetier.checkpoint.shards import Shards, Tensor, read_config
from moetier.checkpoint.sources import Converted, LayerSource
from moetier.contract import ExpertMatrices, Family, LayerGeometry
from moetier.decision.activation import family as family_of
from moetier.decision.decide import require_readable
from moetier.decision.facts import Facts, TokenizerFiles
from moetier.errors import CheckpointError
from moetier.store.identity import Identity, content_identity, headers_identity, sampled_identity
from moetier.store.origin import Origin

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
    """Origin of a trimmed checkpoint; None: this one is whole."""
    left_out: tuple[LeftOut, ...] = ()
    """Draft layers that no store can hold; a trimmed checkpoint does not know of them, its store does."""

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
        facts = Facts(str(folder), config, shards.tensors)
        require_readable(facts)
        opened = open_experts(config, shards, list(facts.layers))
        family = family_of(config, (layer.number for layer in facts.own_layers))
        whole = cls(folder, config, shards, opened.layers, opened.sources, opened.geometry, family, raw)
        return replace(whole, left_out=opened.left_out)

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
        hidden_layers = keys.size(keys.text_config(config), keys.LAYERS) or 0
        family = family_of(config, (layer.number for layer in origin.moe_layers if layer.number < hidden_layers))
        return cls(folder, config, shards, origin.moe_layers, (), geometry, family, raw, origin)

    @property
    def facts(self) -> Facts:
        """Return the facts that decide whether and how it is served."""
        left_out = tuple(f"{one.number}: {one.reason}" for one in self.left_out)
        facts = Facts(str(self.path), self.config, self.tensors, TokenizerFiles.read(self.path), left_out=left_out)
        if self.origin is None:
            return facts
        return replace(facts, trimmed_format=self.origin.source_format, trimmed_layers=self.origin.moe_layers)

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
        config, raw = read_config(self.path)
        return replace(self, config=config, config_bytes=raw, shards=self.shards.reopened())

    def is_stored(self, name: str) -> bool:
        """Whether a store has the tensor: those of a draft layer that was left out, it has not."""
        if not is_expert_tensor(name):
            return False
        prefix = name.partition(".experts.")[0] + ".experts"
        return all(layer.name != prefix for layer in self.left_out)

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
        """Return the identities of this checkpoint, or of the whole one that it was trimmed from."""
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
