"""Identity: every path on the same random records and inputs; a difference in any bit of any output counts."""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from common import SHAPES, Shape, random_routes, random_slots, record_of

from moetier.formats import RecordLayout
from moetier.kernels import oracle
from moetier.kernels.gpu import DeviceExperts
from moetier.kernels.gpu.base import Call
from moetier.kernels.gpu.cuda_path import CudaPath

EXPERTS = 24
"""Experts of the layers tested here, whatever the model has: the sizes of the matrices are what matters."""

TRITON = {"v4-flash", "v4.1-flash-4", "base", "base-4", "nano"}
"""Shapes on which the portable path is compared too: compiling it for every shape takes longer than the calls."""


def random_input(shape: Shape, tokens: int, pick: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids, weights: mostly ordinary, at times hostile (NaN, infinity, zeros, extremes, odd routes)."""
    g = shape.geometry
    x = torch.randn(tokens, g.hidden, device="cuda") * 2.0 ** pick.choice([0, 0, 0, 0, -4, 6, -70, 70])
    ids, weights = random_routes(tokens, g.experts, g.top_k)
    ids = ids.clone()
    kind = pick.randrange(12)
    row = pick.randrange(tokens)
    if kind == 0:
        x[row, pick.randrange(g.hidden)] = pick.choice([float("nan"), float("inf"), -float("inf")])
    elif kind == 1:
        x[row] = 0
    elif kind == 2:
        x *= torch.randint(-40, 40, x.shape, device="cuda").float().exp2()
    elif kind == 3:
        ids[:, 0] = ids[0, 0].item()
    elif kind == 4:
        ids[row, pick.randrange(g.top_k)] = pick.choice([-1, g.experts, 2**31 - 1])
    elif kind == 5:
        ids[row] = ids[row, 0].item()
    elif kind == 6:
        ids[:] = ids[0].clone()
    return x.bfloat16(), ids, weights


def paths_of(experts: DeviceExperts, call: Call) -> dict[str, Any]:
    """Name -> function(out) of every CUDA path that takes this call."""
    path = experts.path
    assert isinstance(path, CudaPath)
    pairs, tokens = call.ids.numel(), call.x.shape[0]

    def prefill(out: torch.Tensor) -> None:
        path.prefill(call)
        path._combine(call, call.slot_table, out)

    found: dict[str, Any] = {"cuda prefill": prefill}
    if tokens <= path.meta.shape[0]:
        for name, kernels in (("cuda decode 1", path.alone), ("cuda decode 8", path.shared)):
            if pairs <= kernels.max_pairs:
                found[name] = lambda out, kernels=kernels: path.decode(kernels, call, out)
    return found


def oracle_output(shape: Shape, call: Call, tokens: int) -> np.ndarray:
    """The oracle on the first tokens of a call: bf16 bits [tokens, hidden]."""
    g = shape.geometry
    layout = RecordLayout.of(g)
    ids = call.ids[:tokens].cpu().numpy()
    table = call.slot_table.cpu().numpy()
    used = np.unique(ids[(ids >= 0) & (ids < g.experts)])
    matrices = {int(e): layout.unpack(record_of(call.slots, int(table[e]))) for e in used}
    x = call.x[:tokens].float().cpu().numpy()
    with np.errstate(all="ignore"):
        return oracle.moe_layer(
            x, ids, call.weights[:tokens].cpu().numpy(), matrices, g.experts, shape.family, g.slices
        )


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16)


def check(shape: Shape, calls: int, largest: int, samples: int, triton_share: float, seed: int) -> dict[str, Any]:
    """One row: calls, outputs compared, values that differ."""
    pick = random.Random(seed)
    torch.manual_seed(seed)
    shape = replace(shape, geometry=replace(shape.geometry, experts=min(shape.geometry.experts, EXPERTS)))
    g = shape.geometry
    cuda = DeviceExperts(g, shape.family, largest, backend="cuda")
    portable = DeviceExperts(g, shape.family, largest, backend="triton") if triton_share else None
    pools = [random_slots(cuda.sizes.layout, g.experts, s) for s in ((112, 124), (0, 255))]
    table = torch.randperm(g.experts, dtype=torch.int32, device="cuda")
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    compared, paths = 0, set()
    sample_at = set(pick.sample(range(calls), samples))
    for number in range(calls):
        tokens = pick.choice([1, 1, 2, 3, 4, 5, 8, 12, 16, 16, 21, 40, 130, 700, largest])
        tokens = 1 + pick.randrange(4) if number in sample_at else min(tokens, largest)
        x, ids, weights = random_input(shape, tokens, pick)
        slots = pools[pick.random() < 0.1]
        call = Call(x, ids, weights, table, slots, cuda._rows[:tokens])
        outputs = {}
        for name, run in paths_of(cuda, call).items():
            outputs[name] = torch.full_like(x, 7.0)
            run(outputs[name])
        if portable and pick.random() < triton_share:
            outputs["triton"] = portable.forward(x, ids, weights, table, slots, torch.full_like(x, 7.0))
        first, *others = outputs.values()
        for other in others:
            differ += (bits(first) != bits(other)).sum()
            compared += 1
        if number in sample_at:
            want = torch.from_numpy(oracle_output(shape, call, min(tokens, 2)).view(np.int16)).cuda()
            differ += (bits(first)[: want.shape[0]] != want).sum()
            compared += 1
            paths.add("oracle")
        paths |= set(outputs)
    return {
        "what": f"identity {shape.name}",
        "calls": calls,
        "comparisons": compared,
        "paths": " ".join(sorted(paths)),
        "differ": int(differ),
    }


def run(arguments: Namespace) -> list[dict[str, Any]]:
    """All shapes, or those asked for; quick: fewer calls and no Triton."""
    rows = []
    for index, shape in enumerate(SHAPES.values()):
        if arguments.shapes and shape.name not in arguments.shapes.split(","):
            continue
        small = shape.geometry.hidden <= 512
        if arguments.quick:
            calls, largest, portable = (200 if small else 60), 512, 0.0
        else:
            calls, largest, portable = (4000 if small else 1200), 4096, 0.1 if shape.name in TRITON else 0.0
        rows.append(check(shape, calls, largest, 3 if small else 1, portable, index))
        torch.cuda.empty_cache()
    total = {key: sum(row[key] for row in rows) for key in ("calls", "comparisons", "differ")}
    return [*rows, {"what": "identity total", **total}]
