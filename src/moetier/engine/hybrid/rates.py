"""Costs of a missed expert on this machine, measured with the kernels, records and memory that will serve."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns

import numpy as np
import torch
from numpy.typing import NDArray

from moetier.contract import LayerGeometry
from moetier.kernels.cpu import CpuExperts
from moetier.kernels.cuda.hybrid import ALL_CPU, Costs
from moetier.tiers.link import copy_to_device

TOKENS, CALLS, AWAKE_NS = 4, 8, 100_000_000
"""Tokens of a measured call on the device; such calls in a graph; nanoseconds that it is busy before."""
WARM, ROUNDS, EXPERTS, PAIRS = 3, 9, 8, 32
"""Calls before the measured ones, which wake the threads; calls that a figure is the median of; experts of a call of
many, and pairs of each in a call that computes much."""


@dataclass(frozen=True)
class DeviceCalls:
    """Layer calls on the device, of up to `tokens` tokens, over slots that hold records, numbered `places`.

    forward: x bf16 [T, hidden], ids int32 and weights float32 [T, top_k], slot table int32 [experts], out like x.
    """

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]
    places: range
    tokens: int


def measure_costs(
    kernel: CpuExperts,
    addresses: NDArray[np.uint64],
    records: Sequence[torch.Tensor],
    room: torch.Tensor,
    device: DeviceCalls,
) -> Costs:
    """Takes a fraction of a second.

    Parameters
    ----------
    kernel
        What computes misses.
    addresses
        uint64 [N]: where records lie in DRAM, of every layer, so that they are not in a cache.
    records
        Some of the records as tensors that the device can copy from.
    room
        uint8 [slots, stride] on the device, to copy them to.
    device
        Layer calls over those slots.

    """
    experts = min(EXPERTS, kernel.geometry.experts, kernel.max_tokens)
    if addresses.size < experts or experts < 2 or not records:
        return ALL_CPU
    _copy(records, room, room.shape[0])  # calls on the device take longer over what is no record
    pairs = max(1, min(PAIRS, kernel.max_tokens * min(kernel.geometry.top_k, experts) // experts))
    rng = np.random.default_rng(0)

    def cpu_ns(count: int, each: int, copies: int = 0) -> tuple[float, float]:
        """Nanoseconds of a call, and of one of the copies to the device that are made meanwhile."""
        call, times = _call(kernel, count, each), []
        for _ in range(WARM + ROUNDS):
            table = np.zeros(kernel.geometry.experts, np.uint64)
            table[:count] = rng.choice(addresses, count)
            copied = _device_ns(partial(_copy, records, room, copies))
            cpu = _timed(partial(call, table))
            times.append((cpu, copied() / max(copies, 1)))
        cpu_ns, copy_ns = np.median(times[WARM:], axis=0).tolist()
        return cpu_ns, copy_ns

    one, many, busy = (cpu_ns(*call)[0] for call in ((1, 1), (experts, 1), (experts, pairs)))
    alone = statistics.median(_device_ns(partial(_copy, records, room, experts))() for _ in range(ROUNDS)) / experts
    beside, stream = cpu_ns(experts, 1, copies=max(1, round(many / alone)))
    expert = max((many - one) / (experts - 1), 1.0)
    call = max(one - expert, 0.0)
    return Costs(
        cpu_call=call,
        cpu_expert=expert,
        cpu_pair=max((busy - many) / experts + expert, 0.0) / pairs,
        stream_expert=stream,
        cpu_expert_beside=max((beside - call) / experts, expert),
        device_pair=_pair_ns(kernel.geometry, device, room.device),
    )


def _timed(run: Callable[[], object]) -> int:
    start = perf_counter_ns()
    run()
    return perf_counter_ns() - start


def _call(kernel: CpuExperts, experts: int, pairs: int) -> Callable[[NDArray[np.uint64]], object]:
    """A call of that many experts, numbered from 0, with so many pairs each, given where their records lie."""
    g = kernel.geometry
    width = min(g.top_k, experts)
    tokens = min(-(-experts * pairs // width), kernel.max_tokens)
    ids = np.full((tokens, g.top_k), -1, np.int32)
    ids[:, :width] = np.arange(tokens * width).reshape(tokens, width) % experts
    x = np.random.default_rng(1).integers(0x3C00, 0x3F80, (tokens, g.hidden), np.uint16)
    weights, rows = np.ones((tokens, g.top_k), np.float32), np.empty((tokens, g.top_k, g.hidden), np.float32)

    return lambda table: kernel.rows(x, ids, weights, table, rows)


def _pair_ns(g: LayerGeometry, calls: DeviceCalls, device: torch.device) -> float:
    """Return the nanoseconds of a token's expert in a captured call of a few tokens, all of which have slots."""
    tokens = min(TOKENS, calls.tokens)
    slots = calls.places.start + torch.arange(g.experts, dtype=torch.int32, device=device) % len(calls.places)
    x = torch.ones((tokens, g.hidden), dtype=torch.bfloat16, device=device)
    each = torch.arange(tokens * g.top_k, dtype=torch.int32, device=device).view(tokens, g.top_k) % g.experts
    weights, out = torch.ones((tokens, g.top_k), device=device), torch.empty_like(x)
    calls.forward(x, each, weights, slots, out)  # what is made at a first call
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            calls.forward(x, each, weights, slots, out)
    began = perf_counter_ns()
    while perf_counter_ns() - began < AWAKE_NS:  # an idle device's clocks are low
        _device_ns(graph.replay)()
    took = statistics.median(_device_ns(graph.replay)() for _ in range(ROUNDS))
    return took / (CALLS * tokens * g.top_k)


def _device_ns(run: Callable[[], object]) -> Callable[[], float]:
    """Launches; what is returned waits for the device and gives the nanoseconds that it took."""
    start, end = _event(), _event()
    start.record()
    run()
    end.record()

    def took() -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e6

    return took


def _copy(records: Sequence[torch.Tensor], room: torch.Tensor, count: int) -> None:
    """Have so many records copied, with as little of the host's time for each as there is when records are small."""
    stream, first, stride = torch.cuda.current_stream(room.device), room.data_ptr(), room.stride(0)
    for number in range(count):
        record = records[number % len(records)]
        copy_to_device(first + number % room.shape[0] * stride, record.data_ptr(), record.numel(), stream)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
