"""Interface of every device path: the sizes of a call, its buffers, its interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from moetier.contract import Family, LayerGeometry, RecordLayout


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`; common.cuh has the same."""
    return next(d for d in range(most, 0, -1) if n % d == 0)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer as its kernels see them; pairs are numbered token * top_k + position."""

    geometry: LayerGeometry
    family: Family

    @property
    def layout(self) -> RecordLayout:
        return RecordLayout.of(self.geometry)

    def macros(self, box_tokens: int) -> dict[str, str | int]:
        """Return the macros of every CUDA source. box_tokens: for hybrid steps of at most so many tokens, or 0."""
        g = self.geometry
        macros: dict[str, str | int] = {
            "HIDDEN": g.hidden,
            "INNER": g.slice_intermediate,
            "SLICES": g.slices,
            "SLICE_BYTES": self.layout.slice_bytes,
            "EXPERTS": g.experts,
            "TOP_K": g.top_k,
            "WEIGHTED": int(self.family.route_weight_before_down),
            "HYBRID_STEP": int(box_tokens > 0),
            "BOX_TOKENS": max(box_tokens, 1),
        }
        if self.family.swiglu_limit is not None:
            macros["LIMIT_BITS"] = hex(int(np.float32(self.family.swiglu_limit).view(np.uint32)))
        return macros


@dataclass(frozen=True)
class Call:
    """The tensors of one layer call on up to `max_tokens` tokens T, all on one device and contiguous.

    x bf16 [T, hidden], from a multiple of 16 bytes on; ids int32 and weights float32 [T, top_k]; slot_table int32
    [experts], the slot of an expert or -1; slots uint8 [slots, stride], a record in each slot that the table names;
    rows float32 [T, top_k, hidden].
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
