"""store.json, format 1: everything that a reader must know of a store, typed and sealed with a hash of itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moetier.contract import Family, LayerGeometry
from moetier.errors import MoetierError, StoreError
from moetier.files import read_small
from moetier.store.identity import Identity

FORMAT = 1
CONTRACT = "int8x"
LAYOUT = "tile16"
CHECKSUM = "xxh3_64"
FILE = "store.json"
SHA256 = r"^[0-9a-f]{64}$"
MAX_BYTES = 16 << 20
"""More than any store.json can need; a larger file is not one."""


class StrictModel(BaseModel):
    """Unknown keys and other types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Sealed(StrictModel):
    """The content of a JSON file whose last key, `seal`, is the sha256 of the others."""

    def to_json(self) -> bytes:
        """The text of the file."""
        body = self.model_dump(mode="json")
        return (json.dumps({**body, "seal": _digest(body)}, indent=1) + "\n").encode()

    @classmethod
    def unseal(cls, body: dict[str, Any]) -> Self:
        """The object of a file's content; ValueError if the content was changed, ValidationError if it is not valid."""
        body = dict(body)
        if body.pop("seal", None) != _digest(body):
            raise ValueError("it was changed after it was written: its seal does not fit")
        return cls.model_validate_json(json.dumps(body))


class GeometryEntry(StrictModel):
    """Sizes shared by all layers; hidden and intermediate are those of a whole expert."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


class FamilyEntry(StrictModel):
    """Differences of the model family inside an expert."""

    swiglu_limit: float | None
    route_weight_before_down: bool


class LossEntry(StrictModel):
    """Losses of a layer's weights by re-quantization; docs/store.md says what each number means."""

    relative_rms: float
    sign_bias: float
    saturated_share: float


class LayerEntry(StrictModel):
    """One MoE layer: its number and name in the checkpoint, and its files in the store's folder."""

    number: int = Field(ge=0)
    name: str
    source: str
    """Number format of its experts in the checkpoint."""
    records: str = Field(pattern=r"^layer-\d{5}\.records$")
    sums: str = Field(pattern=r"^layer-\d{5}\.sums$")
    sums_sha256: str = Field(pattern=SHA256)
    loss: LossEntry | None = None
    """None: the values are the checkpoint's own."""


class LeftOutEntry(StrictModel):
    """A draft layer of the checkpoint that the store does not have. name: "" where no tensor of it was found."""

    number: int = Field(ge=0)
    name: str
    reason: str


class CheckpointEntry(StrictModel):
    """The checkpoint that the store was built from."""

    identity: str = Field(pattern=SHA256)
    headers: str | None = Field(default=None, pattern=SHA256)
    """Identity of its headers alone; None: a moetier built this that knew no other, and `identity` is it."""
    content: str | None = Field(default=None, pattern=SHA256)
    """Identity with the hash of all content, where the build was asked for it."""
    model_type: str
    source_format: str
    requantized: bool

    @property
    def identities(self) -> Identity:
        return Identity.recorded(self.identity, self.headers)


class Manifest(Sealed):
    """The content of store.json. All sizes in bytes."""

    format: Literal[1] = 1
    contract: str
    layout: str
    slices: int
    geometry: GeometryEntry
    family: FamilyEntry
    checkpoint: CheckpointEntry
    record_stride: int
    checksum: str
    layers: tuple[LayerEntry, ...] = Field(min_length=1)
    left_out: tuple[LeftOutEntry, ...] = ()
    tool_version: str

    @property
    def layer_geometry(self) -> LayerGeometry:
        g = self.geometry
        return LayerGeometry(g.hidden, g.intermediate, g.experts, g.top_k, self.slices)

    @property
    def layer_family(self) -> Family:
        return Family(self.family.swiglu_limit, self.family.route_weight_before_down)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check the store.json of a store's folder."""
        path = folder / FILE
        try:
            body = json.loads(read_small(path, MAX_BYTES))
        except FileNotFoundError as error:
            raise StoreError(
                f"{folder} is no store: expected {FILE} in it, found none; "
                "make it with `moetier store build CHECKPOINT OUT` (one that was interrupted resumes)"
            ) from error
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{path}: expected JSON, found {error}; {_REBUILD}") from error
        return cls._checked(body, path)

    @classmethod
    def _checked(cls, body: object, path: Path) -> Manifest:
        if not isinstance(body, dict):
            raise StoreError(f"{path}: expected a JSON object, found {type(body).__name__}; {_REBUILD}")
        for key, known in (("format", FORMAT), ("contract", CONTRACT), ("layout", LAYOUT), ("checksum", CHECKSUM)):
            if body.get(key) != known:
                raise StoreError(
                    f"{path}: expected {key} {known!r}, which this version reads, found {body.get(key)!r}; "
                    "build the store again with this version, into another folder"
                )
        try:
            manifest = cls.unseal(body)
            _ = manifest.layer_geometry
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise StoreError(f"{path}: {where or 'store.json'}: {first['msg']}; {_REBUILD}") from error
        except (MoetierError, ValueError) as error:
            raise StoreError(f"{path}: {error}; {_REBUILD}") from error
        return manifest


_REBUILD = (
    "build the store again with `moetier store build CHECKPOINT OUT` into another folder, or remove this one first"
)


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
