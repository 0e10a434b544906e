"""Launches the CUDA kernels of a layer: a decode path for few pairs, a prefill path for many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from moetier.formats import BLOCK
from moetier.kernels.gpu import nvrtc
from moetier.kernels.gpu.base import Call, Sizes
from moetier.kernels.oracle import segments

MAX_DECODE_PAIRS = 128
THREADS = 256
META_BYTES = 8


@dataclass(frozen=True)
class PanelSizes:
    """Sizes of panel_mma.cuh or panel_wgmma.cuh: what a block of the prefill kernels computes, and its ring."""

    pairs: int
    rows: int
    block_bytes: int
    """Activations of one block of 32 in shared memory."""
    alignment: int
    depth: int
    stage_blocks: int

    def shared_bytes(self, blocks: int) -> int:
        stage = largest_divisor(blocks // segments(blocks), self.stage_blocks)
        bytes_a_stage = stage * (self.rows * 17 + self.block_bytes)
        ring = self.depth * (-(-bytes_a_stage // self.alignment) * self.alignment)
        return max(ring, self.rows * (self.pairs + 9) * 4)


WGMMA = PanelSizes(pairs=128, rows=128, block_bytes=128 * 64, alignment=1024, depth=4, stage_blocks=4)
MMA = PanelSizes(pairs=48, rows=256, block_bytes=48 * 64 + 64, alignment=16, depth=6, stage_blocks=2)
MMA_SMALL = replace(MMA, depth=3)
"""For devices with about 100 KB of shared memory a block."""


def largest_divisor(n: int, most: int) -> int:
    return next(d for d in range(most, 0, -1) if n % d == 0)


@dataclass(frozen=True)
class RingSizes:
    """A warp's ring in decode.cuh, for gate and up and for down: blocks in a stage at most, and stages."""

    up_blocks: int
    up_depth: int
    down_blocks: int
    down_depth: int


@dataclass(frozen=True)
class HybridArguments:
    """What the kernels of a hybrid step are given beside the call; nothing where the step is not hybrid."""

    live: torch.Tensor | None = None
    """int32 [1] on the device: how many of the tokens are real."""
    step: torch.Tensor | None = None
    box: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    patience_ns: int = 0

    def up(self) -> tuple[torch.Tensor | None, ...]:
        return self.live, self.step

    def down(self) -> tuple[torch.Tensor | int | None, ...]:
        return self.live, self.step, self.box, self.counts, self.patience_ns


NOT_HYBRID = HybridArguments()


def panel_sizes(arch: str, shared_bytes_a_block: int) -> PanelSizes:
    """Which panels a device of `arch` ("sm_90a") with that much shared memory a block computes."""
    if arch == "sm_90a":
        return WGMMA
    return MMA if shared_bytes_a_block > 160 * 1024 else MMA_SMALL


DECODE_RINGS = {1: RingSizes(4, 2, 9, 3), 8: RingSizes(4, 2, 9, 2)}
"""By group size."""


def decode_macros(sizes: Sizes, group: int, box_tokens: int = 0) -> dict[str, str | int]:
    """What decode.cu is compiled with. box_tokens: for hybrid steps of at most so many tokens."""
    ring = DECODE_RINGS[group]
    macros = _macros(sizes, box_tokens) | {
        "GROUP_SIZE": group,
        "UP_DEPTH": ring.up_depth,
        "DOWN_DEPTH": ring.down_depth,
    }
    return macros | {"UP_BLOCKS_A_STAGE": ring.up_blocks, "DOWN_BLOCKS_A_STAGE": ring.down_blocks}


