"""INT4 experts as compressed-tensors packs them (Kimi K2): eight 4-bit integers an I32 word, and a scale per group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moetier.errors import CheckpointError
from moetier.formats import unpack_codes
from moetier.formats.requantize import Rows
from moetier.store.names import MoeLayer
from moetier.store.shards import Shards, Tensor
from moetier.store.sources.base import PerExpertSource, Requantizing
from moetier.store.sources.floats import DECODE

ZERO = 8
"""The stored nibble is the integer plus this."""
ASYMMETRIC = ("weight_zero_point", "weight_g_idx")
"""Tensors of variants that are not read: zero points, and columns in another order."""


class Int4Source(PerExpertSource, Requantizing):
    """value = (nibble - 8) * weight_scale[row, column / group]; X.weight_packed I32 [out, in/8], low nibble first."""

    format = "int4"
    weight_dtypes = ("I32",)
    weight_suffix = "weight_packed"

    @classmethod
    def matches(cls, shards: Shards, layer: MoeLayer) -> bool:
        weight = cls.first_weight(shards, layer)
        return weight is not None and weight.dtype == "I32"

    def per_column(self, weight: Tensor) -> int:
        return 8

    def check_companions(self, name: str, rows: int, k: int) -> None:
        scale = self.tensor(f"{name}.weight_scale", tuple(DECODE))
        if len(scale.shape) != 2 or scale.shape[0] != rows or k % max(1, scale.shape[1]):
            raise CheckpointError(f"{scale}: expected shape [{rows}, a divisor of {k}], found {list(scale.shape)}")
        extra = next((f"{name}.{part}" for part in ASYMMETRIC if f"{name}.{part}" in self.shards.tensors), None)
        if extra is not None:
            raise CheckpointError(
                f"{self.shards.tensors[extra]}: expected symmetric INT4 in column order, found zero points or moved "
                "columns; quantize the model symmetrically, or start from its unquantized weights"
            )

    def rows(self, expert: int, matrix: int) -> Rows:
        name = self.name(expert, matrix)
        weight, scale = self.shards.tensors[f"{name}.weight_packed"], self.shards.tensors[f"{name}.weight_scale"]
        raw = self.shards.read(weight).reshape(weight.shape[0], -1)
        scales = DECODE[scale.dtype](self.shards.read(scale)).reshape(scale.shape)
        group = 2 * raw.shape[1] // scale.shape[1]

        def values(start: int, stop: int) -> NDArray[np.float64]:
            integers = unpack_codes(raw[start:stop]).astype(np.float64) - ZERO
            return integers * np.repeat(scales[start:stop], group, axis=1)

        return values
