"""Slots filled from pinned memory while decode runs: both speeds, and a stress test of the table and the slots."""

from __future__ import annotations

import importlib.util
import random
import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from common import SHAPES, Shape, captured, host_to_device_rate, median_ms, random_routes, random_slots, record_of

import moetier
from moetier_reference.experts import DeviceExperts

_spec = importlib.util.spec_from_file_location("device_slots", Path(moetier.__file__).parent / "tiers" / "slots.py")
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)  # the package around it wants more than torch
DeviceSlots = _module.DeviceSlots

LAYERS, SPARE, TOKENS = 20, 48, 8


def empty_slots(count: int, stride: int) -> torch.Tensor:
    return torch.zeros((count, stride), dtype=torch.uint8, device="cuda")


def _elapsed(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return start.elapsed_time(end)


def speed(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """Decode of TOKENS tokens alone, fills alone, then both at once, for `rounds` rounds of SPARE fills."""
    g = shape.geometry
    experts = DeviceExperts(g, shape.family, TOKENS)
    stride = experts.sizes.layout.stride
    source = random_slots(experts.sizes.layout, 8)
    pinned = [record.cpu().pin_memory() for record in source]
    live = 96
    slots = DeviceSlots(g.experts, range(live), empty_slots(live + SPARE, stride))
    for expert in range(live):
        slots.fill(expert, pinned[expert % 8])
    slots.publish(wait=True)
    x = torch.randn(TOKENS, g.hidden, device="cuda", dtype=torch.bfloat16)
    routes = [random_routes(TOKENS, live, g.top_k) for _ in range(LAYERS)]
    out = torch.empty_like(x)
    graph = captured(lambda: [experts.forward(x, *route, slots.table, slots.slots, out) for route in routes])
    alone = median_ms(graph.replay)
    side = slots._stream
    assert side is not None
    fill_rates, decode_times, turn = [], [], live
    link = host_to_device_rate()
    for _ in range(rounds):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        marks[0].record(side)
        for i in range(SPARE):
            slots.fill(live + (turn + i) % (g.experts - live), pinned[i % 8])
        marks[1].record(side)
        replays = max(1, int(0.8 * SPARE * stride / link * 1e3 / alone))  # for as long as the copies take, or less
        marks[2].record()
        for _ in range(replays):
            graph.replay()
        marks[3].record()
        fill_rates.append(SPARE * stride / _elapsed(marks[0], marks[1]) * 1e3)
        decode_times.append(_elapsed(marks[2], marks[3]) / replays)
        for expert in slots.publish(wait=True):
            slots.retire(expert)
        turn += SPARE
    torch.cuda.synchronize()
    slots.check_integrity(lambda expert: record_of(source, expert % 8))
    rate, both = statistics.median(fill_rates), statistics.median(decode_times)
    return [
        {"what": f"fill {shape.name} while decode runs", "GB/s": rate / 1e9, "of link": rate / link},
        {"what": f"decode {shape.name} {TOKENS} tokens while slots fill", "ms": both, "slower by": both / alone - 1},
    ]


def stress(shape: Shape, rounds: int) -> dict[str, Any]:
    """Random fills and retirements during compute; every output compared with that of slots that never change."""
    g = shape.geometry
    pick = random.Random(1)
    torch.manual_seed(1)
    experts = DeviceExperts(g, shape.family, 32)
    fixed = random_slots(experts.sizes.layout, g.experts)
    everywhere = torch.arange(g.experts, dtype=torch.int32, device="cuda")
    pinned = [record.cpu().pin_memory() for record in fixed]
    resident = range(g.top_k)
    slots = DeviceSlots(g.experts, resident, empty_slots(len(resident) + g.experts // 4, experts.sizes.layout.stride))
    for expert in resident:
        slots.fill(expert, pinned[expert])
    slots.publish(wait=True)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    fills = 0
    for number in range(rounds):
        coming = {filling.expert for filling in slots._filling.values()}
        for _ in range(pick.randrange(4)):
            absent = [e for e in range(g.experts) if slots.mirror[e] < 0 and e not in coming]
            if slots.free and absent:
                expert = pick.choice(absent)
                slots.fill(expert, pinned[expert])
                coming.add(expert)
                fills += 1
        slots.publish(wait=pick.random() < 0.2)
        live = slots.live
        tokens = pick.choice([1, 4, 30])
        order = torch.rand(tokens, len(live), device="cuda").topk(g.top_k, 1).indices
        ids = torch.from_numpy(live).cuda()[order].contiguous()
        weights = torch.rand(tokens, g.top_k, device="cuda")
        x = torch.randn(tokens, g.hidden, device="cuda", dtype=torch.bfloat16)
        found = experts.forward(x, ids, weights, slots.table, slots.slots)
        want = experts.forward(x, ids, weights, everywhere, fixed)
        differ += (found.view(torch.int16) != want.view(torch.int16)).sum()
        for expert in slots.spares.tolist():
            if pick.random() < 0.15:
                slots.retire(expert)
        if number % 100 == 0:
            slots.check_integrity(lambda expert: record_of(fixed, expert))
    slots.check_integrity(lambda expert: record_of(fixed, expert))
    return {
        "what": f"slots of {shape.name}: random fills during compute",
        "steps": rounds,
        "fills": fills,
        "differ": int(differ),
    }


def run(arguments: Namespace) -> list[dict[str, Any]]:
    """Stress, then speed."""
    few = arguments.quick
    return [stress(SHAPES["base"], 200 if few else 2000), *speed(SHAPES["v4-flash"], 3 if few else 9)]
