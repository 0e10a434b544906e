"""The note in a trimmed checkpoint (one without its experts, which a store has) of what it was trimmed from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from moetier.checkpoint.names import MoeLayer
from moetier.checkpoint.shards import Shards, read_json
from moetier.errors import CheckpointError
from moetier.store.identity import Identity, headers_identity, sampled_identity
from moetier.store.manifest import SHA256, GeometryEntry, Sealed, StrictModel

FILE = "moetier-origin.json"


class LayerName(StrictModel):
    """A MoE layer of the whole checkpoint."""

    number: int
    name: str


class Origin(Sealed):
    """Facts that a trimmed checkpoint has of the whole one."""

    format: Literal[1] = 1
    identity: str = Field(pattern=SHA256)
    """Identity of the whole checkpoint: that of the stores that it fits."""
    headers: str | None = Field(default=None, pattern=SHA256)
    """That of its headers; None: a moetier wrote this that knew no other, and `identity` is it."""
    own: str = Field(pattern=SHA256)
    """Identity of the trimmed folder itself, so that a change of it is noticed; of the same version."""
    source_format: str
    requantized: bool
    geometry: GeometryEntry
    layers: tuple[LayerName, ...] = Field(min_length=1)

    @property
    def identities(self) -> Identity:
        """Identity of the whole checkpoint."""
        return Identity.recorded(self.identity, self.headers)

    def own_identity(self, config: bytes, shards: Shards) -> str:
        """Identity of the trimmed folder as it is, to compare with `own`."""
        return (headers_identity if self.headers is None else sampled_identity)(config, shards)

    @property
    def moe_layers(self) -> tuple[MoeLayer, ...]:
        return tuple(MoeLayer(layer.number, layer.name) for layer in self.layers)

    @classmethod
    def read(cls, folder: Path) -> Origin | None:
        """The note of a folder, None if it is a whole checkpoint."""
        path = folder / FILE
        if not path.exists():
            return None
        body, _ = read_json(path)
        try:
            return cls.unseal(body)
        except (ValidationError, ValueError) as error:
            what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise CheckpointError(f"{path}: {what}; trim the whole checkpoint again") from error
