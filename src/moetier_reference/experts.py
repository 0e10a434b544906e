"""A routed-expert layer on a device: records in slots, tokens in, the contract's bits out, by CUDA or by Triton."""

from __future__ import annotations

from typing import Literal

import torch

from moetier.contract import Family, LayerGeometry
from moetier.errors import SettingsError
from moetier.kernels.cuda.base import Call, DevicePath, Sizes

Backend = Literal["cuda", "triton"]


def default_backend(device: torch.device) -> Backend:
    """The CUDA path on an NVIDIA GPU of compute capability 8.0 or newer, else Triton."""
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) >= (8, 0):
        return "cuda"
    return "triton"


class DeviceExperts:
    """Routed experts whose records are in slots on one device; one object serves every layer of the same sizes.

    Buffers for `max_tokens` tokens are allocated here and shared by all calls, so calls of one object must follow each
    other on one stream. A call of more tokens is cut. No call allocates (if `out` is given), synchronizes or reads a
    result back, so all can be captured into a CUDA graph; the slot table is read on the device when the graph runs.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
        family: Family,
        max_tokens: int,
        device: torch.device | str = "cuda",
        backend: Backend | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.sizes = Sizes(geometry, family)
        self.max_tokens = max_tokens
        self.backend: Backend = backend or default_backend(self.device)
        self.path = self._path()
        self._rows = torch.zeros((max_tokens, geometry.top_k, geometry.hidden), dtype=torch.float32, device=self.device)

    def _path(self) -> DevicePath:
        if self.backend == "cuda":
            from moetier.kernels.cuda.path import CudaPath

            return CudaPath(self.sizes, self.max_tokens, self.device)
        from moetier_reference.triton_path import TritonPath

        return TritonPath(self.sizes, self.max_tokens, self.device)

    def forward(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        slot_table: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The whole layer: x bf16 [T, hidden] -> bf16 [T, hidden].

        ids int32 and weights float32 [T, top_k]; slot_table int32 [experts]: slot or -1; slots uint8 [slots, stride].
        Ids outside [0, experts) are skipped. A token routed to an expert without a slot comes out as NaN: use `rows`
        and `combine` where another tier computes the rest.
        """
        out = torch.empty_like(x) if out is None else out
        self._check(x, ids, weights, slot_table, slots)
        for start in range(0, x.shape[0], self.max_tokens):
            part = slice(start, start + self.max_tokens)
            rows = self._rows[: x[part].shape[0]]
            self.path.forward(Call(x[part], ids[part], weights[part], slot_table, slots, rows), out[part])
        return out

    def rows(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        slot_table: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Each pair's answer y, float32 [T, top_k, hidden], before the combination; rows without a slot stay."""
        self._check(x, ids, weights, slot_table, slots)
        for start in range(0, x.shape[0], self.max_tokens):
            part = slice(start, start + self.max_tokens)
            self.path.rows(Call(x[part], ids[part], weights[part], slot_table, slots, out[part]))
        return out

    def combine(
        self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows float32 [T, top_k, hidden] of every tier -> bf16 [T, hidden], in the contract's order."""
        out = (
            torch.empty(rows.shape[0], rows.shape[2], dtype=torch.bfloat16, device=rows.device) if out is None else out
        )
        none = torch.empty(0, dtype=torch.uint8, device=rows.device)
        if rows.shape[0]:
            self.path.combine(Call(out, ids, weights, ids, none, rows), out)
        return out

    def _check(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        slot_table: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        g, tokens = self.sizes.geometry, x.shape[0]
        wanted = {
            "x": (x, torch.bfloat16, (tokens, g.hidden)),
            "ids": (ids, torch.int32, (tokens, g.top_k)),
            "weights": (weights, torch.float32, (tokens, g.top_k)),
            "slot_table": (slot_table, torch.int32, (g.experts,)),
            "slots": (slots, torch.uint8, (slots.shape[0], self.sizes.layout.stride)),
        }
        for name, (tensor, dtype, shape) in wanted.items():
            aligned = name != "x" or tensor.data_ptr() % 16 == 0
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous() or not aligned:
                found = f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} at {tensor.data_ptr():#x}"
                raise SettingsError(
                    f"{name} must be contiguous {dtype} {shape} (x: from a multiple of 16 bytes on), found {found}; "
                    "convert it before the layer"
                )
