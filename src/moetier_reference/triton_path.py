"""Launches the Triton kernels of a layer over buffers that are allocated once."""

from __future__ import annotations

from typing import Any

import torch

from moetier.contract import BLOCK
from moetier.contract.oracle import segments
from moetier.kernels.cuda.base import Call, Sizes
from moetier_reference import triton_kernels as kernels

DECODE_TILE, PREFILL_TILE = 16, 64
TILE_ROWS = 32
"""Weight rows of a tile: with more, registers spill on sm_80."""
DECODE_PAIRS_PER_EXPERT = 16
"""Up to this many pairs an expert on average, tiles are DECODE_TILE pairs high."""
PLAN_BLOCK = 1024

Settings = dict[str, int]


def power_of_two_at_least(n: int) -> int:
    return 1 << (n - 1).bit_length()


def widest(n: int, limit: int) -> int:
    """The largest power of two <= limit that divides n."""
    return min(n & -n, limit)


class TritonPath:
    """The portable path. One object serves every layer of the same sizes, one call at a time."""

    def __init__(self, sizes: Sizes, max_tokens: int, device: torch.device) -> None:
        self.sizes, self.max_tokens = sizes, max_tokens
        g = sizes.geometry
        pairs = max_tokens * g.top_k

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.q = buffer(max_tokens, g.hidden, dtype=torch.int8)
        self.e = buffer(max_tokens, g.hidden // BLOCK, dtype=torch.int8)
        self.hq = buffer(pairs, g.intermediate, dtype=torch.int8)
        self.he = buffer(pairs, g.intermediate // BLOCK, dtype=torch.int8)
        self.order = buffer(pairs, dtype=torch.int32)
        self.counts, self.offsets, self.ends, self.tile_ends = (buffer(g.experts, dtype=torch.int32) for _ in range(4))

    def rows(self, call: Call) -> None:
        g, layout = self.sizes.geometry, self.sizes.layout
        tokens, pairs = call.x.shape[0], call.ids.numel()
        decode = pairs <= DECODE_PAIRS_PER_EXPERT * g.experts
        bm = DECODE_TILE if decode else PREFILL_TILE
        settings: Settings = {"num_warps": 4, "num_stages": 4 if decode else 3}
        tiles = min(pairs, g.experts + pairs // bm)
        inner = g.slice_intermediate
        common: dict[str, Any] = {
            "E": g.experts,
            "E_PAD": power_of_two_at_least(g.experts),
            "HIDDEN": g.hidden,
            "INNER": inner,
            "SLICES": g.slices,
            "SLICE_BYTES": layout.slice_bytes,
            "BM": bm,
            "enable_fp_fusion": False,
            **settings,
        }
        self._quantize(call.x, tokens)
        self._plan(call, pairs, bm)
        plan = (self.order, self.offsets, self.ends, self.tile_ends, call.slot_table, call.slots, call.slots.stride(0))
        bn = widest(inner, TILE_ROWS)
        kernels.gate_up[(tiles, g.intermediate // bn)](
            self.q, self.e, call.weights, *plan, self.hq, self.he,
            TOP_K=g.top_k, S=segments(g.hidden // BLOCK), LIMIT=self.sizes.family.swiglu_limit,
            WEIGHTED=self.sizes.family.route_weight_before_down, BN=bn, **common,
        )  # fmt: skip
        bn = widest(g.hidden, TILE_ROWS)
        kernels.down[(tiles, g.hidden // bn)](
            self.hq, self.he, *plan, call.rows, S=segments(inner // BLOCK), BN=bn, **common
        )

    def forward(self, call: Call, out: torch.Tensor) -> None:
        self.rows(call)
        self._combine(call, out, checked=True)

    def combine(self, call: Call, out: torch.Tensor) -> None:
        self._combine(call, out, checked=False)

    def _quantize(self, x: torch.Tensor, tokens: int) -> None:
        hidden = self.sizes.geometry.hidden
        blocks = min(32, power_of_two_at_least(hidden // BLOCK))
        kernels.quantize[(tokens, -(-hidden // BLOCK // blocks))](
            x.view(torch.int16), self.q, self.e, K=hidden, B=blocks, enable_fp_fusion=False
        )

    def _plan(self, call: Call, pairs: int, bm: int) -> None:
        experts = self.sizes.geometry.experts
        grid = (-(-pairs // PLAN_BLOCK),)
        kernels.plan_count[grid](call.ids, call.slot_table, self.counts, pairs, E=experts, BLOCK=PLAN_BLOCK)
        kernels.plan_scan[(1,)](
            self.counts, self.offsets, self.ends, self.tile_ends, E=experts, E_PAD=power_of_two_at_least(experts), BM=bm
        )
        kernels.plan_scatter[grid](call.ids, call.slot_table, self.ends, self.order, pairs, E=experts, BLOCK=PLAN_BLOCK)

    def _combine(self, call: Call, out: torch.Tensor, checked: bool) -> None:
        g = self.sizes.geometry
        bn = min(1024, power_of_two_at_least(g.hidden))
        kernels.combine[(call.x.shape[0], -(-g.hidden // bn))](
            call.rows, call.ids, call.weights, call.slot_table, out.view(torch.int16),
            E=g.experts, TOP_K=g.top_k, TOP_K_PAD=power_of_two_at_least(g.top_k), HIDDEN=g.hidden,
            WEIGHTED=self.sizes.family.route_weight_before_down, CHECKED=checked, BN=bn, enable_fp_fusion=False,
        )  # fmt: skip
