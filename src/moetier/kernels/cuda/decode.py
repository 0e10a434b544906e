"""The decode kernels of a layer: one launch for a single token, three for a few."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from moetier.contract import BLOCK
from moetier.contract.oracle import segments
from moetier.kernels.cuda import nvrtc
from moetier.kernels.cuda.base import Call, Sizes, largest_divisor
from moetier.kernels.protocol import MAX_PAIRS, STEP_THREADS, HybridStep

THREADS = 256
META_BYTES = 8
GROUP = 8
"""Pairs of one expert that share a pass over its weights in decode.cuh, which is told."""
FIXED_SHARED_BYTES = 8192
"""More than the kernels' own static shared memory."""


NOT_HYBRID = HybridStep()


@dataclass(frozen=True)
class Activations:
    """Activations that the kernels hand on: x and h in int8, and the exponent of each block of 32 (see struct Meta)."""

    q: torch.Tensor
    meta: torch.Tensor
    hq: torch.Tensor
    hmeta: torch.Tensor

    @classmethod
    def of(cls, sizes: Sizes, tokens: int, device: torch.device) -> Activations:
        g = sizes.geometry

        def rows(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
            meta = torch.zeros(count, width // BLOCK, 2, dtype=torch.int32, device=device)
            return torch.zeros(count, width, dtype=torch.int8, device=device), meta

        return cls(*rows(tokens, g.hidden), *rows(tokens * g.top_k, g.intermediate))


def _route(call: Call) -> tuple[Any, ...]:
    return call.ids, call.weights, call.slot_table, call.slots, call.slots.stride(0)


@dataclass(frozen=True)
class OneSizes:
    """Sizes of one.cuh: warps of a block, blocks of a chain in a stage at most, stages of a warp's ring."""

    warps: int
    stage_blocks: int
    depth: int
    shared_bytes: int

    def macros(self, sizes: Sizes, box_tokens: int = 0) -> dict[str, str | int]:
        ring = {"ONE_WARPS": self.warps, "ONE_BLOCKS": self.stage_blocks, "ONE_DEPTH": self.depth}
        return sizes.macros(box_tokens) | ring


@dataclass(frozen=True)
class OneDevice:
    """Facts of a device that one.cu's sizes depend on."""

    multiprocessors: int
    shared_bytes_a_block: int

    @classmethod
    def of(cls, device: torch.device) -> OneDevice:
        return cls(nvrtc.multiprocessors(device), nvrtc.shared_memory_a_block(device))


def one_ring(sizes: Sizes, device: OneDevice, warps: int, stage_blocks: int) -> OneSizes:
    """The deepest ring that fits; its depth may be less than the two that one.cu needs."""
    g = sizes.geometry
    up_blocks, down_blocks = g.hidden // BLOCK, g.slice_intermediate // BLOCK
    up, down = segments(up_blocks), segments(down_blocks)
    up_chain, down_chain, down_chains = up_blocks // up, down_blocks // down, down * g.slices
    activations = max(up * (up_chain + 1), g.top_k * down_chains * (down_chain + 1)) * BLOCK
    exponents = -(-max(up_blocks, g.top_k * g.intermediate // BLOCK) * 4 // 16) * 16
    items = -(-g.hidden // 16 // device.multiprocessors) * g.top_k
    rest = activations + exponents + max(warps // _team(sizes) * 4 * up * 64, items * down_chains * 64)
    stage = max(largest_divisor(up_chain, stage_blocks), largest_divisor(down_chain, stage_blocks)) * 8 * 272
    fixed = 2048 + 4 * g.experts  # more than the kernel's own static shared memory
    depth = min((device.shared_bytes_a_block - fixed - rest) // (warps * stage), 8)
    return OneSizes(warps, stage_blocks, depth, warps * depth * stage + rest)


def _team(sizes: Sizes) -> int:
    """Warps that compute 32 rows of h together: a warp takes eight chains."""
    return -(-4 * segments(sizes.geometry.hidden // BLOCK) // 8)


def one_sizes(sizes: Sizes, device: OneDevice) -> OneSizes | None:
    """The first of these sizes that fits the device; None where none does, or a warp's lanes do not count the pairs.

    16 warps fill a multiprocessor. On one H200 they are the fastest for large layers and within 2 % of it for small
    ones.
    """
    for warps, stage_blocks in ((16, 2), (16, 1), (12, 1), (8, 1), (4, 1)) if sizes.geometry.top_k < 32 else ():
        one = one_ring(sizes, device, warps, stage_blocks)
        if one.depth >= 2:
            return one
    return None


class OneToken:
    """one.cu: a single token, in one launch of a block a multiprocessor."""

    begins = True
    """Quantizes x and plans a hybrid step by itself: no kernel need run before."""

    def __init__(self, sizes: Sizes, one: OneSizes, device: torch.device, box_tokens: int) -> None:
        self._blocks = nvrtc.multiprocessors(device)
        kernels = {"decode_one": (one.warps * 32, one.shared_bytes)}
        self._kernel = nvrtc.load("one.cu", one.macros(sizes, box_tokens), device, kernels)["decode_one"]
        self._progress = torch.zeros(2, dtype=torch.int32, device=device)

    @classmethod
    def fitting(cls, sizes: Sizes, device: torch.device, box_tokens: int) -> OneToken | None:
        """None where the layer does not fit the device's multiprocessors."""
        one = one_sizes(sizes, OneDevice.of(device))
        return cls(sizes, one, device, box_tokens) if one else None

    def run(self, call: Call, out: torch.Tensor | None, between: Activations, hybrid: ctypes.Structure) -> None:
        """Without `out`, into `call.rows`."""
        self._kernel.launch(
            (self._blocks, 1),
            (call.x, *_route(call), between.hq, between.hmeta, self._progress, call.rows, out, hybrid),
            dependent=True,
            together=True,
        )


@dataclass(frozen=True)
class RingSizes:
    """A warp's ring in decode.cuh, for gate and up and for down: blocks in a stage at most, and stages."""

    up_blocks: int = 4
    up_depth: int = 2
    down_blocks: int = 9
    down_depth: int = 2


RING = RingSizes()


def few_macros(sizes: Sizes, box_tokens: int = 0) -> dict[str, str | int]:
    """Return what decode.cu is compiled with. box_tokens: for hybrid steps of at most so many tokens."""
    depths = {"UP_DEPTH": RING.up_depth, "DOWN_DEPTH": RING.down_depth}
    stages = {"UP_BLOCKS_A_STAGE": RING.up_blocks, "DOWN_BLOCKS_A_STAGE": RING.down_blocks}
    return sizes.macros(box_tokens) | depths | stages | {"GROUP": GROUP}


def _up_warps(sizes: Sizes) -> int:
    """UP_WARPS of decode.cu: each segment of four row tiles, half of the segments' number of tiles a warp."""
    s = segments(sizes.geometry.hidden // BLOCK)
    return s * 4 // max(1, s // 2)


def few_rings(sizes: Sizes) -> tuple[int, int]:
    """Bytes of the rings of a block of gate_up_decode (or of its partial sums, which follow) and of down_decode."""
    g = sizes.geometry
    up_blocks, down_blocks = g.hidden // BLOCK, g.slice_intermediate // BLOCK
    s = segments(up_blocks)

    def stage(row_tiles: int, chain: int, most: int) -> int:
        blocks = largest_divisor(chain, most)
        return -(-blocks * (row_tiles * 272 + GROUP * (32 + META_BYTES)) // 16) * 16

    up = _up_warps(sizes) * RING.up_depth * stage(max(1, s // 2), up_blocks // s, RING.up_blocks)
    down = 8 * RING.down_depth * stage(1, down_blocks // segments(down_blocks), RING.down_blocks)
    return max(up, s * 64 * GROUP * 4), down


class FewTokens:
    """decode.cu: up to `max_pairs` pairs, in three launches, or two after begin_step, which is of this file too."""

    begins = False

    def __init__(self, sizes: Sizes, device: torch.device, box_tokens: int) -> None:
        g = sizes.geometry
        self._h_blocks, self._row_tiles = g.intermediate // BLOCK, g.hidden // 16
        up_shared, self._down_ring = few_rings(sizes)
        self._item_bytes = segments(g.slice_intermediate // BLOCK) * g.slices * 64
        limit = nvrtc.shared_memory_a_block(device)
        self.max_pairs = min(MAX_PAIRS, (limit - FIXED_SHARED_BYTES - self._down_ring) // self._item_bytes)
        kernels = {
            "quantize_decode": (THREADS, 0),
            "gate_up_decode": (_up_warps(sizes) * 32, up_shared),
            "down_decode": (THREADS, self._down_ring + self.max_pairs * self._item_bytes),
        }
        if box_tokens:
            kernels["begin_step"] = (STEP_THREADS, 0)
        self.kernels = nvrtc.load("decode.cu", few_macros(sizes, box_tokens), device, kernels)

    def run(self, call: Call, out: torch.Tensor | None, between: Activations, hybrid: ctypes.Structure) -> None:
        """Without `out`, into `call.rows`. The second and third launch start while the one before still runs."""
        blocks = call.x.numel() // BLOCK
        if hybrid is NOT_HYBRID:  # else begin_step has done it
            self.kernels["quantize_decode"].launch((-(-blocks // 8), 1), (call.x, between.q, between.meta, blocks))
        self.matrices(call, out, between, hybrid)

    def matrices(self, call: Call, out: torch.Tensor | None, between: Activations, hybrid: ctypes.Structure) -> None:
        """The two launches that read weights."""
        pairs, h = call.ids.numel(), (between.hq, between.hmeta)
        self.kernels["gate_up_decode"].launch(
            (self._h_blocks, pairs),
            (between.q, between.meta, *_route(call), pairs, *h, hybrid),
            dependent=True,
        )
        self.kernels["down_decode"].launch(
            (self._row_tiles, 1),
            (*h, *_route(call), pairs, call.rows, out, hybrid),
            dependent=True,
            shared_bytes=self._down_ring + pairs * self._item_bytes,
        )
