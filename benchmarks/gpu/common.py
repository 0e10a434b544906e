"""Shapes, random records and timers shared by the GPU benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from moetier.contract import Family, LayerGeometry, RecordLayout
from moetier.plan.catalog import layer_of

PLAIN = Family()
DEEPSEEK_V4 = Family(swiglu_limit=10.0, route_weight_before_down=True)


@dataclass(frozen=True)
class Shape:
    """A layer of a model: its geometry and family."""

    name: str
    geometry: LayerGeometry
    family: Family = PLAIN


V41 = layer_of("deepseek-v4.1-flash")
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("v4-flash", layer_of("deepseek-v4-flash"), DEEPSEEK_V4),
        Shape("v4.1-flash", V41, DEEPSEEK_V4),
        Shape("v4.1-flash-slice", replace(V41, intermediate=V41.intermediate // 4), DEEPSEEK_V4),
        Shape("v4.1-flash-4", layer_of("deepseek-v4.1-flash", 4), DEEPSEEK_V4),
        Shape("glm-5.2", layer_of("glm-5.2")),
        Shape("glm-5.2-4", layer_of("glm-5.2", 4)),
        Shape("kimi", layer_of("kimi-k2.7")),
        Shape("qwen3", layer_of("qwen3-235b")),
        Shape("qwen3-4", layer_of("qwen3-235b", 4)),
        Shape("base", LayerGeometry(512, 256, 64, 6)),
        Shape("base-4", LayerGeometry(512, 256, 64, 6, 4)),
        Shape("nano", LayerGeometry(256, 64, 32, 4)),
    )
}


def random_slots(
    layout: RecordLayout, count: int, scales: tuple[int, int] = (112, 124), device: str = "cuda"
) -> torch.Tensor:
    """uint8 [count, stride] of records with random codes and scale bytes in [scales[0], scales[1])."""
    slots = torch.randint(0, 256, (count, layout.stride), dtype=torch.uint8, device=device)
    for index in range(layout.slices):
        for section in layout.sections:
            start = index * layout.slice_bytes + section.scales
            part = slots[:, start : start + section.scale_bytes]
            part.copy_(torch.randint(*scales, part.shape, dtype=torch.uint8, device=device))
    return slots


def random_routes(tokens: int, experts: int, top_k: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int32 and weights float32 [tokens, top_k]; a token's experts are distinct and in random order."""
    ids = torch.rand(tokens, experts, device=device).topk(top_k, 1).indices.to(torch.int32)
    return ids.contiguous(), torch.rand(tokens, top_k, device=device) + 0.1


def median_ms(run: Callable[[], object], repeats: int = 15, warm: int = 3) -> float:
    """Median of the time between two events around `run`."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` as a CUDA graph, after one run that compiles what it needs."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def copy_rate() -> float:
    """Bytes per second of a device-to-device copy of 2 GiB, read and write counted."""
    source = torch.randint(0, 256, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source)) * 1e3


def host_to_device_rate() -> float:
    """Bytes per second of a copy of 1 GiB from pinned memory."""
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    return source.numel() / median_ms(lambda: target.copy_(source, non_blocking=True), repeats=5, warm=1) * 1e3


def record_of(slots: torch.Tensor, slot: int) -> np.ndarray:
    """A slot's bytes on the host."""
    return slots[slot].cpu().numpy()