def _up_warps(sizes: Sizes) -> int:
    """UP_WARPS of decode.cuh: each segment of four row tiles, half of the segments' number of tiles a warp."""
    s = segments(sizes.geometry.hidden // BLOCK)
    return s * 4 // max(1, s // 2)


def decode_rings(sizes: Sizes, group: int) -> tuple[int, int]:
    """Bytes of the rings of a block of gate_up_decode (or of its partial sums, which follow) and of down_decode."""
    g, ring = sizes.geometry, DECODE_RINGS[group]
    up_blocks, down_blocks = g.hidden // BLOCK, g.slice_intermediate // BLOCK
    s = segments(up_blocks)

    def stage(row_tiles: int, chain: int, most: int) -> int:
        blocks = largest_divisor(chain, most)
        return -(-blocks * (row_tiles * 272 + group * (32 + META_BYTES)) // 16) * 16

    up = _up_warps(sizes) * ring.up_depth * stage(max(1, s // 2), up_blocks // s, ring.up_blocks)
    down = 8 * ring.down_depth * stage(1, down_blocks // segments(down_blocks), ring.down_blocks)
    return max(up, s * 64 * group * 4), down


def prefill_macros(sizes: Sizes, panel: PanelSizes, box_tokens: int = 0) -> dict[str, str | int]:
    """What prefill.cu is compiled with; box_tokens as in `decode_macros`."""
    sizes_of_ring = {"DEPTH": panel.depth, "STAGE_BLOCKS": panel.stage_blocks, "WGMMA": int(panel is WGMMA)}
    return _macros(sizes, box_tokens) | sizes_of_ring


def _macros(sizes: Sizes, box_tokens: int) -> dict[str, str | int]:
    g, family = sizes.geometry, sizes.family
    macros: dict[str, str | int] = {
        "HIDDEN": g.hidden,
        "INNER": g.slice_intermediate,
        "SLICES": g.slices,
        "SLICE_BYTES": sizes.layout.slice_bytes,
        "EXPERTS": g.experts,
        "TOP_K": g.top_k,
        "WEIGHTED": int(family.route_weight_before_down),
        "HYBRID_STEP": int(box_tokens > 0),
        "BOX_TOKENS": max(box_tokens, 1),
    }
    if family.swiglu_limit is not None:
        macros["LIMIT_BITS"] = hex(int(np.float32(family.swiglu_limit).view(np.uint32)))
    return macros


class _Decode:
    """decode.cu for one group size: how many pairs of an expert share a pass over its weights."""

    def __init__(self, sizes: Sizes, group: int, device: torch.device, box_tokens: int) -> None:
        g = sizes.geometry
        down_blocks = g.slice_intermediate // BLOCK
        up_shared, self.down_ring = decode_rings(sizes, group)
        self.chains = segments(down_blocks) * g.slices
        limit = nvrtc.shared_memory_a_block(device)
        fixed = 8192  # more than the kernel's own static shared memory
        self.max_pairs = min(MAX_DECODE_PAIRS, (limit - fixed - self.down_ring) // (self.chains * 64))
        kernels = {
            "quantize_decode": (256, 0),
            "gate_up_decode": (_up_warps(sizes) * 32, up_shared),
            "down_decode": (256, self.down_ring + self.max_pairs * self.chains * 64),
        }
        if box_tokens and group == 1:
            kernels["begin_step"] = (THREADS, 0)
        self.kernels = nvrtc.load("decode.cu", decode_macros(sizes, group, box_tokens), device, kernels)


class CudaPath:
    """The NVIDIA path (sm_80 and newer). One object serves every layer of the same sizes, one call at a time.

    box_tokens: compiled for hybrid steps of at most so many tokens, which kernels/gpu/hybrid.py launches.
    """

    def __init__(self, sizes: Sizes, max_tokens: int, device: torch.device, box_tokens: int = 0) -> None:
        self.sizes, self.device, self.box_tokens = sizes, device, box_tokens
        g = sizes.geometry
        self.alone = _Decode(sizes, 1, device, box_tokens)
        self.shared = _Decode(sizes, 8, device, box_tokens)
        limit = nvrtc.shared_memory_a_block(device)
        self.panel = panel_sizes(nvrtc.architecture(device), limit)
        self._load_prefill(self.panel)
        pairs = max_tokens * g.top_k

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        few_tokens = min(max_tokens, MAX_DECODE_PAIRS // g.top_k)
        few = few_tokens * g.top_k
        self.meta = buffer(max(few_tokens, 1), g.hidden // BLOCK, 2, dtype=torch.int32)
        self.hmeta = buffer(max(few, 1), g.intermediate // BLOCK, 2, dtype=torch.int32)
        self.q = buffer(max_tokens, g.hidden, dtype=torch.int8)
        self.e = buffer(max_tokens, g.hidden // BLOCK, dtype=torch.int8)
        self.x = buffer(max_tokens, g.hidden, dtype=torch.int16)
        self.hq = buffer(pairs, g.intermediate, dtype=torch.int8)
        self.he = buffer(pairs, g.intermediate // BLOCK, dtype=torch.int8)
        self.h = buffer(pairs, g.intermediate, dtype=torch.int16)
        self.parts = buffer(g.slices if g.slices > 1 else 0, pairs, g.hidden, dtype=torch.float32)
        self.order, self.counts, self.next = (buffer(n, dtype=torch.int32) for n in (pairs, g.experts, g.experts))
        self.tiles = buffer(self._most_tiles(pairs), 3, dtype=torch.int32)
        self.tile_count = buffer(1, dtype=torch.int32)

    def _most_tiles(self, pairs: int) -> int:
        return min(pairs, self.sizes.geometry.experts + pairs // self.panel.pairs)

    def _load_prefill(self, panel: PanelSizes) -> None:
        g = self.sizes.geometry
        kernels = dict.fromkeys(
            ("quantize_prefill", "plan_count", "plan_order", "join_slices", "combine"), (THREADS, 0)
        )
        kernels["plan_tiles"] = (1024, 0)
        kernels["gate_up_prefill"] = (THREADS, panel.shared_bytes(g.hidden // BLOCK))
        kernels["down_prefill"] = (THREADS, panel.shared_bytes(g.slice_intermediate // BLOCK))
        self.kernels = nvrtc.load(
            "prefill.cu", prefill_macros(self.sizes, panel, self.box_tokens), self.device, kernels
        )

    def decode_kernels(self, tokens: int) -> _Decode | None:
        """The decode kernels for a call of so many tokens; None: it is prefill's."""
        pairs = tokens * self.sizes.geometry.top_k
        if tokens == 1 and pairs <= self.alone.max_pairs:
            return self.alone
        return self.shared if pairs <= self.shared.max_pairs and tokens <= self.meta.shape[0] else None

    def rows(self, call: Call) -> None:
        if not self._decode(call, None):
            self.prefill(call)

    def forward(self, call: Call, out: torch.Tensor) -> None:
        if not self._decode(call, out):
            self.prefill(call)
            self._combine(call, call.slot_table, out)

    def _decode(self, call: Call, out: torch.Tensor | None) -> bool:
        """The call by a decode path, if one takes it."""
        decode = self.decode_kernels(call.x.shape[0])
        if decode:
            self.decode(decode, call, out)
        return decode is not None

    def combine(self, call: Call, out: torch.Tensor) -> None:
        self._combine(call, None, out)

    def decode(
        self,
        path: _Decode,
        call: Call,
        out: torch.Tensor | None,
        quantize: bool = True,
        hybrid: HybridArguments = NOT_HYBRID,
    ) -> None:
        """Three launches; without `out`, into `call.rows`. The second and third start while the one before still runs.

        quantize: False leaves the first out: in a hybrid step another kernel takes its place.
        """
        g = self.sizes.geometry
        blocks, pairs = call.x.numel() // BLOCK, call.ids.numel()
        route: tuple[Any, ...] = (call.ids, call.weights, call.slot_table, call.slots, call.slots.stride(0), pairs)
        if quantize:
            path.kernels["quantize_decode"].launch((-(-blocks // 8), 1), (call.x, self.q, self.meta, blocks))
        path.kernels["gate_up_decode"].launch(
            (g.intermediate // BLOCK, pairs),
            (self.q, self.meta, *route, self.hq, self.hmeta, *hybrid.up()),
            dependent=True,
        )
        path.kernels["down_decode"].launch(
            (g.hidden // 16, 1),
            (self.hq, self.hmeta, *route, call.rows, out, *hybrid.down()),
            dependent=True,
            shared_bytes=path.down_ring + pairs * path.chains * 64,
        )

    def prefill(self, call: Call) -> None:
        """Plan, gate and up, down: rows of every pair that has a slot into `call.rows`."""
        g, k = self.sizes.geometry, self.kernels
        tokens, pairs = call.x.shape[0], call.ids.numel()
        by_pair = (-(-pairs // THREADS), 1)
        tiles = self._most_tiles(pairs)
        slots, plan = (call.slots, call.slots.stride(0)), (self.tiles, self.tile_count, self.order)
        k["quantize_prefill"].launch((tokens, 1), (call.x, self.x, self.q, self.e, self.counts, g.hidden // BLOCK))
        k["plan_count"].launch(by_pair, (call.ids, call.slot_table, self.counts, pairs))
        k["plan_tiles"].launch((1, 1), (self.counts, call.slot_table, self.next, self.tiles, self.tile_count))
        k["plan_order"].launch(by_pair, (call.ids, call.slot_table, self.next, self.order, pairs))
        groups = g.slices * -(-g.slice_intermediate // (self.panel.rows // 2))
        k["gate_up_prefill"].launch(
            (groups, tiles), (self.x, self.q, self.e, call.weights, *slots, *plan, self.h, self.hq, self.he)
        )
        target = call.rows if g.slices == 1 else self.parts
        k["down_prefill"].launch(
            (-(-g.hidden // self.panel.rows), tiles, g.slices),
            (self.h, self.hq, self.he, *slots, *plan, pairs, target),
        )
        if g.slices > 1:
            k["join_slices"].launch((pairs, 1), (self.parts, call.ids, call.slot_table, pairs, call.rows))

    def _combine(self, call: Call, slot_table: torch.Tensor | None, out: torch.Tensor) -> None:
        self.combine_hybrid(call, slot_table, out, None, NOT_HYBRID)

    def combine_hybrid(
        self,
        call: Call,
        slot_table: torch.Tensor | None,
        out: torch.Tensor,
        box_rows: torch.Tensor | None,
        hybrid: HybridArguments,
    ) -> None:
        """`call.rows`, and of experts without a slot `box_rows` [T, top_k, hidden], into `out`."""
        arguments = (call.rows, call.ids, call.weights, slot_table, out, box_rows, *hybrid.down()[1:])
        self.kernels["combine"].launch((call.x.shape[0], 1), arguments)
