"""A hybrid step on the device: what has a slot, what is streamed, and what the CPU computes meanwhile."""

from __future__ import annotations

import ctypes
from dataclasses import astuple, dataclass

import torch

from moetier.kernels import protocol
from moetier.kernels.cuda.base import Call, Sizes
from moetier.kernels.cuda.path import CudaPath
from moetier.kernels.protocol import MAX_STAGED, STREAM_BLOCKS, HybridStep, word


def pinned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that the device reads and writes over the link: with unified addresses, by the host's own pointer."""
    return torch.zeros(shape, dtype=dtype).pin_memory()


@dataclass(frozen=True)
class Mail:
    """The mailbox's memory, pinned, for steps of up to `tokens` tokens: see protocol.h and native/core/mailbox.h."""

    box: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    x: torch.Tensor
    streamed: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, sizes: Sizes, tokens: int) -> Mail:
        g = sizes.geometry
        return cls(
            pinned(ctypes.sizeof(protocol.Box) // protocol.WORD, dtype=torch.int32),
            pinned(tokens, g.top_k, dtype=torch.int32),
            pinned(tokens, g.top_k, dtype=torch.float32),
            pinned(tokens, g.hidden, dtype=torch.bfloat16),
            pinned(MAX_STAGED, dtype=torch.int32),
            pinned(tokens, g.top_k, g.hidden, dtype=torch.float32),
        )

    @property
    def late(self) -> int:
        """The request that the device gave up waiting for, or 0."""
        return int(self.box[word("late")])

    @property
    def refused(self) -> int:
        """The request that the CPU could not answer, or 0."""
        return int(self.box[word("refused")])


@dataclass(frozen=True)
class Costs:
    """Costs that the step's plan is made from, in nanoseconds: see `Costs` of protocol.h."""

    cpu_call: float
    cpu_expert: float
    cpu_pair: float
    stream_expert: float
    cpu_expert_beside: float
    """An expert on the CPU while records are streamed, which come out of the same DRAM."""
    device_pair: float
    """A token's expert on the device, which begins when all that is streamed is there."""

    def tensor(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(astuple(self), dtype=torch.float32, device=device)


ALL_CPU = Costs(0.0, 0.0, 0.0, 1e12, 0.0, 0.0)
ALL_STREAM = Costs(1e12, 1e12, 0.0, 0.0, 1e12, 0.0)


@dataclass(frozen=True)
class LayerTables:
    """Tables of one layer: its number among the layers, where experts are on the device and in DRAM, and its heat.

    slot_table int32 [experts] on the device; records uint64 [experts] pinned: address of each expert's record in DRAM
    that the device may read, 0 where it may not; heat uint32 (as int32) [experts] on the device: pairs so far; counts
    int64 [len(COUNTS)] on the device.
    """

    index: int
    slot_table: torch.Tensor
    records: torch.Tensor
    heat: torch.Tensor
    counts: torch.Tensor


class HybridPath:
    """The kernels of hybrid steps of up to `tokens` tokens, shared by all layers of the same sizes on one stream.

    slots: uint8 [slots, stride], every layer's; those numbered `staging` are for streaming, which reads `record_bytes`
    bytes of each record by itself: they must lie in memory that is pinned or registered.
    """

    def __init__(
        self,
        sizes: Sizes,
        tokens: int,
        slots: torch.Tensor,
        staging: range,
        record_bytes: int,
        costs: Costs,
        patience_seconds: float,
    ) -> None:
        assert len(staging) <= MAX_STAGED, f"at most {MAX_STAGED} staging slots"
        self.device = slots.device
        self.sizes, self.tokens, self.slots, self.staging = sizes, tokens, slots, staging
        self._record_bytes = record_bytes
        g = sizes.geometry
        self.path = CudaPath(sizes, tokens, self.device, box_tokens=tokens)
        self.mail = Mail.of(sizes, tokens)
        self.costs = costs.tensor(self.device)
        self.live = torch.full((1,), tokens, dtype=torch.int32, device=self.device)
        """How many tokens of the coming calls are real, int32 [1]; more than there are means all."""
        table_at = ctypes.sizeof(protocol.Step)
        self._step = torch.zeros(table_at + 4 * g.experts, dtype=torch.uint8, device=self.device)
        self._table = self._step[table_at:].view(torch.int32)
        self._ids = torch.zeros((tokens, g.top_k), dtype=torch.int32, device=self.device)
        self._rows = torch.zeros((tokens, g.top_k, g.hidden), dtype=torch.float32, device=self.device)
        self._patience_ns = int(patience_seconds * 1e9)
        self._steps: dict[int, tuple[LayerTables, ctypes.Structure]] = {}

    def decodes(self, tokens: int) -> bool:
        """Whether a call of so many tokens is few enough for the decode kernels."""
        return self.path.decode_kernels(tokens) is not None

    def set_costs(self, costs: Costs) -> None:
        """Plan the coming calls by other rates, in graphs that are captured already too."""
        self.costs.copy_(costs.tensor(self.device))

    def forward(
        self, layer: LayerTables, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """A layer call: x bf16 [T, hidden], ids int32 and weights float32 [T, top_k] -> out bf16 [T, hidden].

        T up to `tokens`, all contiguous. Launches only: nothing is allocated, nothing waits on the host. The CPU's part
        must be answered by somebody (native Mailbox), else the device stops after its patience.
        """
        call = Call(x, ids, weights, layer.slot_table, self.slots, self.mail.rows)
        decode = self.path.decode_kernels(x.shape[0])
        hybrid = self._hybrid_step(layer)
        if decode:
            if not decode.begins:
                self._begin(call, hybrid, quantize=True)
            decode.run(call, out, self.path.between, hybrid)
            return out
        self._begin(call, hybrid, quantize=False)
        planned = Call(x, self._ids[: x.shape[0]], weights, self._table, self.slots, self._rows[: x.shape[0]])
        self.path.prefill(planned)
        self.path.combine_hybrid(planned, self._table, out, hybrid)
        return out

    def _hybrid_step(self, layer: LayerTables) -> ctypes.Structure:
        """Return what the kernels are given of the layer, the mailbox and the plan: made once, it holds addresses."""
        kept = self._steps.get(id(layer))
        if kept is None:  # the layer is kept too, so that its addresses and its id stay its own
            kept = self._steps[id(layer)] = layer, self._make_step(layer)
        return kept[1]

    def _make_step(self, layer: LayerTables) -> ctypes.Structure:
        mail = self.mail
        tensors = {
            "live": self.live,
            "step": self._step,
            "box": mail.box,
            "counts": layer.counts,
            "costs": self.costs,
            "heat": layer.heat,
            "records": layer.records,
            "step_ids": self._ids,
            "box_ids": mail.ids,
            "box_weights": mail.weights,
            "box_x": mail.x,
            "box_streamed": mail.streamed,
            "box_rows": mail.rows,
        }
        return HybridStep(
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            patience=self._patience_ns,
            record_bytes=self._record_bytes,
            layer=layer.index,
            staging_first=self.staging.start,
            staging=len(self.staging),
            streams=STREAM_BLOCKS if len(self.staging) else 0,
        )

    def _begin(self, call: Call, hybrid: ctypes.Structure, quantize: bool) -> None:
        p = self.path
        blocks = call.x.numel() // 32 if quantize else 0
        activations = (call.x, p.between.q, p.between.meta, blocks, call.ids, call.weights, call.ids.numel())
        p.few.kernels["begin_step"].launch(
            (1 + hybrid.streams + -(-blocks // 8), 1),
            (*activations, call.slot_table, self.slots, self.slots.stride(0), hybrid),
        )
