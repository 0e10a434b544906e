"""NVFP4 experts as modelopt writes them: E2M1, an E4M3 scale per 16 columns, and a float32 scale per matrix or row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moetier.checkpoint.names import MoeLayer
from moetier.checkpoint.shards import Shards, Tensor
from moetier.checkpoint.sources.base import PerExpertSource, Requantizing
from moetier.contract import E2M1_VALUES, unpack_codes
from moetier.contract.e4m3 import E4M3_VALUES
from moetier.contract.requantize import Rows

GROUP = 16


class Nvfp4Source(PerExpertSource, Requantizing):
    """value = E2M1 * weight_scale * weight_scale_2, exact in float64. The new scales absorb weight_scale_2."""

    format = "nvfp4"
    consumed = ("weight", "weight_scale", "weight_scale_2")
    weight_dtypes = ("U8",)

    @classmethod
    def matches(cls, shards: Shards, layer: MoeLayer) -> bool:
        weight = cls.first_weight(shards, layer)
        return weight is not None and weight.dtype == "U8" and f"{weight.name}_scale_2" in shards.tensors

    def per_column(self, weight: Tensor) -> int:
        return 2

    def check_companions(self, name: str, rows: int, k: int) -> None:
        self.tensor(f"{name}.weight_scale", ("F8_E4M3",), (rows, k // GROUP))
        self.blocks.add((1, GROUP, rows, k))
        self.tensor(f"{name}.weight_scale_2", ("F32",), (), (1,), (rows,), (rows, 1))

    def rows(self, expert: int, matrix: int) -> Rows:
        name = self.name(expert, matrix)
        weight, scale, second = (
            self.shards.tensors[f"{name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")
        )
        n = weight.shape[0]
        codes = self.shards.read(weight).reshape(n, -1)
        scales = self.shards.read(scale).reshape(n, -1)
        per_row = np.broadcast_to(self.shards.read(second).view("<f4").astype(np.float64), n)[:, None]

        def values(start: int, stop: int) -> NDArray[np.float64]:
            part = E4M3_VALUES[scales[start:stop]] * per_row[start:stop]
            return E2M1_VALUES.astype(np.float64)[unpack_codes(codes[start:stop])] * np.repeat(part, GROUP, axis=1)

        return values
