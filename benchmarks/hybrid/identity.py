"""All-resident against hybrid in one process: the same calls, every bit, while slots are filled and given up."""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from bed import TOKENS, Bed

from moetier.contract import Family, LayerGeometry
from moetier.kernels.cuda.hybrid import ALL_CPU, ALL_STREAM
from moetier.plan.catalog import layer_of

SHARES = (0.04, 0.12, 0.29, 0.43)
EAGER = (1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 8, 8, 16, 1, 1, 2, 4, 4, 8, 21, TOKENS)
GRAPHS = (1, 1, 4)
"""Tokens of a call, each as often as it stands here."""
MODEL = ("v4-flash", layer_of("deepseek-v4-flash"), Family(swiglu_limit=10.0, route_weight_before_down=True))
SMALL = ("narrow", LayerGeometry(512, 256, 64, 6, 4), Family())
ODD = ("odd", LayerGeometry(288, 96, 37, 3), Family(swiglu_limit=7.0))


def routes(g: LayerGeometry, tokens: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random routes; some tokens share all experts, some ids are outside the layer."""
    scores = torch.rand(tokens, g.experts, device="cuda", generator=rng)
    if tokens > 2:
        scores[1] = scores[0]
    ids = scores.topk(g.top_k, 1).indices.to(torch.int32)
    if tokens > 4:
        ids[2, 0], ids[3, 1] = -1, g.experts
    return ids.contiguous(), torch.rand(tokens, g.top_k, device="cuda", generator=rng) + 0.1


def check(
    name: str, g: LayerGeometry, family: Family, share: float, calls: int, layers: int, arguments: Namespace
) -> dict[str, Any]:
    """`calls` layer calls at one share of slots, or as many as there is time for; a third in a captured graph.

    Of every other call only some tokens are real and the rest is padding, which may hold anything.
    """
    bed = Bed(g, family, layers, arguments.threads)
    resident = max(1, round(share * g.experts * 0.75))
    spare = max(1, round(share * g.experts) - resident)
    costs = bed.costs()
    hybrid = bed.place([random.Random(i).sample(range(g.experts), resident) for i in range(layers)], spare, costs)
    rng, pick = torch.Generator("cuda").manual_seed(7), random.Random(7)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    fills, padded, graphs = 0, 0, {tokens: Graph(hybrid, tokens) for tokens in (1, 4)}
    mode_of = (ALL_CPU, costs, ALL_STREAM, costs)
    end, done = time.monotonic() + arguments.seconds, 0
    for number in range(calls):
        if number % 50 == 0:
            if time.monotonic() > end:
                break
            hybrid.path.set_costs(mode_of[number // 50 % 4])
            hybrid.mailbox.wake()
        layer = pick.randrange(layers)
        slots = hybrid.slots[layer]
        slots.publish()
        if number % 3 == 0:  # a fill goes on beside the call, into a slot that was given up or is free
            fills += _fill(hybrid, layer, pick)
        tokens = pick.choice(EAGER if number % 3 else GRAPHS)
        live = pick.randint(1, tokens) if number % 2 else tokens
        padded += live < tokens
        x = torch.randn(tokens, g.hidden, device="cuda", generator=rng).bfloat16()
        x[live:] = float("nan")
        ids, weights = routes(g, tokens, rng)
        wanted, found = torch.empty_like(x), torch.full_like(x, 7)
        bed.from_patterns(layer, x, ids, weights, wanted)
        hybrid.path.live.fill_(live)
        if number % 3:
            hybrid.forward(layer, x, ids, weights, found)
        else:
            graphs[tokens].run(layer, x, ids, weights, found)
        differ += (wanted[:live].view(torch.int16) != found[:live].view(torch.int16)).sum()
        done += 1
    torch.cuda.synchronize()
    counts, (cpu_calls, *_) = hybrid.counts(), hybrid.mailbox.counts()
    for layer, slots in enumerate(hybrid.slots):
        slots.publish(wait=True)
        slots.check_integrity(lambda e, layer=layer: hybrid.record(layer, e).numpy())
    hybrid.close()
    bed.close()
    return {
        "what": f"identity {name}, {share:.0%} in slots",
        "calls": done,
        "padded": padded,
        "cpu_calls": cpu_calls,
        "cpu_rows": counts["pairs_cpu"],
        "streamed": counts["streamed"],
        "fills": fills,
        "differ": int(differ),
    }


def _fill(hybrid: Any, layer: int, pick: random.Random) -> int:
    """Start a copy of some expert without a slot, where there is room; how many were started."""
    slots = hybrid.slots[layer]
    if not slots.free and slots.spares.size:
        slots.retire(int(pick.choice(list(slots.spares))))
    absent = [e for e in range(slots.mirror.size) if slots.mirror[e] < 0 and e not in _coming(slots)]
    if not slots.free or not absent:
        return 0
    expert = pick.choice(absent)
    slots.fill(expert, hybrid.record(layer, expert))
    return 1


def _coming(slots: Any) -> set[int]:
    return {filling.expert for filling in slots._filling.values()}


class Graph:
    """One captured call a layer and number of tokens."""

    def __init__(self, hybrid: Any, tokens: int) -> None:
        g = hybrid.bed.geometry
        self.hybrid = hybrid
        self.x = torch.zeros(tokens, g.hidden, dtype=torch.bfloat16, device="cuda")
        self.ids = torch.full((tokens, g.top_k), -1, dtype=torch.int32, device="cuda")
        self.weights = torch.zeros(tokens, g.top_k, device="cuda")
        self.out = torch.empty_like(self.x)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        if layer not in self.graphs:
            torch.cuda.synchronize()
            self.graphs[layer] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[layer]):
                self.hybrid.forward(layer, self.x, self.ids, self.weights, self.out)
        self.x.copy_(x), self.ids.copy_(ids), self.weights.copy_(weights)
        self.graphs[layer].replay()
        out.copy_(self.out)


def run(arguments: Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the table."""
    calls = 300 if arguments.quick else arguments.calls
    cells = [(MODEL, share, calls) for share in SHARES]
    cells += [(shape, share, calls // 4) for shape in (SMALL, ODD) for share in (0.12, 0.43)]
    rows = []
    for shape, share, number in cells:
        rows.append(check(*shape, share, number, 2, arguments))
        assert rows[-1]["cpu_calls"], "a cell never used the CPU"
        yield rows[-1]
    summed = ("calls", "padded", "cpu_rows", "streamed", "fills", "differ")
    yield {"what": "identity in all", **{key: sum(row[key] for row in rows) for key in summed}}
