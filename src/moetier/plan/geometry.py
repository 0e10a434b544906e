"""Facts of a model that decide where it fits and how fast it is: sizes, bytes by part, and its KV cache. Facts only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moetier.contract import LayerGeometry, RecordLayout
from moetier.errors import CheckpointError

Count = Annotated[int, Field(ge=0, lt=1 << 60)]
Positive = Annotated[int, Field(gt=0, le=1 << 30)]


class Facts(BaseModel):
    """Immutable; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Parts(Facts):
    """Bytes of the checkpoint by what they are for, as its headers say."""

    attention: Count = 0
    """With indexers, compressors and linear attention."""
    dense_mlp: Count = 0
    shared_experts: Count = 0
    router: Count = 0
    norms: Count = 0
    """Norms, hyper-connections and other small tensors of every layer."""
    embedding: Count = 0
    head: Count = 0
    experts: Count = 0
    """Routed experts of the model itself, in the checkpoint's own format."""
    tables: Count = 0
    """Lookup tables (Engram): a few rows of them are read for a token."""
    vision: Count = 0
    """Towers and projectors of other modalities."""
    drafter: Count = 0
    """Draft layers (MTP, DSpark) but their routed experts."""
    drafter_experts: Count = 0
    unclassified: Count = 0
    """Counted as dense: read in every step."""

    @property
    def total(self) -> int:
        return sum(self.model_dump().values())

    @property
    def read_each_step(self) -> int:
        """Dense bytes that a step of one token reads: all but embedding rows, tables, vision, drafter and experts.

        Without a head of its own, a model multiplies by its embedding.
        """
        dense = self.attention + self.dense_mlp + self.shared_experts + self.router + self.norms
        return dense + (self.head or self.embedding) + self.unclassified

    @property
    def resident(self) -> int:
        """Dense bytes that lie on the device, without the drafter."""
        return self.read_each_step + (self.embedding if self.head else 0) + self.vision


class KvFormat(Facts):
    """KV cache in one number format, whole model."""

    bytes_per_token: float = Field(ge=0)
    """Bytes that grow with the context."""
    bytes_per_sequence: Count = 0
    """Sliding windows and recurrent states."""


class KvLayout(Facts):
    """The KV cache as the attention layout gives it."""

    formats: dict[str, KvFormat]
    default: str
    heads: Positive
    """KV heads: so many ranks divide it, and more of them keep copies. 1: each keeps all (latent heads)."""
    sparse: bool = False
    """True: a step reads a bounded number of entries, and scans only the indexer's."""
    scan_bytes_per_token: Annotated[float, Field(ge=0)] = 0.0
    """Bytes of the indexer that a step scans for each token of context."""
    pair_macs: Count = 0
    """Multiply-adds of attention for each pair of a query and a token that it attends to, all layers."""
    span: Positive | None = None
    """The most tokens that a query attends to; None: all before it."""
    assumed: str = ""
    """How it was guessed, where the attention is not one that we know."""

    @model_validator(mode="after")
    def _default_is_there(self) -> KvLayout:
        if self.default not in self.formats:
            raise ValueError(f"default KV format {self.default!r} is none of {', '.join(self.formats)}")
        return self

    def pair_ops(self, tokens: int, before: int) -> int:
        """Multiply-adds of attention for `tokens` of a prompt behind `before` others."""
        seen = before + tokens // 2
        return self.pair_macs * tokens * (seen if self.span is None else min(seen, self.span))


class Drafter(Facts):
    """Speculative decoding that the checkpoint brings."""

    kind: Literal["mtp", "dspark"]
    layers: Positive
    experts: Count = 0
    top_k: Count = 0
    block: Positive = 1
    """Tokens drafted at once."""


class Geometry(Facts):
    """One model."""

    name: str
    model_type: str
    source: str
    """Where the facts come from."""
    assumed: tuple[str, ...] = ()
    """Facts that are not from the source."""
    layers: Annotated[int, Field(gt=0, le=10_000)]
    moe_layers: Positive
    hidden: Positive
    intermediate: Positive
    """Intermediate size of one routed expert."""
    experts: Annotated[int, Field(gt=0, le=1 << 16)]
    top_k: Positive
    expert_format: str = "mxfp4"
    """Number format of the routed experts in the checkpoint; all but mxfp4 are re-quantized."""
    max_context: Positive
    parts: Parts
    kv: KvLayout
    drafter: Drafter | None = None
    unclassified: tuple[str, ...] = ()
    """Some names of tensors whose purpose is not known."""

    @model_validator(mode="after")
    def _consistent(self) -> Geometry:
        if self.moe_layers > self.layers:
            raise ValueError(f"{self.moe_layers} MoE layers of {self.layers} layers")
        self.record  # noqa: B018 (raises where MXFP4 blocks do not fit)
        return self

    @property
    def record(self) -> RecordLayout:
        return RecordLayout.of(LayerGeometry(self.hidden, self.intermediate, self.experts, self.top_k))

    @property
    def record_bytes(self) -> int:
        """Bytes of one expert in the store."""
        return self.record.stride

    @property
    def store_bytes(self) -> int:
        """All routed experts of the model itself as records."""
        return self.moe_layers * self.experts * self.record_bytes


def parse_geometry(text: str | bytes, where: str) -> Geometry:
    """A geometry file; CheckpointError says which key is wrong."""
    try:
        return Geometry.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{where}: expected a model's geometry, found {place}: {first['msg']}") from None
