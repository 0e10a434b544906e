"""Launches the CUDA kernels of a layer: a decode path for few pairs, a prefill path for many."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch

from moetier.contract import BLOCK
from moetier.contract.oracle import segments
from moetier.kernels.cuda import nvrtc
from moetier.kernels.cuda.base import Call, Sizes, largest_divisor
from moetier.kernels.cuda.decode import NOT_HYBRID, Activations, FewTokens, OneToken
from moetier.kernels.protocol import MAX_PAIRS

THREADS = 256


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
    threads: int = THREADS
    by_tile: bool = False
    """Activations lie in memory in the order of the tiles, a row a pair, and a block takes panel after panel."""

    def shared_bytes(self, blocks: int) -> int:
        stage = largest_divisor(blocks // segments(blocks), self.stage_blocks)
        bytes_a_stage = stage * (self.rows * 17 + self.block_bytes)
        ring = self.depth * (-(-bytes_a_stage // self.alignment) * self.alignment)
        results = self.rows * (self.pairs + 9) * 4
        return ring + results if self.by_tile else max(ring, results)


WGMMA = PanelSizes(128, 128, 128 * 64, alignment=1024, depth=3, stage_blocks=4, threads=THREADS + 128, by_tile=True)
MMA = PanelSizes(pairs=48, rows=256, block_bytes=48 * 64 + 64, alignment=16, depth=6, stage_blocks=2)
MMA_SMALL = replace(MMA, depth=3)
"""For devices with about 100 KB of shared memory a block."""


def panel_sizes(arch: str, shared_bytes_a_block: int) -> PanelSizes:
    """Which panels a device of `arch` ("sm_90a") with that much shared memory a block computes."""
    if arch == "sm_90a":
        return WGMMA
    return MMA if shared_bytes_a_block > 160 * 1024 else MMA_SMALL


def prefill_macros(sizes: Sizes, panel: PanelSizes, box_tokens: int = 0) -> dict[str, str | int]:
    """Return what prefill.cu is compiled with. box_tokens: for hybrid steps of at most so many tokens."""
    sizes_of_ring = {"DEPTH": panel.depth, "STAGE_BLOCKS": panel.stage_blocks, "WGMMA": int(panel is WGMMA)}
    return sizes.macros(box_tokens) | sizes_of_ring


class CudaPath:
    """The NVIDIA path (sm_80 and newer). One object serves every layer of the same sizes, one call at a time.

    box_tokens: compiled for hybrid steps of at most so many tokens, which kernels/cuda/hybrid.py launches.
    """

    def __init__(self, sizes: Sizes, max_tokens: int, device: torch.device, box_tokens: int = 0) -> None:
        self.sizes, self.device, self.box_tokens = sizes, device, box_tokens
        g = sizes.geometry
        self.one = OneToken.fitting(sizes, device, box_tokens)
        self.few = FewTokens(sizes, device, box_tokens)
        limit = nvrtc.shared_memory_a_block(device)
        self.panel = panel_sizes(nvrtc.architecture(device), limit)
        self.multiprocessors = nvrtc.multiprocessors(device)
        self._load_prefill(self.panel)
        pairs = max_tokens * g.top_k

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.few_tokens = max(1, min(max_tokens, MAX_PAIRS // g.top_k))
        self.between = Activations.of(sizes, self.few_tokens, device)
        self.q = buffer(max_tokens, g.hidden, dtype=torch.int8)
        self.e = buffer(max_tokens, g.hidden // BLOCK, dtype=torch.int8)
        self.x = buffer(pairs if self.panel.by_tile else max_tokens, g.hidden, dtype=torch.int16)
        self.hq = buffer(pairs, g.intermediate, dtype=torch.int8)
        self.he = buffer(pairs, g.intermediate // BLOCK, dtype=torch.int8)
        self.h = buffer(pairs, g.intermediate, dtype=torch.int16)
        self.parts = buffer(g.slices if g.slices > 1 else 0, pairs, g.hidden, dtype=torch.float32)
        self.order, self.places = (buffer(pairs, n, dtype=torch.int32) for n in (1, 2))
        self.counts, self.firsts, self.next = (buffer(g.experts, dtype=torch.int32) for _ in range(3))
        self.tiles = buffer(self._most_tiles(pairs), 3, dtype=torch.int32)
        self.tile_count = buffer(1, dtype=torch.int32)

    def _most_tiles(self, pairs: int) -> int:
        return min(pairs, self.sizes.geometry.experts + pairs // self.panel.pairs)

    def _panel_blocks(self, tiles: int, rows: int, rows_a_panel: int) -> tuple[int, int]:
        """The grid over all panels of all tiles: a block a panel, or as many blocks as run at once, each with many."""
        panels = tiles * self.sizes.geometry.slices * -(-rows // rows_a_panel)
        return min(panels, self.multiprocessors) if self.panel.by_tile else panels, 1

    def _load_prefill(self, panel: PanelSizes) -> None:
        g = self.sizes.geometry
        kernels = dict.fromkeys(
            ("quantize_prefill", "plan_count", "plan_order", "join_slices", "combine"), (THREADS, 0)
        )
        kernels["plan_tiles"] = (1024, 0)
        kernels["gate_up_prefill"] = (panel.threads, panel.shared_bytes(g.hidden // BLOCK))
        kernels["down_prefill"] = (panel.threads, panel.shared_bytes(g.slice_intermediate // BLOCK))
        self.kernels = nvrtc.load(
            "prefill.cu", prefill_macros(self.sizes, panel, self.box_tokens), self.device, kernels
        )

    def decode_kernels(self, tokens: int) -> OneToken | FewTokens | None:
        """The decode kernels for a call of so many tokens; None: it is prefill's."""
        if tokens == 1 and self.one:
            return self.one
        fits = tokens <= self.few_tokens and tokens * self.sizes.geometry.top_k <= self.few.max_pairs
        return self.few if fits else None

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
            decode.run(call, out, self.between, NOT_HYBRID)
        return decode is not None

    def combine(self, call: Call, out: torch.Tensor) -> None:
        self._combine(call, None, out)

    def prefill(self, call: Call) -> None:
        """Plan, gate and up, down: rows of every pair that has a slot into `call.rows`."""
        g, k = self.sizes.geometry, self.kernels
        tokens, pairs = call.x.shape[0], call.ids.numel()
        by_pair = (-(-pairs // THREADS), 1)
        tiles = self._most_tiles(pairs)
        slots, plan = (call.slots, call.slots.stride(0)), (self.tiles, self.tile_count, self.order)
        self.counts.zero_()
        k["plan_count"].launch(by_pair, (call.ids, call.slot_table, self.counts, pairs))
        k["plan_tiles"].launch(
            (1, 1), (self.counts, call.slot_table, self.firsts, self.next, self.tiles, self.tile_count)
        )
        k["plan_order"].launch(
            by_pair,
            (call.ids, call.slot_table, self.counts, self.firsts, self.next, self.order, self.places, pairs),
        )
        k["quantize_prefill"].launch((tokens, 1), (call.x, self.places, self.x, self.q, self.e))
        k["gate_up_prefill"].launch(
            self._panel_blocks(tiles, g.slice_intermediate, self.panel.rows // 2),
            (self.x, self.q, self.e, call.weights, *slots, *plan, self.h, self.hq, self.he),
        )
        target = call.rows if g.slices == 1 else self.parts
        k["down_prefill"].launch(
            self._panel_blocks(tiles, g.hidden, self.panel.rows),
            (self.h, self.hq, self.he, *slots, *plan, pairs, target),
        )
        if g.slices > 1:
            k["join_slices"].launch((pairs, 1), (self.parts, call.ids, call.slot_table, pairs, call.rows))

    def _combine(self, call: Call, slot_table: torch.Tensor | None, out: torch.Tensor) -> None:
        self.combine_hybrid(call, slot_table, out, NOT_HYBRID)

    def combine_hybrid(
        self,
        call: Call,
        slot_table: torch.Tensor | None,
        out: torch.Tensor,
        hybrid: ctypes.Structure,
    ) -> None:
        """Combine `call.rows`, and of experts without a slot the CPU's rows, into `out`."""
        arguments = (call.rows, call.ids, call.weights, slot_table, out, hybrid)
        self.kernels["combine"].launch((call.x.shape[0], 1), arguments)
