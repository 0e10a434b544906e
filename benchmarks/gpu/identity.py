"""Identity: every path on the same random records and inputs; a difference in any bit of any output counts."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from common import SHAPES, Shape, random_routes, random_slots, record_of

from moetier.contract import RecordLayout, oracle
from moetier.kernels.cuda.base import Call
from moetier.kernels.cuda.decode import NOT_HYBRID
from moetier.kernels.cuda.path import CudaPath
from moetier_reference.experts import DeviceExperts

EXPERTS = 24
"""Experts of the layers tested here, whatever the model has: the sizes of the matrices are what matters."""

TRITON = {"v4-flash", "base-4"}
"""Shapes on which the portable path is compared too: compiling it for every shape takes longer than the calls."""


def random_input(
    shape: Shape, tokens: int, pick: random.Random, exponent: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids, weights: mostly ordinary, at times hostile (NaN, infinity, zeros, extremes, odd routes)."""
    g = shape.geometry
    x = torch.randn(tokens, g.hidden, device="cuda") * 2.0**exponent
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
    if tokens == 1 and path.one:
        found["cuda one token"] = lambda out, one=path.one: one.run(call, out, path.between, NOT_HYBRID)
    if tokens <= path.few_tokens and pairs <= path.few.max_pairs:
        found["cuda few tokens"] = lambda out: path.few.run(call, out, path.between, NOT_HYBRID)
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


TOKENS = (1, 1, 1, 2, 3, 4, 5, 8, 12, 16, 16, 21)
"""Sizes of the many calls; a few have up to 4,096."""


def check(shape: Shape, calls: int, largest: int, samples: int, with_triton: bool, seed: int) -> dict[str, Any]:
    """One row: calls, layer computations, comparisons, values that differ.

    Inputs come from a pool that is made once, so that the calls are what takes the time.
    """
    pick = random.Random(seed)
    torch.manual_seed(seed)
    shape = replace(shape, geometry=replace(shape.geometry, experts=min(shape.geometry.experts, EXPERTS)))
    g = shape.geometry
    cuda = DeviceExperts(g, shape.family, largest, backend="cuda")
    portable = DeviceExperts(g, shape.family, largest, backend="triton") if with_triton else None
    ordinary, hostile = (random_slots(cuda.sizes.layout, g.experts, s) for s in ((112, 124), (0, 255)))
    table = torch.randperm(g.experts, dtype=torch.int32, device="cuda")
    exponents = [70, -70, -4, 6, *[0] * 36]  # the first two leave the range of the fast arithmetic
    pool = [random_input(shape, 64, pick, exponent) for exponent in exponents]
    few = [pick.choice(TOKENS) for _ in range(calls - 12)]
    sizes = [*few, *(min(size, largest) for size in (40, 130, 130, 300, 700, 700, 1500)), largest, *[40] * 4]
    outputs = [torch.empty(largest, g.hidden, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    layers = compared = 0
    paths = set()
    for number, tokens in enumerate(sizes):
        if tokens <= 64:
            start = pick.randrange(65 - tokens)
            x, ids, weights = (part[start : start + tokens] for part in pick.choice(pool))
        else:
            x, ids, weights = random_input(shape, tokens, pick)
        slots = hostile if tokens <= 21 and number % 100 == 7 else ordinary
        call = Call(x, ids, weights, table, slots, cuda._rows[:tokens])
        runs = paths_of(cuda, call)
        if portable and (number % 10 == 0 or tokens > 64):
            runs["triton"] = lambda out, call=call: portable.forward(
                call.x, call.ids, call.weights, call.slot_table, call.slots, out
            )
        first, other = (output[:tokens] for output in outputs)
        for index, (name, run) in enumerate(runs.items()):
            out = other if index else first
            out.fill_(7.0)
            run(out)
            layers += 1
            paths.add(name)
            if index:
                differ += (bits(first) != bits(other)).sum()
                compared += 1
        if number < samples:
            some = min(tokens, 2)
            want = torch.from_numpy(oracle_output(shape, call, some).view(np.int16)).cuda()
            differ += (bits(first[:some]) != want).sum()
            compared += 1
            paths.add("oracle")
    return {
        "what": f"identity {shape.name}",
        "calls": calls,
        "layers": layers,
        "comparisons": compared,
        "paths": ", ".join(sorted(paths)),
        "differ": int(differ),
    }


def run(arguments: Namespace) -> Iterator[dict[str, Any]]:
    """All shapes, or those asked for; quick: fewer calls and no Triton."""
    total = dict.fromkeys(("calls", "layers", "comparisons", "differ"), 0)
    for index, shape in enumerate(SHAPES.values()):
        if arguments.shapes and shape.name not in arguments.shapes.split(","):
            continue
        small = shape.geometry.hidden <= 512
        calls, largest = (60, 512) if arguments.quick else (1700, 4096)
        with_triton = shape.name in TRITON and not arguments.quick
        row = check(shape, calls, largest, 6 if small else 1, with_triton, index)
        total = {key: total[key] + row[key] for key in total}
        yield row
        torch.cuda.empty_cache()
    yield {"what": "identity total", **total}
