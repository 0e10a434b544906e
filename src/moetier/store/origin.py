"""The note in a trimmed checkpoint (one without its experts, which a store has) of what it was trimmed from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from moetier.errors import CheckpointError
from moetier.store.manifest import GeometryEntry, Sealed, StrictModel
from moetier.store.names import MoeLayer
from moetier.store.shards import read_json

FILE = "moetier-origin.json"


class LayerName(StrictModel):
    """A MoE layer of the whole checkpoint."""

    number: int
    name: str


class Origin(Sealed):
    """What a trimmed checkpoint knows of the whole one."""

    format: Literal[1] = 1
    identity: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Identity of the whole checkpoint: that of the stores that it fits."""
    own: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Identity of the trimmed folder itself, so that a change of it is noticed."""
    source_format: str
    requantized: bool
    geometry: GeometryEntry
    layers: tuple[LayerName, ...] = Field(min_length=1)

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
