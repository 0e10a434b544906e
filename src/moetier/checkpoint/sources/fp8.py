"""FP8 experts: X.weight E4M3 [out, in] with one scale per block, per row or per matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetier.checkpoint import config as keys
from moetier.checkpoint.names import MoeLayer
from moetier.checkpoint.shards import Shards, Tensor
from moetier.checkpoint.sources.base import PerExpertSource, Requantizing, refuse_nan_scales, spelling
from moetier.checkpoint.sources.floats import DECODE
from moetier.checkpoint.sources.said import groups_of
from moetier.contract import e8m0_to_float
from moetier.contract.e4m3 import E4M3_VALUES
from moetier.contract.requantize import Rows
from moetier.errors import CheckpointError

SCALE_SUFFIXES = ("weight_scale_inv", "scale", "weight_scale")
"""Names of the scales. All of them multiply, whatever the name says."""
SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")
DEFAULT_BLOCK = (128, 128)


class Fp8Source(PerExpertSource, Requantizing):
    """value = E4M3 * scale[row / block rows, column / block columns]."""

    format = "fp8"
    consumed = ("weight", *SCALE_SUFFIXES)
    weight_dtypes = ("F8_E4M3",)

    @classmethod
    def matches(cls, shards: Shards, layer: MoeLayer) -> bool:
        weight = cls.first_weight(shards, layer)
        return weight is not None and weight.dtype == "F8_E4M3"

    def check(self) -> tuple[int, int]:
        names = spelling(self.shards, self.layer, self.weight_suffix) or ()
        self.block = block_size(self.config, [f"{self.layer.name}.0.{name}" for name in names])
        return super().check()

    def check_companions(self, name: str, rows: int, k: int) -> None:
        self.blocks.add((*self._block_of(self._scale(name), rows, k), rows, k))

    def parts(self, name: str) -> tuple[str, ...]:
        """One scale of each matrix: the one that `_scale` takes."""
        return "weight", self._scale(name.rpartition(".")[0]).name.rpartition(".")[2]

    def rows(self, expert: int, matrix: int) -> Rows:
        name = self.name(expert, matrix)
        weight, scale = self.shards.tensors[f"{name}.weight"], self._scale(name)
        n, k = weight.shape
        block_rows, block_columns = self._block_of(scale, n, k)
        scales = self._scales(scale).reshape(-(-n // block_rows), -(-k // block_columns))
        raw = self.shards.read(weight).reshape(n, k)

        def values(start: int, stop: int) -> NDArray[np.float64]:
            per_row = scales[np.arange(start, stop) // block_rows]
            scaled: NDArray[np.float64] = E4M3_VALUES[raw[start:stop]]
            scaled *= np.repeat(per_row, block_columns, axis=1)[:, :k]
            return scaled

        return values

    def _scale(self, name: str) -> Tensor:
        found = next((f"{name}.{s}" for s in SCALE_SUFFIXES if f"{name}.{s}" in self.shards.tensors), None)
        return self.tensor(found or f"{name}.{SCALE_SUFFIXES[0]}", SCALE_DTYPES)

    def _block_of(self, scale: Tensor, n: int, k: int) -> tuple[int, int]:
        """Rows and columns that share one scale, by config.json and the scale's shape."""
        if self.block is None and scale.shape in ((n, 1), (n,)):
            return 1, k
        if self.block is None and scale.shape in ((), (1,), (1, 1)):
            return n, k
        rows, columns = self.block or DEFAULT_BLOCK
        self.tensor(scale.name, SCALE_DTYPES, (-(-n // rows), -(-k // columns)))
        return rows, columns

    def _scales(self, tensor: Tensor) -> NDArray[np.float64]:
        raw = self.shards.read(tensor)
        if tensor.dtype != "F8_E8M0":
            return DECODE[tensor.dtype](raw)
        refuse_nan_scales(tensor, raw)
        return e8m0_to_float(raw)


def block_size(config: dict[str, Any], modules: list[str]) -> tuple[int, int] | None:
    """(rows, columns) that share a scale in these modules by config.json; None if it does not say.

    Shapes of scales do not tell every wrong size, so what is said of other modules is not believed, and what is said
    twice must be the same.
    """
    found: dict[tuple[int, int], str] = {}
    for quantization in keys.quantizations(config):
        said = [("weight_block_size", quantization.get("weight_block_size"))]
        weights = [group.get("weights") for group in groups_of(quantization, modules)]
        blocks = [one for one in weights if isinstance(one, dict) and one.get("strategy") == "block"]
        said += [("block_structure", one.get("block_structure")) for one in blocks]
        for key, value in said:
            if value is not None:
                found.setdefault(_block(key, value), key)
    if len(found) > 1:
        told = " and ".join(f"{key} {list(block)}" for block, key in found.items())
        raise CheckpointError(
            f"config.json: expected one size of the blocks that share a scale in {modules[0]}, found {told}; "
            "config.json does not belong to these weights: download both again"
        )
    return next(iter(found), None)


def _block(key: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise CheckpointError(f"config.json: expected two positive integers for {key}, found {value!r:.80}")
    return value[0], value[1]
