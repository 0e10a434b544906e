"""The identity check of the device at start: random calls by slots, by the CPU and streamed, bit for bit alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from moetier.engine.hybrid.layer import HybridLayer
from moetier.identity.calls import random_call, require_equal
from moetier.identity.start import TOKENS, Checked
from moetier.kernels.cuda.hybrid import ALL_CPU, ALL_STREAM, HybridPath
from moetier.tiers.slots import ABSENT

ADVICE = (
    "check the memory of the machine and of the GPU (nvidia-smi -q -d ECC), or report it with `moetier doctor --json`"
)


def check_paths(layers: Sequence[HybridLayer], path: HybridPath, streams: bool, calls: int) -> Checked:
    """Compare `calls` random calls over the paths of `layers`; IdentityError names the first that differ.

    Each call goes by its slots and what the plan makes of the rest; all by the CPU; and streamed where DRAM has
    records. Half of a call's experts have slots, as far as there are such. Experts without a record in DRAM are read
    from disk for the CPU. streams: whether the host can have a call streamed.
    """
    generator = np.random.default_rng(0)
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
        first = _bits(bits.pop("device slots"))
        for name, found in bits.items():
            where = f"a call of layer {layer.index} with {tokens} tokens"
            require_equal(("device slots", first), (name, _bits(found)), where, ADVICE)
            compared += 1
            names[name] = None
    return Checked(calls, compared, tuple(names))


def _random_call(
    layer: HybridLayer, path: HybridPath, tokens: int, generator: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a call of few experts, so that it takes little time."""
    g, device = path.sizes.geometry, path.device
    few = min(g.experts, g.top_k + 2)
    shuffled = generator.permutation(g.experts).astype(np.int32)
    has_slot = layer.slots.mirror[shuffled] != ABSENT
    here, elsewhere = shuffled[has_slot], shuffled[~has_slot]
    half = max(few - elsewhere.size, min(few // 2, here.size))
    chosen = generator.permutation(np.concatenate([here[:half], elsewhere[: few - half]]))
    call = random_call(g, layer.index, tokens, generator, chosen)
    x = torch.from_numpy(call.x.view(np.int16)).view(torch.bfloat16)
    return x.to(device), torch.from_numpy(call.ids).to(device), torch.from_numpy(call.weights).to(device)


def _bits(x: torch.Tensor) -> NDArray[np.uint16]:
    return x.view(torch.int16).cpu().numpy().view(np.uint16)
