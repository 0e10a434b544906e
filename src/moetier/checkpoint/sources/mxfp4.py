"""MXFP4 experts, whose bytes move as they are: DeepSeek-V4's convention, and gpt-oss's fused blocks."""

from __future__ import annotations

import numpy as np

from moetier.checkpoint.names import MoeLayer
from moetier.checkpoint.shards import Shards, Tensor
from moetier.checkpoint.sources.base import Converted, LayerSource, PerExpertSource, read_part, refuse_nan_scales
from moetier.contract import BLOCK, ExpertMatrices, Matrix
from moetier.errors import CheckpointError

SCALES = ("F8_E8M0", "U8")


class Mxfp4Source(PerExpertSource):
    """X.weight [out, in/2] of two codes a byte, low nibble first, and X.scale [out, in/32] in E8M0."""

    format = "mxfp4"
    requantized = False
    consumed = ("weight", "scale")
    weight_dtypes = ("I8", "U8", "F4")

    @classmethod
    def matches(cls, shards: Shards, layer: MoeLayer) -> bool:
        weight = cls.first_weight(shards, layer)
        if weight is None or weight.dtype not in cls.weight_dtypes:
            return False
        return weight.name.removesuffix("weight") + "scale" in shards.tensors

    def per_column(self, weight: Tensor) -> int:
        return 1 if weight.dtype == "F4" else 2

    def check_companions(self, name: str, rows: int, k: int) -> None:
        self.tensor(f"{name}.scale", SCALES, (rows, k // BLOCK))
        self.blocks.add((1, BLOCK, rows, k))

    def convert(self, expert: int) -> Converted:
        return Converted(ExpertMatrices(*(self._matrix(self.name(expert, matrix)) for matrix in range(3))), None)

    def _matrix(self, name: str) -> Matrix:
        weight, scale = self.shards.tensors[f"{name}.weight"], self.shards.tensors[f"{name}.scale"]
        codes = self.shards.read(weight).reshape(weight.shape[0], -1)
        scales = self.shards.read(scale).reshape(scale.shape)
        refuse_nan_scales(scale, scales)
        return Matrix(codes, scales)


class GptOssSource(LayerSource):
    """gate_up_proj_blocks [E, 2I, H/32, 16], rows gate and up by turns, and down_proj_blocks [E, H, I/32, 16]; _scales.

    Its biases stay in the checkpoint: the contract has none, so serving refuses such a model.
    """

    format = "mxfp4"
    requantized = False
    consumed = tuple(f"{m}_{p}" for m in ("gate_up_proj", "down_proj") for p in ("blocks", "scales", "bias"))

    @classmethod
    def matches(cls, shards: Shards, layer: MoeLayer) -> bool:
        return f"{layer.name}.gate_up_proj_blocks" in shards.tensors

    def check(self) -> tuple[int, int]:
        down = self.tensor(f"{self.layer.name}.down_proj_blocks", ("U8",))
        if len(down.shape) != 4:
            raise CheckpointError(f"{down}: expected shape [experts, out, in/32, 16], found {list(down.shape)}")
        hidden, intermediate = down.shape[1], down.shape[2] * BLOCK
        for name, rows, k in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
            self.tensor(f"{self.layer.name}.{name}_blocks", ("U8",), (self.experts, rows, k // BLOCK, BLOCK // 2))
            self.tensor(f"{self.layer.name}.{name}_scales", SCALES, (self.experts, rows, k // BLOCK))
        return hidden, intermediate

    def convert(self, expert: int) -> Converted:
        both = self._matrix("gate_up_proj", expert)
        gate, up = (
            Matrix(np.ascontiguousarray(both.codes[turn::2]), np.ascontiguousarray(both.scales[turn::2]))
            for turn in (0, 1)
        )
        return Converted(ExpertMatrices(gate, up, self._matrix("down_proj", expert)), None)

    def _matrix(self, name: str, expert: int) -> Matrix:
        rows = self.hidden if name == "down_proj" else 2 * self.intermediate
        blocks = self.shards.tensors[f"{self.layer.name}.{name}_blocks"]
        scale = self.shards.tensors[f"{self.layer.name}.{name}_scales"]
        scales = read_part(self.shards, scale, expert).reshape(rows, -1)
        refuse_nan_scales(scale, scales)
        return Matrix(read_part(self.shards, blocks, expert).reshape(rows, -1), scales)
