"""From torch tensors to the layer and back."""

from __future__ import annotations

import numpy as np
import torch

from moetier.engine import TieredLayer
from moetier.engine.hybrid import HybridLayer


def given(x: torch.Tensor) -> torch.Tensor:
    """Return x [T, hidden] as the contract takes it, bf16, whatever the model's dtype and whichever tier computes."""
    return x.detach().to(torch.bfloat16).contiguous()


def run_layer(layer: TieredLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """X [T, hidden] bf16 or float32, ids int and weights float [T, top_k] -> [T, hidden] of x's dtype and device."""
    host = given(x).cpu()
    out = np.empty(host.shape, np.uint16)
    layer.forward(
        host.view(torch.uint16).numpy(),
        ids.detach().cpu().contiguous().numpy(),
        weights.detach().to("cpu", torch.float32).contiguous().numpy(),
        out,
    )
    return torch.from_numpy(out).view(torch.bfloat16).to(device=x.device, dtype=x.dtype)


def run_hybrid_layer(layer: HybridLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As `run_layer`, on the device that all are on; launches only, where the device plans the call."""
    rows = given(x)
    if rows.data_ptr() % 16:  # a view into something larger; the kernels read 16 bytes at a time
        rows = rows.clone()
    out = layer.forward(rows, ids.to(torch.int32).contiguous(), weights.to(torch.float32).contiguous())
    return out.to(x.dtype)
