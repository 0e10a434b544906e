"""MoE layers in one captured graph: all-resident against hybrid, and the plan's choice against fixed splits."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from bed import Bed, Hybrid, Rates

from moetier.contract import Family
from moetier.kernels.cuda.hybrid import ALL_CPU, Costs
from moetier.plan.catalog import layer_of

GEOMETRY = layer_of("deepseek-v4-flash")
FAMILY = Family(swiglu_limit=10.0, route_weight_before_down=True)
SHARES = (0.04, 0.12, 0.29, 0.43, 1.0)
TOKENS = (1, 4, 8, 32)
STEPS = 24
"""Different routings a cell is the median of."""
RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Fixed splits: the share of a call's misses that is streamed."""
ROUNDS = {1: 3, 4: 2}
"""How often each routing meets each split: short steps oftener, of other numbers of tokens once."""
EXPONENT = 1.0
"""Of the Zipf law that routing follows where no trace is given."""


class Zipf:
    """Routes by a Zipf law over the experts of each layer, in an order of its own."""

    def __init__(self, layers: int, experts: int, exponent: float = EXPONENT) -> None:
        rng = np.random.default_rng(5)
        self.order = [rng.permutation(experts) for _ in range(layers)]
        ranks = np.arange(1, experts + 1) ** -exponent
        log = np.zeros((layers, experts), np.float32)
        for layer, order in enumerate(self.order):
            log[layer, order] = np.log(ranks)
        self._log = torch.from_numpy(log).cuda()

    def hottest(self, layer: int, number: int) -> list[int]:
        return [int(e) for e in self.order[layer][:number]]

    def ids(self, tokens: int, top_k: int) -> torch.Tensor:
        """int32 [layers, tokens, top_k], distinct in a token."""
        noise = -torch.log(-torch.log(torch.rand(self._log.shape[0], tokens, self._log.shape[1], device="cuda")))
        return (self._log[:, None] + noise).topk(top_k, 2).indices.to(torch.int32).contiguous()


