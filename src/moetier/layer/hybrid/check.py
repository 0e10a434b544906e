"""The identity check of the device at start: random calls by slots, by the CPU and streamed, bit for bit alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moetier.errors import MoetierError
from moetier.kernels.gpu.hybrid import ALL_CPU, ALL_STREAM, HybridPath
from moetier.layer.hybrid.layer import HybridLayer

TOKENS = (1, 4, 1, 16)
"""Of the calls, in turn."""


class DeviceIdentityError(MoetierError):
    """Two paths of a layer call differ in a bit on this machine."""

    exit_code = 1


@dataclass(frozen=True)
class Checked:
    """What was compared."""

    calls: int
    comparisons: int


def check_paths(layers: Sequence[HybridLayer], path: HybridPath, calls: int) -> Checked:
    """Each call by its slots and what the plan makes of the rest; all by the CPU; and streamed where DRAM has it.

    Experts without a record in DRAM are read from disk for the second and third. DeviceIdentityError names the paths.
    """
    generator = torch.Generator(path.device).manual_seed(0)
    path.live.fill_(path.tokens)
    for number in range(calls):
        layer = layers[number % len(layers)]
        tokens = min(TOKENS[number % len(TOKENS)], path.tokens)
        x, ids, weights = _random_call(path, tokens, generator)
        nowhere = replace(layer.tables, slot_table=torch.full_like(layer.tables.slot_table, -1))
        ways = {"device slots": (layer.tables, ALL_CPU), "CPU": (nowhere, ALL_CPU), "streamed": (nowhere, ALL_STREAM)}
        bits = {}
        for name, (tables, costs) in ways.items():
            path.set_costs(costs)
            bits[name] = path.forward(tables, x, ids, weights, torch.empty_like(x)).view(torch.int16).clone()
        for name in ("CPU", "streamed"):
            differ = int((bits[name] != bits["device slots"]).sum())
            if differ:
                raise DeviceIdentityError(
                    f"identity check: the paths 'device slots' and {name!r} differ in {differ} of {x.numel()} values "
                    f"of a call of layer {layer.index} with {tokens} tokens: expected equal bits. Nothing is served. "
                    "Check the memory of the machine and of the GPU (nvidia-smi -q -d ECC), or report it with "
                    "`moetier doctor --json`"
                )
    return Checked(calls, 2 * calls)


def _random_call(
    path: HybridPath, tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of few experts, so that it takes little time; with outlier channels and rows of other sizes."""
    g, device = path.sizes.geometry, path.device
    few = min(g.experts, g.top_k + 2)
    chosen = torch.randperm(g.experts, generator=generator, device=device)[:few]
    x = torch.randn(tokens, g.hidden, generator=generator, device=device)
    x *= torch.exp2(torch.rand(tokens, 1, generator=generator, device=device) * 12 - 6)
    x[:, :2] *= 100
    order = torch.rand(tokens, few, generator=generator, device=device).argsort(1)[:, : g.top_k]
    weights = torch.rand(tokens, g.top_k, generator=generator, device=device) + 1e-3
    return x.bfloat16(), chosen[order].to(torch.int32).contiguous(), weights.contiguous()
