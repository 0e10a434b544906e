"""Decode speed: the layer and its two matrix stages in a graph, against the copy rate of the same run."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from common import SHAPES, Shape, captured, copy_rate, median_ms, random_routes, random_slots

from moetier.kernels.cuda.base import Call
from moetier_reference.experts import Backend, DeviceExperts

LAYERS = 40
"""Layer calls in a graph, each with routes of its own, so that weights come from memory and not from L2."""


def _distinct(ids: torch.Tensor) -> int:
    return sum(len(torch.unique(part)) for part in ids) if ids.dim() == 3 else len(torch.unique(ids))


def measure(shape: Shape, tokens: int, copy: float, backend: Backend = "cuda") -> list[dict[str, Any]]:
    """Rows of the table: median microseconds a layer and the share of the copy rate that its bytes come in at."""
    g = shape.geometry
    experts = DeviceExperts(g, shape.family, tokens, backend=backend)
    slots = random_slots(experts.sizes.layout, g.experts)
    table = torch.randperm(g.experts, dtype=torch.int32, device="cuda")
    routes = [random_routes(tokens, g.experts, g.top_k) for _ in range(LAYERS)]
    xs = [torch.randn(tokens, g.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    out = torch.empty_like(xs[0])
    bytes_moved = sum(_distinct(ids) for ids, _ in routes) / LAYERS * experts.sizes.layout.payload_bytes * g.slices

    def layers() -> None:
        for x, (ids, weights) in zip(xs, routes, strict=True):
            experts.forward(x, ids, weights, table, slots, out)

    runs = {"layer": layers}
    if backend == "cuda":
        from moetier.kernels.cuda.decode import NOT_HYBRID
        from moetier.kernels.cuda.path import CudaPath

        path = experts.path
        assert isinstance(path, CudaPath)

        few, between = path.few, path.between

        def by(run: Any) -> Any:
            def layers() -> None:
                for x, (ids, weights) in zip(xs, routes, strict=True):
                    run(Call(x, ids, weights, table, slots, experts._rows[:tokens]), out, between, NOT_HYBRID)

            return layers

        if path.decode_kernels(tokens) is few:
            runs["matrix stages"] = by(few.matrices)
        else:  # one launch is both stages, and all of the layer
            runs["layer by the kernels for a few tokens"] = by(few.run)
    rows = []
    for what, run in runs.items():
        graph = captured(run)
        ms = median_ms(graph.replay) / LAYERS
        rows.append(
            {
                "what": f"decode {shape.name} {backend} {tokens} tokens: {what}",
                "us": ms * 1e3,
                "GB/s": bytes_moved / ms / 1e6,
                "of copy": bytes_moved / ms * 1e3 / copy,
            }
        )
    return rows


def run(arguments: Namespace) -> list[dict[str, Any]]:
    """Every decode row that the issue asks for."""
    copy = copy_rate()
    rows: list[dict[str, Any]] = [{"what": "device-to-device copy", "GB/s": copy / 1e9}]
    for name in ("v4-flash", "v4.1-flash"):
        for tokens in (1, 8) if arguments.quick else (1, 2, 4, 8, 16):
            rows += measure(SHAPES[name], tokens, copy)
        if not arguments.quick:
            rows += measure(SHAPES[name], 1, copy, "triton")
        torch.cuda.empty_cache()
    return rows
