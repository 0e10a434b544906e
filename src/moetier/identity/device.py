"""The identity check of the device at start: random calls by slots, by the CPU and streamed, bit for bit alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from moetier.engine.hybrid.layer import HybridLayer
from moetier.identity.start import TOKENS, Checked, IdentityError
from moetier.kernels.cuda.hybrid import ALL_CPU, ALL_STREAM, HybridPath
from moetier.tiers.slots import ABSENT


def check_paths(layers: Sequence[HybridLayer], path: HybridPath, streams: bool, calls: int) -> Checked:
    """Compare `calls` random calls over the paths of `layers`; IdentityError names the first that differ.

    Each call goes by its slots and what the plan makes of the rest; all by the CPU; and streamed where DRAM has
    records. Half of a call's experts have slots, as far as there are such. Experts without a record in DRAM are read
    from disk for the CPU. streams: whether the host can have a call streamed.
    """
    generator = torch.Generator().manual_seed(0)
    path.live.fill_(path.tokens)
    compared, names = 0, dict.fromkeys(["device slots"])
    for number in range(calls):
        layer = layers[number % len(layers)]
        tokens = min(TOKENS[number % len(TOKENS)], path.tokens)
        x, ids, weights = _random_call(layer, path, tokens, generator)
        nowhere = replace(layer.tables, slot_table=torch.full_like(layer.tables.slot_table, -1))
        ways = {"device slots": (layer.tables, ALL_CPU), "CPU": (nowhere, ALL_CPU)}
        if layer.tier.slots and len(path.staging):
            ways["streamed by the device"] = (nowhere, ALL_STREAM)
        bits = {}
        for name, (tables, costs) in ways.items():
            path.set_costs(costs)
            bits[name] = path.forward(tables, x, ids, weights, torch.empty_like(x))
        if streams:
            bits["streamed by the host"] = layer.stream(x, ids, weights, torch.empty_like(x))
            layer.forget_ahead()
        first = bits.pop("device slots")
        for name, found in bits.items():
            differ = int((found.view(torch.int16) != first.view(torch.int16)).sum())
            compared += 1
            names[name] = None
            if differ:
                raise IdentityError(
                    f"identity check: the paths 'device slots' and {name!r} differ in {differ} of {x.numel()} values "
                    f"of a call of layer {layer.index} with {tokens} tokens: expected equal bits. Nothing is served. "
                    "Check the memory of the machine and of the GPU (nvidia-smi -q -d ECC), or report it with "
                    "`moetier doctor --json`"
                )
    return Checked(calls, compared, tuple(names))


def _random_call(
    layer: HybridLayer, path: HybridPath, tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of few experts, so that it takes little time; with outlier channels and rows of other sizes."""
    g, device = path.sizes.geometry, path.device
    few = min(g.experts, g.top_k + 2)
    shuffled = torch.randperm(g.experts, generator=generator)
    has_slot = torch.from_numpy(layer.slots.mirror != ABSENT)[shuffled]
    here, elsewhere = shuffled[has_slot], shuffled[~has_slot]
    half = max(few - elsewhere.numel(), min(few // 2, here.numel()))
    chosen = torch.cat([here[:half], elsewhere[: few - half]])
    x = torch.randn(tokens, g.hidden, generator=generator)
    x *= torch.exp2(torch.rand(tokens, 1, generator=generator) * 12 - 6)
    x[:, :2] *= 100
    order = torch.rand(tokens, few, generator=generator).argsort(1)[:, : g.top_k]
    weights = torch.rand(tokens, g.top_k, generator=generator) + 1e-3
    ids = chosen[order].to(torch.int32).contiguous()
    return x.bfloat16().to(device), ids.to(device), weights.contiguous().to(device)
