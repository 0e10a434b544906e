"""torch with weights dequantized to bf16: what one writes without a kernel of one's own."""

from __future__ import annotations

from benchmarks.peers.base import PeerAbsentError, Step
from moetier.contract import LayerGeometry


class TorchBf16:
    """An expert at a time: gather its tokens, three matrix products, add the results."""

    name = "torch bf16"

    def __init__(self, geometry: LayerGeometry, threads: int) -> None:
        try:
            import torch
        except ImportError as error:
            raise PeerAbsentError(f"torch: {error}") from None
        self.torch = torch
        torch.set_num_threads(threads)
        shape = (geometry.experts, geometry.intermediate, geometry.hidden)
        self.gate, self.up = (torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05) for _ in range(2))
        self.down = torch.empty((shape[0], shape[2], shape[1]), dtype=torch.bfloat16).uniform_(-0.05, 0.05)

    def run(self, step: Step) -> None:
        torch = self.torch
        with torch.inference_mode():
            x = torch.from_numpy(step.x_bf16.view("int16")).view(torch.bfloat16)
            ids, weights = torch.from_numpy(step.ids), torch.from_numpy(step.weights)
            out = torch.zeros(x.shape, dtype=torch.float32)
            for expert in ids.unique().tolist():
                tokens, slot = (ids == expert).nonzero(as_tuple=True)
                some = x[tokens]
                h = torch.nn.functional.silu(some @ self.gate[expert].T) * (some @ self.up[expert].T)
                y = (h @ self.down[expert].T).float() * weights[tokens, slot, None]
                out.index_add_(0, tokens, y)
            out.to(torch.bfloat16)
