"""The layer call as a torch operator, so that torch.compile takes it as it is and never looks inside."""

from __future__ import annotations

from pathlib import Path

import torch

from moetier.engine import TieredLayer
from moetier.engine.hybrid import HybridLayer
from moetier.engine.tensors import run_hybrid_layer, run_layer
from moetier.launch.failure import reported

_layers: list[tuple[TieredLayer | HybridLayer, Path | None]] = []


def register_layer(layer: TieredLayer | HybridLayer, failure_file: Path | None) -> int:
    """Key by which the operator finds the layer; it stays valid for the life of the process."""
    _layers.append((layer, failure_file))
    return len(_layers) - 1


@torch.library.custom_op("moetier::routed_experts", mutates_args=())
def routed_experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, key: int) -> torch.Tensor:
    """X [T, hidden] bf16 or float32, weights float32 and ids int [T, top_k] -> [T, hidden] of x's dtype and device."""
    layer, failure_file = _layers[key]
    with reported(failure_file):
        if isinstance(layer, HybridLayer):
            return run_hybrid_layer(layer, x, ids, weights)
        return run_layer(layer, x, ids, weights)


@routed_experts.register_fake
def _(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, key: int) -> torch.Tensor:
    return torch.empty_like(x)
