"""Prefill speed: the layer against a bf16 grouped product over dequantized weights, and against the link."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from common import SHAPES, Shape, captured, host_to_device_rate, median_ms, random_routes, random_slots

from moetier_reference.experts import Backend, DeviceExperts


def grouped_bf16(shape: Shape, ids: torch.Tensor, x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Milliseconds of the two grouped bf16 products alone: no routing, activation, gather or combination."""
    gate_up, down = weights
    order = ids.flatten().argsort()
    ends = torch.bincount(ids.flatten().long(), minlength=shape.geometry.experts).cumsum(0).to(torch.int32)
    rows = x[order // shape.geometry.top_k]
    h = torch.randn(rows.shape[0], shape.geometry.intermediate, device="cuda", dtype=torch.bfloat16)

    def products() -> None:
        torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
        torch._grouped_mm(h, down.transpose(1, 2), offs=ends)

    return median_ms(products, repeats=7)


def measure(
    shape: Shape, tokens: int, weights: tuple[torch.Tensor, torch.Tensor] | None, backend: Backend = "cuda"
) -> dict[str, Any]:
    """One row: milliseconds, TFLOP/s and the ratio to the bf16 products."""
    g = shape.geometry
    experts = DeviceExperts(g, shape.family, tokens, backend=backend)
    slots = random_slots(experts.sizes.layout, g.experts)
    table = torch.randperm(g.experts, dtype=torch.int32, device="cuda")
    ids, route_weights = random_routes(tokens, g.experts, g.top_k)
    x = torch.randn(tokens, g.hidden, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    graph = captured(lambda: experts.forward(x, ids, route_weights, table, slots, out))
    ms = median_ms(graph.replay, repeats=7)
    flop = 6 * ids.numel() * g.hidden * g.intermediate
    row: dict[str, Any] = {
        "what": f"prefill {shape.name} {backend} {tokens} tokens",
        "ms": ms,
        "TFLOP/s": flop / ms / 1e9,
    }
    if weights is not None:
        bf16 = grouped_bf16(shape, ids, x, weights)
        row |= {"bf16 ms": bf16, "bf16 TFLOP/s": flop / bf16 / 1e9, "of bf16": bf16 / ms}
    return row


def run(arguments: Namespace) -> list[dict[str, Any]]:
    """Every prefill row that the issue asks for."""
    shape = SHAPES["v4-flash"]
    g = shape.geometry
    weights = (
        torch.randn(g.experts, 2 * g.intermediate, g.hidden, device="cuda", dtype=torch.bfloat16),
        torch.randn(g.experts, g.hidden, g.intermediate, device="cuda", dtype=torch.bfloat16),
    )
    rows = [
        measure(shape, tokens, weights)
        for tokens in ((4096, 16384) if arguments.quick else (256, 1024, 4096, 8192, 16384))
    ]
    if not arguments.quick:
        rows.append(measure(shape, 4096, weights, "triton"))
    link = host_to_device_rate()
    stride = DeviceExperts(g, shape.family, 1).sizes.layout.stride
    ms = 0.75 * g.experts * stride / link * 1e3
    compute = next(row["ms"] for row in rows if "4096" in row["what"])
    rows.append({"what": "link: three quarters of the layer's experts", "ms": ms, "GB/s": link / 1e9})
    rows.append({"what": "4096 tokens: compute over link time", "ratio": compute / ms})
    return rows
