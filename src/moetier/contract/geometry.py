"""Sizes and flags of a routed-expert layer, shared by every part above."""

from __future__ import annotations

from dataclasses import dataclass

from moetier.errors import UnsupportedModelError

BLOCK = 32
"""Elements along K that share one scale, of weights and of activations."""


@dataclass(frozen=True)
class Family:
    """Differences of a model family inside an expert."""

    swiglu_limit: float | None = None
    """gate is clamped from above to it, up to +-it, before the SwiGLU; None: no clamp."""
    route_weight_before_down: bool = False
    """True: the route weight multiplies h before the down projection's quantization (DeepSeek-V4)."""


@dataclass(frozen=True)
class LayerGeometry:
    """Sizes of one routed-expert layer. hidden and intermediate are those of the whole expert, before slicing."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    slices: int = 1

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "experts", "top_k", "slices"):
            if getattr(self, name) < 1:
                raise UnsupportedModelError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.slices & (self.slices - 1):
            raise UnsupportedModelError(f"slices must be a power of two (1, 2, 4, ...), found {self.slices}")
        if self.hidden % BLOCK:
            raise UnsupportedModelError(
                f"hidden size {self.hidden} is no multiple of {BLOCK}: MXFP4 blocks do not fit it"
            )
        if self.intermediate % (BLOCK * self.slices):
            raise UnsupportedModelError(
                f"intermediate size {self.intermediate} cannot be cut into {self.slices} slices of whole blocks of "
                f"{BLOCK}; use fewer slices"
            )
        if self.top_k > self.experts:
            raise UnsupportedModelError(f"top-k {self.top_k} is larger than the number of experts {self.experts}")

    @property
    def slice_intermediate(self) -> int:
        """Intermediate size of one slice."""
        return self.intermediate // self.slices
