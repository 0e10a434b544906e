"""Steps of an engine over the staging slots, on a device without streams: who disturbs whom.

vLLM's own dispatcher says for every forward whether a graph is replayed; then no code of ours runs and the device
fills the staging slots by itself. Everything else is what serves: the worker's hooks, the model's, layers, streamer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from moetier.engine.hybrid.model import HybridModel
from moetier.kernels.cuda.base import Call
from moetier.store.store import Store
from moetier.tiers.slots import ABSENT
from moetier.vllm import runtime
from moetier.vllm.steps import StepAware
from tests.engine.late import COMPUTE, COPIES, Streams
from tests.engine.stream_bench import Bench, LateDevice

SEQUENCES, CHUNK, FEW = 8, 72, 5
"""Requests and tokens of a step at most; tokens of a call that the decode kernels take."""
MODES = {
    "graph": CUDAGraphMode.FULL_DECODE_ONLY,
    "pieces": CUDAGraphMode.PIECEWISE,
    "both": CUDAGraphMode.FULL_AND_PIECEWISE,
    "eager": CUDAGraphMode.NONE,
}
GUESSES = {"none": ("", 0), "MTP 1": ("mtp", 1), "MTP 2": ("mtp", 2), "MTP 3": ("mtp", 3), "n-gram": ("ngram", 3)}


class WatchingDevice(LateDevice):
    """Computes nothing: compares the bytes of staging slots when they would be read, and counts those that differ."""

    def __init__(self, kernel: Any, streams: Streams, slots: torch.Tensor, first: int) -> None:
        super().__init__(kernel, streams, slots, first)
        self.first, self.disturbed, self.calls, self.layer = first, 0, 0, 0
        self.records: Any = None

    def rows(self, call: Call) -> None:
        self.streams.give(COMPUTE, partial(self._look, call, self.layer))

    def combine(self, call: Call, out: torch.Tensor) -> None:
        pass

    def _look(self, call: Call, layer: int) -> None:
        table = call.slot_table.numpy()
        routed = np.unique(call.ids.numpy())
        for expert in routed[(routed >= 0) & (routed < table.size)]:
            if table[expert] != ABSENT and table[expert] >= self.first:
                slot = call.slots[int(table[expert])].numpy()
                self.disturbed += not np.array_equal(slot, self.records[layer][int(expert)].numpy())

    def planned_step(self) -> None:
        """A call that the device plans: it writes records of its own, and reads them later."""
        self.calls += 1
        own = self.calls % 251 + 1

        def step() -> None:
            self.staging[:] = own
            self.streams.go_on(COPIES, 0.5)
            self.disturbed += int((self.staging != own).any(1).sum())

        self.streams.give(COMPUTE, step)


@dataclass(frozen=True)
class Way:
    """How an engine runs its steps. planned: tokens that the device plans; captured: the largest graph."""

    mode: str
    guesses: str
    planned: int
    captured: int
    records: int = 10


class Engine:
    """A worker of vLLM's over two layers and a drafter's. Stands for vLLM; what it is put behind is ours."""

    rank = 0

    def __init__(self, bench: Bench, way: Way) -> None:
        kind, guesses = GUESSES[way.guesses]
        self.bench, self.kind, self.guesses = bench, kind, guesses
        speculative = SimpleNamespace(num_speculative_tokens=guesses) if kind else None
        sizes = sorted({1, 2, 4, 8, 16, way.captured})
        compilation = CompilationConfig(
            mode=3,
            cudagraph_mode=MODES[way.mode],
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=way.captured,
        )
        compilation.splitting_ops = list(CompilationConfig._attention_ops)
        if way.mode in ("graph", "both"):
            compilation.adjust_cudagraph_sizes_for_spec_decode(1 + guesses)
        self.vllm_config: Any = SimpleNamespace(
            speculative_config=speculative,
            compilation_config=compilation,
            num_speculative_tokens=guesses,
            lora_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=SEQUENCES),
        )
        self.dispatcher = CudagraphDispatcher(self.vllm_config)
        self.dispatcher.initialize_cudagraph_keys(MODES[way.mode], 1 + guesses)
        self.drafts = CudagraphDispatcher(self.vllm_config)  # as its proposer: graphs in pieces, or none
        in_pieces = MODES[way.mode].mixed_mode() == CUDAGraphMode.PIECEWISE
        self.drafts.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE if in_pieces else CUDAGraphMode.NONE)
        self.replayed = self.by_python = 0

    def execute_model(self, scheduled: Any) -> None:
        counts = scheduled.num_scheduled_tokens.values()
        uniform = set(counts) == {1 + self.guesses}
        self.forward(self.dispatcher, scheduled.total_num_scheduled_tokens, (0, 1), uniform)

    def sample_tokens(self, scheduled: Any) -> None:
        if self.kind == "mtp":
            for tokens in (
                scheduled.total_num_scheduled_tokens,
                *[len(scheduled.num_scheduled_tokens)] * (self.guesses - 1),
            ):
                self.forward(self.drafts, tokens, (2,))

    def forward(self, dispatcher: Any, tokens: int, layers: tuple[int, ...], uniform: bool = False) -> None:
        mode, _ = dispatcher.dispatch(tokens, uniform_decode=uniform)
        for layer in layers:
            if mode is not CUDAGraphMode.NONE:
                self.replayed += 1
                self.bench.device.planned_step()
                continue
            self.by_python += 1
            self.bench.device.layer = layer
            self.bench.layers[layer].forward(*self.call(tokens, self.by_python % 3))

    @cache  # noqa: B019  # ends with the test
    def call(self, tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
        """One of few calls of so many tokens, which route to all experts or leave a third out."""
        experts = [e for e in range(self.bench.geometry.experts) if (e + seed) % 3 or tokens % 2]
        return self.bench.call(seed, experts, tokens)


class Worker(StepAware, Engine):
    """As cpu_worker.py and gpu_worker.py put it together."""


class Steps:
    """An engine's steps, at random from all that a scheduler may make."""

    def __init__(self, store: Store, way: Way, seed: int, check: bool = True) -> None:
        self.random, self.streams = Random(seed), Streams(0, 0, seed)
        staging, groups = self.random.choice([(6, 3), (2, 2), (9, 4), (4, 1)])
        self.bench = bench = Bench(store, way.records, staging, groups, self.streams, WatchingDevice, check)
        bench.device.records = bench.everywhere
        self.way, self.worker, self.ahead = way, Worker(bench, way), 0
        path: Any = SimpleNamespace(
            tokens=way.planned,
            sizes=bench.device.sizes,
            live=torch.zeros(1, dtype=torch.int32),
            decodes=lambda tokens: tokens <= FEW,
            forward=lambda *call: bench.device.planned_step() or call[-1],
        )
        for layer in bench.layers:
            object.__setattr__(layer._shared, "path", path)
        self.hybrid: Any = object.__new__(HybridModel)  # what a step touches of it; the rest wants a device
        self.hybrid.__dict__.update(
            _refiller=SimpleNamespace(after_step=lambda step: None),
            _may_miss=True,
            _mailbox=SimpleNamespace(wake=lambda: None),
            path=path,
            _shared=bench.layers[0]._shared,
            layers=bench.layers,
        )
        self.tokens_near = [1, FEW, way.captured, way.planned, CHUNK]

    def run(self, number: int) -> int:
        """So many steps; staging slots that held other bytes than they must."""
        hybrids: dict[Any, Any] = {"one": self.hybrid}
        kept, runtime._hybrids = runtime._hybrids, hybrids
        try:
            for _ in range(number):
                self.streams._likely = self.random.choice([(0, 0), (0, 1), (1, 0), (1, 1), (0.7, 0.7), (0.2, 0.6)])
                scheduled = self.scheduled()
                self.worker.execute_model(scheduled)
                self.worker.sample_tokens(scheduled)
            self.streams.finish()
        finally:
            runtime._hybrids = kept
        return int(self.bench.device.disturbed)

    def scheduled(self) -> Any:
        """Requests that decode with their guesses, and prompts or none, of a size near a threshold."""
        wanted = max(1, min(CHUNK, self.random.choice(self.tokens_near) + self.random.choice([-2, -1, 0, 1, 2, 9])))
        most = 1 + self.worker.guesses
        prompt = self.random.random() < 0.5 or wanted > SEQUENCES * most
        if not prompt and self.worker.kind != "ngram" and self.random.random() < 0.5:
            wanted -= wanted % most  # every request decodes all of its guesses, for which there are whole graphs
        tokens, drafts = dict[str, int](), dict[str, list[int]]()
        decoding = self.random.randint(0, SEQUENCES - 1) if prompt else SEQUENCES
        for request in map(str, range(decoding)):
            guesses = self.random.randint(0, most - 1) if self.worker.kind == "ngram" else most - 1
            if sum(tokens.values()) + 1 + guesses > wanted - prompt:
                break
            tokens[request] = 1 + guesses
            if guesses:
                drafts[request] = [-1] * guesses
        if prompt or not tokens:
            tokens["prompt"] = wanted - sum(tokens.values())
        return SimpleNamespace(
            num_scheduled_tokens=tokens,
            scheduled_spec_decode_tokens=drafts,
            total_num_scheduled_tokens=sum(tokens.values()),
        )

    def close(self) -> None:
        self.bench.reader.close()
        self.bench.pool.close()


def seen(steps: Steps) -> Mapping[str, int]:
    """What took part."""
    return {
        "replayed": steps.worker.replayed,
        "by Python": steps.worker.by_python,
        "copies": steps.bench.streamer.ledger.copies,
    }
