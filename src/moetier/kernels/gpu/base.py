"""What every device path gives and gets: the sizes of a call, its buffers, its interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from moetier.formats import Family, LayerGeometry, RecordLayout


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer as its kernels see them; pairs are numbered token * top_k + position."""

    geometry: LayerGeometry
    family: Family

    @property
    def layout(self) -> RecordLayout:
        return RecordLayout.of(self.geometry)


@dataclass(frozen=True)
class Call:
    """The tensors of one layer call on up to `max_tokens` tokens T, all on one device and contiguous.

    x bf16 [T, hidden]; ids int32 and weights float32 [T, top_k]; slot_table int32 [experts], the slot of an expert or
    -1; slots uint8 [slots, stride], a record in each slot that the table names; rows float32 [T, top_k, hidden].
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    slot_table: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor


class DevicePath(Protocol):
    """One implementation of the layer. Neither method allocates, synchronizes or reads anything back to the host."""

    def rows(self, call: Call) -> None:
        """Fill `call.rows` for the pairs whose expert has a slot; leave the other rows alone."""

    def forward(self, call: Call, out: torch.Tensor) -> None:
        """The whole layer into `out` bf16 [T, hidden]; `call.rows` is scratch. No slot for a routed expert: NaN."""

    def combine(self, call: Call, out: torch.Tensor) -> None:
        """All of `call.rows`, whoever computed them, into `out` bf16 [T, hidden]."""
