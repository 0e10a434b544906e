"""INT4 experts as compressed-tensors packs them (Kimi K2): eight 4-bit integers an I32 word, and a scale per group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moetier.checkpoint.names import MoeLayer
from moetier.checkpoint.shards import Shards, Tensor
from moetier.checkpoint.sources.base import PerExpertSource, Requantizing
from moetier.checkpoint.sources.floats import DECODE
from moetier.contract import unpack_codes
from moetier.contract.requantize import Rows
from moetier.errors import CheckpointError, DamagedWeightsError

ZERO = 8
"""The stored nibble is the integer plus this."""


class Int4Source(PerExpertSource, Requantizing):
    """value = (nibble - 8) * weight_scale[row, column / group]; X.weight_packed I32 [out, in/8], low nibble first."""

    format = "int4"
    consumed = ("weight_packed", "weight_scale", "weight_shape")
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
        self.blocks.add((1, k // max(1, scale.shape[1]), rows, k))
        if f"{name}.weight_shape" in self.shards.tensors:
            self.tensor(f"{name}.weight_shape", ("I64", "I32"), (2,))

    def rows(self, expert: int, matrix: int) -> Rows:
        name = self.name(expert, matrix)
        weight, scale = self.shards.tensors[f"{name}.weight_packed"], self.shards.tensors[f"{name}.weight_scale"]
        raw = self.shards.read(weight).reshape(weight.shape[0], -1)
        self._check_shape(name, raw.shape[0], 2 * raw.shape[1])
        scales = DECODE[scale.dtype](self.shards.read(scale)).reshape(scale.shape)
        group = 2 * raw.shape[1] // scale.shape[1]

        def values(start: int, stop: int) -> NDArray[np.float64]:
            integers = unpack_codes(raw[start:stop]).astype(np.float64) - ZERO
            return integers * np.repeat(scales[start:stop], group, axis=1)

        return values

    def _check_shape(self, name: str, rows: int, k: int) -> None:
        """Require that the unpacked shape that the checkpoint states is that of what is packed."""
        shape = self.shards.tensors.get(f"{name}.weight_shape")
        if shape is None:
            return
        found = self.shards.read(shape).view("<i8" if shape.dtype == "I64" else "<i4").tolist()
        if found != [rows, k]:
            raise DamagedWeightsError(
                f"{shape}: expected [{rows}, {k}], the shape of what is packed, found {found}; the weights are "
                "damaged: download them again"
            )
