"""What every source format offers: the experts of one layer as MXFP4 matrices, read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from moetier.errors import CheckpointError
from moetier.formats import ExpertMatrices
from moetier.store.names import MATRICES, MoeLayer
from moetier.store.shards import Shards, Tensor


class LayerSource(ABC):
    """The routed experts of one layer in one number format.

    A subclass checks names, dtypes and shapes when it is made, so that a build does not fail after hours, and reads
    only the bytes of the expert asked for. `read` is called from several threads.
    """

    format: ClassVar[str]
    """Name of the number format, as it stands in store.json."""
    requantized: ClassVar[bool]
    """Whether values change on the way to MXFP4."""

    def __init__(self, shards: Shards, layer: MoeLayer, experts: int, config: dict[str, Any]) -> None:
        self.shards = shards
        self.layer = layer
        self.experts = experts
        self.hidden, self.intermediate = self.check(config)

    @classmethod
    @abstractmethod
    def matches(cls, shards: Shards, layer: MoeLayer) -> bool:
        """Whether the layer looks like this format, judged by names and dtypes of its first expert."""

    @abstractmethod
    def check(self, config: dict[str, Any]) -> tuple[int, int]:
        """Check every tensor of the layer; (hidden, intermediate)."""

    @abstractmethod
    def read(self, expert: int) -> ExpertMatrices:
        """gate, up and down of one expert. A scale of NaN or a read that fails is a CheckpointError."""

    def tensor(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor, with a dtype and shape that were expected."""
        tensor = self.shards.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"tensor {name} is missing in {self.shards.folder}: expected {self.experts} experts in layer "
                f"{self.layer.number}; download the checkpoint again"
            )
        if tensor.dtype not in dtypes:
            raise CheckpointError(
                f"{tensor}: expected dtype {' or '.join(dtypes)} ({self.format} experts), found {tensor.dtype}"
            )
        if shape is not None and tensor.shape != shape:
            raise CheckpointError(f"{tensor}: expected shape {list(shape)}, found {list(tensor.shape)}")
        return tensor


def spelling(shards: Shards, layer: MoeLayer) -> tuple[str, str, str] | None:
    """How the layer's experts spell (gate, up, down), where each expert has tensors of its own."""
    for triple in MATRICES:
        if f"{layer.name}.0.{triple[0]}.weight" in shards.tensors:
            return triple
    return None
