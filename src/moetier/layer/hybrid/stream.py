"""Many tokens: nearly every expert of the layer is routed to, so all that lack a slot go over the link, in rounds.

While the device computes the experts of one half of the staging slots, a side stream copies the next ones into the
other half. The host drives it, so such a call cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from moetier.kernels.gpu.base import Call, Sizes
from moetier.kernels.gpu.cuda_path import CudaPath


class Source(Protocol):
    """Where the records of one layer come from."""

    def records(self, experts: Sequence[int]) -> Iterator[tuple[int, torch.Tensor, object]]:
        """Each expert with its record, uint8 [stride], in any order, and a token that `copied` takes back."""

    def copied(self, token: object, done: torch.cuda.Event) -> None:
        """The copy of the record ends at `done`: its bytes must stay until then."""


class Streamer:
    """Calls of up to `max_tokens` tokens over the slots of all layers, `staging` of them for records on their way."""

    def __init__(self, sizes: Sizes, max_tokens: int, slots: torch.Tensor, staging: range) -> None:
        assert len(staging) >= 2, "streaming wants two staging slots at least"
        self._slots, self._experts, self.max_tokens = slots, sizes.geometry.experts, max_tokens
        self.path = CudaPath(sizes, max_tokens, slots.device)
        half = len(staging) // 2
        self._halves = (staging[:half], staging[half : 2 * half])
        self._copies = torch.cuda.Stream(slots.device)  # type: ignore[no-untyped-call]
        g = sizes.geometry
        self._rows = torch.zeros((max_tokens, g.top_k, g.hidden), dtype=torch.float32, device=slots.device)

    def forward(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        slot_table: torch.Tensor,
        missed: Sequence[int],
        source: Source,
        out: torch.Tensor,
    ) -> None:
        """The whole layer, x bf16 [T, hidden] -> out bf16 [T, hidden], T up to `max_tokens`.

        missed: the routed experts without a slot in `slot_table` int32 [experts].
        """
        call = Call(x, ids, weights, slot_table, self._slots, self._rows[: x.shape[0]])
        compute = torch.cuda.current_stream(self._slots.device)
        used = compute.record_event()  # what ran before may read the staging slots
        free = [used, used]
        records = source.records(missed)
        number = len(self._halves[0])
        rounds = [missed[i : i + number] for i in range(0, len(missed), number)]
        self.path.rows(call)
        for turn, experts in enumerate(rounds):
            half = self._halves[turn % 2]
            table, arrived = self._copy(records, len(experts), half, free[turn % 2], source)
            compute.wait_event(arrived)
            self.path.rows(Call(x, ids, weights, table, self._slots, call.rows))
            free[turn % 2] = compute.record_event()
        self.path.combine(call, out)

    def _copy(
        self,
        records: Iterator[tuple[int, torch.Tensor, object]],
        count: int,
        slots: range,
        free: torch.cuda.Event,
        source: Source,
    ) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Start the copies of the next `count` records into `slots`; their table, and the event behind them."""
        table: NDArray[np.int32] = np.full(self._experts, -1, np.int32)
        compute = torch.cuda.current_stream(self._slots.device)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(free)
            for slot, (expert, record, token) in zip(slots, (next(records) for _ in range(count)), strict=False):
                self._slots[slot, : record.numel()].copy_(record, non_blocking=True)
                table[expert] = slot
                source.copied(token, self._copies.record_event())
            on_device = torch.from_numpy(table).pin_memory().to(self._slots.device, non_blocking=True)
            on_device.record_stream(compute)
            return on_device, self._copies.record_event()
