"""What a missed expert costs on this machine, measured with the kernels, records and memory that will serve."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns

import numpy as np
import torch
from numpy.typing import NDArray

from moetier.kernels.cpu import CpuExperts
from moetier.kernels.gpu.hybrid import ALL_CPU, Costs

WARM, ROUNDS, EXPERTS, PAIRS = 3, 9, 8, 32
"""Calls before the measured ones, which wake the threads; calls that a figure is the median of; experts of a call of
many, and pairs of each in a call that computes much."""


def measure_costs(
    kernel: CpuExperts,
    addresses: NDArray[np.uint64],
    records: Sequence[torch.Tensor],
    room: torch.Tensor,
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

    """
    experts = min(EXPERTS, kernel.geometry.experts, kernel.max_tokens)
    if addresses.size < experts or experts < 2 or not records:
        return ALL_CPU
    pairs = max(1, min(PAIRS, kernel.max_tokens * min(kernel.geometry.top_k, experts) // experts))
    rng = np.random.default_rng(0)

    def cpu_ns(count: int, each: int, streaming: float = 0.0) -> float:
        """Of a call; streaming: records that are copied meanwhile."""
        call, times = _call(kernel, count, each), []
        for _ in range(WARM + ROUNDS):
            table = np.zeros(kernel.geometry.experts, np.uint64)
            table[:count] = rng.choice(addresses, count)
            _copy(records, room, round(streaming))
            times.append(_timed(partial(call, table)))
            torch.cuda.current_stream().synchronize()
        return statistics.median(times[WARM:])

    one, many, busy = cpu_ns(1, 1), cpu_ns(experts, 1), cpu_ns(experts, pairs)
    stream = _copy_ns(records, room)
    beside = cpu_ns(experts, 1, streaming=2 * many / stream + 1)
    expert = max((many - one) / (experts - 1), 1.0)
    call = max(one - expert, 0.0)
    return Costs(
        cpu_call=call,
        cpu_expert=expert,
        cpu_pair=max((busy - many) / experts + expert, 0.0) / pairs,
        stream_expert=stream,
        cpu_expert_beside=max((beside - call) / experts, expert),
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


def _copy_ns(records: Sequence[torch.Tensor], room: torch.Tensor) -> float:
    """Nanoseconds that one record takes to the device."""
    count, times = min(len(records), room.shape[0]), []
    for _ in range(ROUNDS):
        start, end = _event(), _event()
        start.record()
        _copy(records, room, count)
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e6 / count)
    return statistics.median(times)


def _copy(records: Sequence[torch.Tensor], room: torch.Tensor, count: int) -> None:
    """Have so many records copied."""
    for number in range(count):
        record = records[number % len(records)]
        room[number % room.shape[0], : record.numel()].copy_(record, non_blocking=True)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
