"""A model in float32 under transformers whose routed experts compute in one variant after the other.

Everything but the experts is the same module with the same weights in every variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moetier.engine import TieredModel
from moetier.engine.naming import layer_number
from moetier.engine.tensors import run_layer
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.transformers.experts import NAME, load_model
from moetier_bench.eval import EvalError
from moetier_bench.eval.quality_experts import Experts
from moetier_bench.eval.quality_numerics import ARITHMETICS, OURS, VARIANTS, Arithmetic


@dataclass(frozen=True)
class LayerInput:
    """Inputs of one routed-expert layer: x [T, hidden], ids and route weights [T, top_k]."""

    x: Tensor
    ids: Tensor
    weights: Tensor


class QualityModel:
    """A checkpoint with its store, every record of it in DRAM. Close it, or use it in a `with` block."""

    def __init__(self, checkpoint: Path, store: Path, threads: int | None = None) -> None:
        """The store is built if it is not there. threads: of moetier's kernels (default: the CPUs allowed)."""
        build_store(checkpoint, store)
        settings = Settings.parse({"store": store, "dram_records": "100%", "threads": threads})
        model: Any = load_model(checkpoint, settings, dtype=torch.float32)
        self.model = model
        self.tiers: TieredModel = model.moetier
        self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        self.positions = int(self.model.config.max_position_embeddings)
        self.identity = self.tiers.store.manifest.checkpoint.identity
        self._modules: dict[int, Any] = {}
        for name, module in self.model.named_modules():
            if "moetier_layer" in vars(module):
                number = layer_number(name, self.tiers.hidden_layers)
                self._modules[number] = module
                vars(module)["quality_experts"] = Experts.of_layer(self.tiers.store, number)
        for arithmetic in ARITHMETICS.values():
            ALL_EXPERTS_FUNCTIONS.register(_implementation(arithmetic.name), _forward(arithmetic))

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers with routed experts."""
        return tuple(self._modules)

    def use(self, variant: str) -> None:
        """Compute the routed experts in this variant from now on."""
        if variant not in VARIANTS:
            raise EvalError(f"there is no variant {variant!r}; there are {', '.join(VARIANTS)}")
        self.model.set_experts_implementation(_implementation(variant))

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Float32 [len(tokens), vocabulary] of one sequence."""
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits

    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end an answer."""
        found = self.model.config.eos_token_id
        return frozenset([found] if isinstance(found, int) else found)

    def greedy(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """The most likely continuation of each prompt, its stop token included if there is one within `max_tokens`.

        The prompts are equally long, so none is padded and each is computed as it would be alone.
        """
        batch = torch.tensor([list(prompt) for prompt in prompts])
        with torch.inference_mode():
            found = self.model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=self.model.config.pad_token_id,
            )
        return [self._until_stop(answer) for answer in found[:, batch.shape[1] :].tolist()]

    def _until_stop(self, tokens: list[int]) -> list[int]:
        end = next((index for index, token in enumerate(tokens, 1) if token in self.stops), len(tokens))
        return tokens[:end]

    def inputs(self, tokens: Sequence[int]) -> dict[int, LayerInput]:
        """Return what the layers are called with, by layer number, while the model reads one sequence."""
        with self._recording() as calls:
            self.logits(tokens)
        return calls

    def run(self, variant: str, layer: int, call: LayerInput) -> Tensor:
        """The output [T, hidden] of one layer's routed experts in a variant."""
        module = self._modules[layer]
        if variant == OURS:
            return run_layer(module.moetier_layer, call.x, call.ids, call.weights)
        return self.experts(layer).forward(call.x, call.ids, call.weights, ARITHMETICS[variant])

    def experts(self, layer: int) -> Experts:
        """The dequantized experts of a layer."""
        experts: Experts = self._modules[layer].quality_experts
        return experts

    @contextmanager
    def _recording(self) -> Iterator[dict[int, LayerInput]]:
        calls: dict[int, LayerInput] = {}

        def hook(number: int) -> Callable[..., None]:
            def keep(_: Any, arguments: tuple[Tensor, ...]) -> None:
                calls[number] = LayerInput(*(tensor.detach().clone() for tensor in arguments))

            return keep

        handles = [module.register_forward_pre_hook(hook(number)) for number, module in self._modules.items()]
        try:
            yield calls
        finally:
            for handle in handles:
                handle.remove()

    def __enter__(self) -> QualityModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tiers.close()


def _implementation(variant: str) -> str:
    """Name of a variant among transformers' experts implementations."""
    return NAME if variant == OURS else f"{NAME}-quality-{variant}"


def _forward(arithmetic: Arithmetic) -> Callable[..., Tensor]:
    def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts: Experts = module.quality_experts
        return experts.forward(hidden_states, top_k_index, top_k_weights, arithmetic)

    return forward
