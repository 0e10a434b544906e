"""Error of a layer's output per variant, on activations that the reference model has on real text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from moetier_bench.eval.quality_model import QualityModel
from moetier_bench.eval.quality_numerics import REFERENCE, TRUTH, VARIANTS


@dataclass
class LayerError:
    """Sums over everything that a layer was called with. signal: of the squares of the float64 outputs."""

    layer: int
    tokens: int = 0
    signal: float = 0.0
    noise: dict[str, float] = field(default_factory=dict)
    """By variant: of the squares of its difference from float64."""

    def add(self, truth: Tensor, outputs: dict[str, Tensor]) -> None:
        """Count outputs [T, hidden] of the variants; truth is float64."""
        self.tokens += truth.shape[0]
        self.signal += float(truth.square().sum())
        for variant, output in outputs.items():
            self.noise[variant] = self.noise.get(variant, 0.0) + float((output.double() - truth).square().sum())

    def relative(self, variant: str) -> float:
        """Root mean square of the error over that of the output."""
        return math.sqrt(self.noise[variant] / self.signal)

    def decibels(self, variant: str) -> float:
        """The same in dB: 20 log10."""
        return decibels(self.relative(variant))


def decibels(relative: float) -> float:
    """20 log10; -inf of 0."""
    return 20 * math.log10(relative) if relative else -math.inf


def layer_errors(
    model: QualityModel,
    texts: Sequence[Sequence[int]],
    variants: Sequence[str] = VARIANTS,
    progress: Callable[[int], None] = lambda _: None,
) -> list[LayerError]:
    """Errors per layer over token sequences; every variant gets the reference model's inputs of that layer."""
    errors = {layer: LayerError(layer) for layer in model.layers}
    model.use(REFERENCE)
    for index, tokens in enumerate(texts, 1):
        for layer, call in model.inputs(tokens).items():
            truth = model.experts(layer).forward(call.x, call.ids, call.weights, TRUTH)
            errors[layer].add(truth, {variant: model.run(variant, layer, call) for variant in variants})
        progress(index)
    return list(errors.values())
