"""Interface of every source format: the experts of one layer as MXFP4 matrices, read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from moetier.checkpoint.names import MATRICES, MoeLayer
from moetier.checkpoint.shards import Shards, Tensor
from moetier.contract import BLOCK, E8M0_NAN, ExpertMatrices
from moetier.contract.requantize import Loss, NotFiniteError, Rows, requantize
from moetier.errors import CheckpointError, DamagedWeightsError

GATE, UP, DOWN = range(3)
LARGEST_SCALE = 127 + 125
"""E8M0 byte of the largest float32: a product of a weight and its scale beyond it is an infinity to every engine."""


@dataclass(frozen=True)
class Converted:
    """One expert, and what became of its values on the way; None: they are the checkpoint's own."""

    expert: ExpertMatrices
    loss: Loss | None


class LayerSource(ABC):
    """The routed experts of one layer in one number format and layout.

    A subclass checks names, dtypes and shapes when it is made, so that a build does not fail after hours, and reads
    only the bytes of the expert asked for. `convert` is called from several threads.
    """

    format: str
    """Name of the number format, as it stands in store.json."""
    requantized: ClassVar[bool]
    """Whether values may change on the way to MXFP4."""
    consumed: ClassVar[tuple[str, ...]]
    """Endings of the tensors that it reads: behind `.E.MATRIX.`, or behind `experts.` where experts are fused."""

    def __init__(self, shards: Shards, layer: MoeLayer, experts: int, config: dict[str, Any]) -> None:
        self.shards = shards
        self.layer = layer
        self.experts = experts
        self.config = config
        self.blocks: set[tuple[int, int, int, int]] = set()
        """(rows, columns, n, k): so many rows and columns share a scale in a matrix [n, k]."""
        self.hidden, self.intermediate = self.check()

    @classmethod
    @abstractmethod
    def matches(cls, shards: Shards, layer: MoeLayer) -> bool:
        """Whether the layer looks like this format, judged by names and dtypes of its first expert."""

    @abstractmethod
    def check(self) -> tuple[int, int]:
        """Check every tensor of the layer; (hidden, intermediate)."""

    @abstractmethod
    def convert(self, expert: int) -> Converted:
        """gate, up and down of one expert. A NaN among its scales or values is a CheckpointError."""

    def tensor(self, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> Tensor:
        """The tensor, with a dtype and (if given) a shape that were expected."""
        tensor = self.shards.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"tensor {name} is missing in {self.shards.folder}: expected {self.experts} experts in layer "
                f"{self.layer.number}; {_then(self.shards.elsewhere(name))}download the checkpoint again"
            )
        if tensor.dtype not in dtypes:
            raise CheckpointError(
                f"{tensor}: expected dtype {' or '.join(dtypes)} ({self.format} experts), found {tensor.dtype}"
            )
        if shapes and tensor.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(f"{tensor}: expected shape {wanted}, found {list(tensor.shape)}")
        return tensor


def _then(sentence: str) -> str:
    return f"{sentence}: " if sentence else ""


class PerExpertSource(LayerSource):
    """Layouts in which each matrix of each expert has tensors of its own, X.weight [out, in] and companions."""

    weight_dtypes: ClassVar[tuple[str, ...]]
    weight_suffix: ClassVar[str] = "weight"

    @classmethod
    def first_weight(cls, shards: Shards, layer: MoeLayer) -> Tensor | None:
        """The gate of expert 0, if the layer has this layout."""
        triple = spelling(shards, layer, cls.weight_suffix)
        return None if triple is None else shards.tensors[f"{layer.name}.0.{triple[GATE]}.{cls.weight_suffix}"]

    def check(self) -> tuple[int, int]:
        triple = spelling(self.shards, self.layer, self.weight_suffix)
        assert triple is not None
        self.spelling = triple
        gate = self.tensor(f"{self.name(0, GATE)}.{self.weight_suffix}", self.weight_dtypes)
        if len(gate.shape) != 2:
            raise CheckpointError(f"{gate}: expected a matrix, found shape {list(gate.shape)}")
        intermediate, hidden = gate.shape[0], gate.shape[1] * self.per_column(gate)
        for expert in range(self.experts):
            for matrix in range(3):
                rows, k = (hidden, intermediate) if matrix == DOWN else (intermediate, hidden)
                weight = self.tensor(f"{self.name(expert, matrix)}.{self.weight_suffix}", self.weight_dtypes)
                self.tensor(weight.name, self.weight_dtypes, (rows, k // self.per_column(weight)))
                self.check_companions(self.name(expert, matrix), rows, k)
        return hidden, intermediate

    def per_column(self, weight: Tensor) -> int:
        """Values that one element of a weight's row holds."""
        return 1

    def check_companions(self, name: str, rows: int, k: int) -> None:
        """Check the other tensors of a matrix [rows, k], such as its scales."""

    def parts(self, name: str) -> tuple[str, ...]:
        """`consumed` of the matrix that a tensor of this name belongs to."""
        return self.consumed

    def name(self, expert: int, matrix: int) -> str:
        """X of X.weight; matrix is GATE, UP or DOWN."""
        return f"{self.layer.name}.{expert}.{self.spelling[matrix]}"


class Requantizing(LayerSource):
    """Formats whose values are computed, row by row, and rounded to MXFP4."""

    requantized = True

    @abstractmethod
    def rows(self, expert: int, matrix: int) -> Rows:
        """The values of GATE, UP or DOWN as float64, a range of rows at a time."""

    def convert(self, expert: int) -> Converted:
        matrices, loss = [], Loss()
        for matrix in range(3):
            n, k = (self.hidden, self.intermediate) if matrix == DOWN else (self.intermediate, self.hidden)
            try:
                result, part = requantize(self.rows(expert, matrix), n, k)
                if result.scales.max() > LARGEST_SCALE:
                    row, block = np.argwhere(result.scales > LARGEST_SCALE)[0]
                    raise NotFiniteError(f"row {row}, columns {BLOCK * block} to {BLOCK * block + BLOCK - 1}")
            except NotFiniteError as error:
                raise DamagedWeightsError(
                    f"layer {self.layer.number} ({self.layer.name}) of {self.shards.folder}, expert {expert}, "
                    f"{('gate', 'up', 'down')[matrix]}: expected finite weights, found a NaN or infinity in {error}; "
                    "the weights are damaged: download them again"
                ) from error
            matrices.append(result)
            loss += part
        return Converted(ExpertMatrices(*matrices), loss)


def spelling(shards: Shards, layer: MoeLayer, suffix: str) -> tuple[str, str, str] | None:
    """How the layer's experts spell (gate, up, down), where each expert has tensors of its own."""
    for triple in MATRICES:
        if f"{layer.name}.0.{triple[GATE]}.{suffix}" in shards.tensors:
            return triple
    return None


def read_part(shards: Shards, tensor: Tensor, index: int) -> NDArray[np.uint8]:
    """The bytes of tensor[index], uint8 [bytes]."""
    size = tensor.nbytes // tensor.shape[0]
    return shards.read(tensor, index * size, size)


def refuse_nan_scales(tensor: Tensor, scales: NDArray[np.uint8]) -> None:
    """E8M0 byte 255 is no number; scales may be any part of the tensor."""
    bad = np.argwhere(scales == E8M0_NAN)
    if bad.size:
        raise DamagedWeightsError(
            f"{tensor}: expected scales that are numbers, found E8M0 byte 255 (NaN) at {bad[0].tolist()} and "
            f"{len(bad)} of them in all; the weights are damaged: download the file again"
        )
