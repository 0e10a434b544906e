"""A layer's experts out of a store, dequantized exactly, computed in any of the arithmetics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moetier.contract import BLOCK, E2M1_VALUES, Family, Matrix, unpack_codes
from moetier.contract.e8m0 import e8m0_to_float
from moetier.store.store import Store
from moetier_bench.eval import EvalError
from moetier_bench.eval.quality_numerics import Arithmetic


def dequantize(matrix: Matrix) -> NDArray[np.float32]:
    """An MXFP4 matrix [N, K] as float32 [N, K], every value exact; EvalError where float32 cannot hold one."""
    n, k = matrix.shape
    codes = E2M1_VALUES[unpack_codes(matrix.codes)].astype(np.float64).reshape(n, k // BLOCK, BLOCK)
    values = (codes * e8m0_to_float(matrix.scales)[..., None]).reshape(n, k)
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if not np.array_equal(rounded, values):
        raise EvalError("a weight of the store is no float32 number; quality cannot be compared in float32")
    return rounded


@dataclass(frozen=True)
class Experts:
    """gate_up [experts, 2 * intermediate, hidden] (gate first) and down [experts, hidden, intermediate], float32."""

    gate_up: Tensor
    down: Tensor
    family: Family

    @classmethod
    def of_layer(cls, store: Store, number: int) -> Experts:
        """All experts of the layer that has this number in the checkpoint."""
        geometry = store.manifest.layer_geometry
        gate_up = torch.empty(geometry.experts, 2 * geometry.intermediate, geometry.hidden)
        down = torch.empty(geometry.experts, geometry.hidden, geometry.intermediate)
        record = np.empty(store.layout.stride, np.uint8)
        for expert in range(geometry.experts):
            store.read_record(store.layer_index(number), expert, record)
            matrices = store.layout.unpack(record)
            gate_up[expert, : geometry.intermediate] = torch.from_numpy(dequantize(matrices.gate))
            gate_up[expert, geometry.intermediate :] = torch.from_numpy(dequantize(matrices.up))
            down[expert] = torch.from_numpy(dequantize(matrices.down))
        return cls(gate_up, down, store.manifest.layer_family)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, arithmetic: Arithmetic) -> Tensor:
        """X [T, hidden], ids int and route weights [T, top_k] -> [T, hidden] of the arithmetic's dtype.

        A token's pairs add up in ascending expert id.
        """
        operand = arithmetic.operand(x.to(arithmetic.dtype))
        route = weights.to(arithmetic.dtype).flatten()
        out = torch.zeros_like(operand)
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self.down.shape[0]).tolist()
        for expert, pairs in enumerate(torch.split(order, counts)):
            if pairs.numel():
                tokens = pairs // ids.shape[1]
                out.index_add_(0, tokens, self._expert(expert, operand[tokens], route[pairs, None], arithmetic))
        return arithmetic.output(out)

    def _expert(self, expert: int, operand: Tensor, weight: Tensor, arithmetic: Arithmetic) -> Tensor:
        """One expert on M rounded rows, its route weight [M, 1] applied."""
        dtype, limit = arithmetic.dtype, self.family.swiglu_limit
        gate, up = arithmetic.product(operand @ self.gate_up[expert].to(dtype).T).chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        h = torch.nn.functional.silu(gate) * up
        if self.family.route_weight_before_down:
            return arithmetic.operand(h * weight) @ self.down[expert].to(dtype).T
        return arithmetic.operand(h) @ self.down[expert].to(dtype).T * weight