class Stack:
    """All layers in one graph, `forward(layer, x, ids, weights, out)` each."""

    def __init__(self, layers: int, tokens: int, forward: Callable[..., None]) -> None:
        g = GEOMETRY
        self.x = torch.randn(tokens, g.hidden, device="cuda").bfloat16()
        self.ids = torch.zeros((layers, tokens, g.top_k), dtype=torch.int32, device="cuda")
        self.weights = torch.rand(tokens, g.top_k, device="cuda") + 0.1
        self.out = torch.empty((layers, tokens, g.hidden), dtype=torch.bfloat16, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            for layer in range(layers):
                forward(layer, self.x, self.ids[layer], self.weights, self.out[layer])

    def time_us(self, ids: torch.Tensor) -> float:
        """Microseconds of one replay with these routes."""
        self.ids.copy_(ids)
        torch.cuda.synchronize()
        # Blocking: while it waits, this thread leaves its CPU to those that compute.
        start, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def median_us(self, routes: Sequence[torch.Tensor]) -> float:
        self.time_us(routes[0])
        return statistics.median(self.time_us(ids) for ids in routes)


def in_us(costs: Costs, record: int, rates: Rates) -> dict[str, float]:
    """As a row has them, and what the bytes of a record take out of DRAM."""
    return {f"{key}_us": ns / 1e3 for key, ns in asdict(costs).items()} | {"dram_expert_us": record / rates.dram * 1e6}


def breakdown(stack: Stack, hybrid: Hybrid, routes: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Of steps with these routes, microseconds a layer: measured apart, so that their sum can be wrong.

    launch: the same graph with nothing routed. device: the same steps with every answer given ahead, without launch;
    where they stream, while the CPU's threads compute other calls, for both read the same DRAM. waited: what the device
    counts while it waits for the CPU. adds_up: their sum over the time of the steps.
    """
    layers = hybrid.bed.count
    before, cpu_before = hybrid.counts(), hybrid.mailbox.counts()
    times = [stack.time_us(ids) / layers for ids in routes]
    after, cpu_after = hybrid.counts(), hybrid.mailbox.counts()
    calls = len(routes) * layers
    counted = {key: (after[key] - before[key]) / calls for key in after}
    nothing = torch.full_like(routes[0], -1)
    launch = stack.median_us([nothing] * 8) / layers
    with hybrid.answered_ahead(computing=counted["streamed"] > 0):
        stack.time_us(routes[0])
        device = statistics.mean(stack.time_us(ids) for ids in routes) / layers - launch
    hybrid.mailbox.wake()
    waited = counted["waited_ns"] / 1e3
    return {
        "us": statistics.median(times),
        "quartiles": spread(times),
        "launch_us": launch,
        "device_us": device,
        "waited_us": waited,
        "adds_up": (launch + device + waited) / statistics.mean(times),
        "misses": counted["misses"],
        "streamed": counted["streamed"],
        "cpu_us": (cpu_after[1] - cpu_before[1]) / calls / 1e3,
    }


def spread(values: Sequence[float]) -> str:
    """Quartiles, as text."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.0f}..{high:.0f}"


def split(ratio: float) -> Costs:
    """Costs with which the plan streams this share of any call's misses."""
    return Costs(0.0, 1e3 * ratio, 0.0, 1e3 * (1 - ratio), 1e3 * ratio, 0.0)


def cells(bed: Bed, full: Hybrid, rates: Rates, quick: bool) -> list[dict[str, Any]]:
    """Every share of slots at every M."""
    g, layers, rows = GEOMETRY, bed.count, []
    zipf, costs = Zipf(bed.count, GEOMETRY.experts), bed.costs()
    steps = 6 if quick else STEPS
    rows.append({"what": "costs of the plans", **in_us(costs, bed.layout.stride, rates)})
    resident_us = {}
    routes = {tokens: [zipf.ids(tokens, g.top_k) for _ in range(steps)] for tokens in TOKENS}
    for tokens in TOKENS:
        resident_us[tokens] = Stack(layers, tokens, full.all_resident).median_us(routes[tokens]) / layers
    for share in SHARES:
        number = round(share * g.experts)
        hybrid = bed.place([zipf.hottest(layer, number) for layer in range(layers)], 0, costs)
        rows += [cell(hybrid, routes[tokens], share, tokens, resident_us[tokens], rates) for tokens in TOKENS]
        hybrid.close()
        del hybrid
        torch.cuda.empty_cache()
    return rows


def cell(
    hybrid: Hybrid, routes: list[torch.Tensor], share: float, tokens: int, resident_us: float, rates: Rates
) -> dict[str, Any]:
    """Microseconds a layer: by the plan, by every fixed split, and all-resident."""
    layers = hybrid.bed.count
    hybrid.mailbox.wake()
    stack = Stack(layers, tokens, hybrid.forward)
    for ids in routes:  # the threads and the caches of their pages wake
        stack.time_us(ids)
    parts = breakdown(stack, hybrid, routes)
    floor = parts["misses"] * hybrid.bed.layout.stride / rates.dram * 1e6
    row = {"what": f"{share:.0%} in slots, M={tokens}", **parts, "resident_us": resident_us, "dram_floor_us": floor}
    return row | against_splits(stack, hybrid, routes) if share < 1 else row


def against_splits(stack: Stack, hybrid: Hybrid, routes: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The plan and every fixed split, from step to step another, so that what disturbs the machine disturbs all alike.

    Each timed step follows one of its own kind with other routes, so that none inherits what another left (threads that
    slept through a step of streaming); a routing comes again only after all the others: what it read is in no cache.
    over_best: the most by which the plan takes longer than a split, by the median of the routings' own ratios, since
    routings differ more from each other than splits do.
    """
    options = {"plan": hybrid.costs} | {f"{ratio:.0%}": split(ratio) for ratio in RATIOS}
    times = {name: np.zeros(len(routes)) for name in options}
    rounds = ROUNDS.get(stack.ids.shape[1], 1)
    for turn in range(rounds * len(options)):
        for number, ids in enumerate(routes):
            name = list(options)[(number + turn) % len(options)]
            hybrid.path.set_costs(options[name])
            stack.time_us(routes[(number + len(routes) // 2) % len(routes)])
            times[name][number] += stack.time_us(ids) / hybrid.bed.count / rounds
    hybrid.path.set_costs(hybrid.costs)
    plan = times.pop("plan")
    ratios = {name: float(np.median(plan / each)) for name, each in times.items()}
    fixed = {name: float(np.median(each)) for name, each in times.items()}
    best = max(ratios, key=ratios.__getitem__)
    return {
        "plan_us": float(np.median(plan)),
        "plan_quartiles": spread(list(plan)),
        "best_fixed": f"{best} {fixed[best]:.0f}",
        "over_best": ratios[best],
        "fixed_us": fixed,
    }


def one_miss(bed: Bed, full: Hybrid, rates: Rates) -> list[dict[str, Any]]:
    """M=1: layers without a miss and layers with exactly one, against all-resident and against the limit."""
    g, layers, rows = GEOMETRY, bed.count, []
    hybrid = bed.place([range(64)] * layers, 0, ALL_CPU)
    rng = np.random.default_rng(3)

    def routes(misses: int) -> list[torch.Tensor]:
        made = []
        for _ in range(STEPS):
            ids = np.stack([rng.choice(64, g.top_k, replace=False) for _ in range(layers)])
            for layer in range(layers):
                ids[layer, :misses] = rng.choice(np.arange(64, g.experts), misses, replace=False)
            made.append(torch.from_numpy(ids[:, None].astype(np.int32)).cuda())
        return made

    hybrid.mailbox.wake()
    stack, plain = Stack(layers, 1, hybrid.forward), Stack(layers, 1, full.all_resident)
    none, one = routes(0), routes(1)
    for name, these in (("no miss", none), ("one miss", one), ("two misses", routes(2))):
        both = [(stack.time_us(ids) / layers, plain.time_us(ids) / layers) for ids in (these[0], *these)][1:]
        hybrid_us, resident_us = (statistics.median(column) for column in zip(*both, strict=True))
        row = {"what": f"M=1, {name}", "us": hybrid_us, "resident_us": resident_us, "more_us": hybrid_us - resident_us}
        parts = breakdown(stack, hybrid, these)
        row |= {key: parts[key] for key in ("launch_us", "device_us", "waited_us", "adds_up", "cpu_us")}
        if name != "no miss":
            misses = 1 if name == "one miss" else 2
            row["limit_us"] = 1.25 * misses * bed.layout.stride / rates.dram * 1e6 + 12
        rows.append(row)
    hybrid.close()
    return rows


def run(arguments: Namespace) -> list[dict[str, Any]]:
    """Rows of the table."""
    bed = Bed(GEOMETRY, FAMILY, 4 if arguments.quick else arguments.layers, arguments.threads)
    rates = bed.rates()
    costs = bed.costs()
    machine = {
        "what": f"{bed.count} layers, record {bed.layout.stride} B",
        "dram_GB_s": rates.dram / 1e9,
        "link_GB_s": rates.link / 1e9,
        "threads": rates.threads,
        **in_us(costs, bed.layout.stride, rates),
    }
    full = bed.place([range(GEOMETRY.experts)] * bed.count, 0, costs)
    rows = [machine, *one_miss(bed, full, rates), *cells(bed, full, rates, arguments.quick)]
    full.close()
    bed.close()
    return rows
