"""MXFP4 experts in DeepSeek-V4's convention: X.weight [out, in/2] of two codes a byte, X.scale [out, in/32] in E8M0."""

from __future__ import annotations

from typing import Any

import numpy as np

from moetier.errors import CheckpointError
from moetier.formats import BLOCK, E8M0_NAN, ExpertMatrices, Matrix
from moetier.store.names import MoeLayer
from moetier.store.shards import Shards
from moetier.store.sources.base import LayerSource, spelling

CODES = ("I8", "U8", "F4")
SCALES = ("F8_E8M0", "U8")


class Mxfp4Source(LayerSource):
    """The checkpoint's own values: bytes move, no nibble changes."""

    format = "mxfp4"
    requantized = False

    @classmethod
    def matches(cls, shards: Shards, layer: MoeLayer) -> bool:
        triple = spelling(shards, layer)
        if triple is None:
            return False
        weight = shards.tensors[f"{layer.name}.0.{triple[0]}.weight"]
        return weight.dtype in CODES and f"{layer.name}.0.{triple[0]}.scale" in shards.tensors

    def check(self, config: dict[str, Any]) -> tuple[int, int]:
        triple = spelling(self.shards, self.layer)
        assert triple is not None
        self.spelling = triple
        gate = self.tensor(f"{self.layer.name}.0.{triple[0]}.weight", CODES)
        if len(gate.shape) != 2:
            raise CheckpointError(f"{gate}: expected a matrix [out, in/2], found shape {list(gate.shape)}")
        hidden, intermediate = _columns(gate.dtype, gate.shape[1]), gate.shape[0]
        for expert in range(self.experts):
            for matrix in range(3):
                self._check_matrix(expert, matrix, *((intermediate, hidden) if matrix < 2 else (hidden, intermediate)))
        return hidden, intermediate

    def _check_matrix(self, expert: int, matrix: int, rows: int, k: int) -> None:
        name = self._name(expert, matrix)
        weight = self.tensor(f"{name}.weight", CODES)
        self.tensor(weight.name, CODES, (rows, k if weight.dtype == "F4" else k // 2))
        self.tensor(f"{name}.scale", SCALES, (rows, k // BLOCK))

    def _name(self, expert: int, matrix: int) -> str:
        return f"{self.layer.name}.{expert}.{self.spelling[matrix]}"

    def read(self, expert: int) -> ExpertMatrices:
        return ExpertMatrices(*(self._matrix(expert, matrix) for matrix in range(3)))

    def _matrix(self, expert: int, matrix: int) -> Matrix:
        name = self._name(expert, matrix)
        weight, scale = self.shards.tensors[f"{name}.weight"], self.shards.tensors[f"{name}.scale"]
        codes = self.shards.read(weight).reshape(weight.shape[0], -1)
        scales = self.shards.read(scale).reshape(scale.shape)
        bad = np.argwhere(scales == E8M0_NAN)
        if bad.size:
            raise CheckpointError(
                f"{scale}: expected scales that are numbers, found E8M0 byte 255 (NaN) at {bad[0].tolist()} and "
                f"{len(bad)} of them in all; the weights are damaged: download the file again"
            )
        return Matrix(codes, scales)


def _columns(dtype: str, columns: int) -> int:
    """Elements of a row: F4 counts them, I8 and U8 hold two each."""
    return columns if dtype == "F4" else 2 * columns
