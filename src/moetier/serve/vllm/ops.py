"""The layer call as a torch operator, so that torch.compile takes it as it is and never looks inside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from moetier.layer import TieredLayer
from moetier.serve.failure import reported

_layers: list[tuple[TieredLayer, Path | None]] = []


def register_layer(layer: TieredLayer, failure_file: Path | None) -> int:
    """Key by which the operator finds the layer; it stays valid for the life of the process."""
    _layers.append((layer, failure_file))
    return len(_layers) - 1


@torch.library.custom_op("moetier::routed_experts", mutates_args=())
def routed_experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, key: int) -> torch.Tensor:
    """X [T, hidden] bf16 or float32, weights float32 and ids int [T, top_k] -> [T, hidden] of x's dtype and device."""
    host = x.detach().cpu().contiguous()
    activations = host.view(torch.uint16).numpy() if host.dtype == torch.bfloat16 else host.numpy()
    out = np.empty(host.shape, np.uint16)
    layer, failure_file = _layers[key]
    with reported(failure_file):
        layer.forward(
            activations,
            ids.detach().cpu().contiguous().numpy(),
            weights.detach().to("cpu", torch.float32).contiguous().numpy(),
            out,
        )
    return torch.from_numpy(out).view(torch.bfloat16).to(device=x.device, dtype=x.dtype)


@routed_experts.register_fake
def _(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, key: int) -> torch.Tensor:
    return torch.empty_like(x)
