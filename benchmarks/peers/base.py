"""What every contestant of the paired run is: one routed-expert layer that takes the same step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moetier.contract import LayerGeometry


class PeerAbsentError(Exception):
    """The peer cannot be installed or built here; the text says why."""


@dataclass(frozen=True)
class Step:
    """Inputs of a layer call: x [M, hidden] in both forms that peers take, ids and weights [M, top_k]."""

    x: NDArray[np.float32]
    x_bf16: NDArray[np.uint16]
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]

    @classmethod
    def random(cls, geometry: LayerGeometry, tokens: int, rng: np.random.Generator) -> Step:
        bits = (rng.standard_normal((tokens, geometry.hidden), np.float32).view(np.uint32) >> 16).astype(np.uint16)
        ids = np.argsort(rng.random((tokens, geometry.experts)), axis=1)[:, : geometry.top_k].astype(np.int32)
        weights = rng.random((tokens, geometry.top_k), np.float32)
        return cls((bits.astype(np.uint32) << 16).view(np.float32), bits, np.ascontiguousarray(ids), weights)


class Peer(Protocol):
    """A layer with weights of its own, all of them in memory."""

    name: str

    def run(self, step: Step) -> None:
        """Compute the step, results into memory of the peer's own."""
