"""Experts in BF16, FP16 or FP32: one tensor per matrix, or Hugging Face's fused 3-D tensors of all experts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moetier.checkpoint import config as keys
from moetier.checkpoint.names import MoeLayer
from moetier.checkpoint.shards import Shards
from moetier.checkpoint.sources.base import DOWN, GATE, PerExpertSource, Requantizing, read_part
from moetier.contract.requantize import Rows
from moetier.errors import CheckpointError

Bytes = NDArray[np.uint8]


def _bf16(raw: Bytes) -> NDArray[np.float64]:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)


DECODE: dict[str, Callable[[Bytes], NDArray[np.float64]]] = {
    "BF16": _bf16,
    "F16": lambda raw: raw.view("<f2").astype(np.float64),
    "F32": lambda raw: raw.view("<f4").astype(np.float64),
}
"""Contiguous bytes [..., n * size] of each dtype -> values [..., n]."""

FORMATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
INTERLEAVED = ("gpt_oss",)
"""Model types whose fused gate_up_proj has gate and up by turns; the others have all of gate, then all of up."""


class FloatSource(PerExpertSource, Requantizing):
    """X.weight [out, in]."""

    consumed = ("weight",)
    weight_dtypes = tuple(DECODE)

    @classmethod
    def matches(cls, shards: Shards, layer: MoeLayer) -> bool:
        weight = cls.first_weight(shards, layer)
        return weight is not None and weight.dtype in DECODE

    def check(self) -> tuple[int, int]:
        first = self.first_weight(self.shards, self.layer)
        assert first is not None
        self.format = FORMATS[first.dtype]
        return super().check()

    def rows(self, expert: int, matrix: int) -> Rows:
        weight = self.shards.tensors[f"{self.name(expert, matrix)}.weight"]
        raw, decode = self.shards.read(weight).reshape(weight.shape[0], -1), DECODE[weight.dtype]
        return lambda start, stop: decode(raw[start:stop])


class FusedFloatSource(Requantizing):
    """gate_up_proj and down_proj of all experts, both [E, out, in] or both [E, in, out]."""

    consumed = ("gate_up_proj", "gate_up_proj.weight", "down_proj", "down_proj.weight")

    @classmethod
    def matches(cls, shards: Shards, layer: MoeLayer) -> bool:
        return any(name in shards.tensors for name in _spellings(layer, "gate_up_proj"))

    def check(self) -> tuple[int, int]:
        both, down = (self._spelling(part) for part in ("gate_up_proj", "down_proj"))
        self.format = FORMATS.get(self.shards.tensors[both].dtype, "float")
        for part in ("gate_up_proj", "down_proj"):
            if all(name in self.shards.tensors for name in _spellings(self.layer, part)):
                raise CheckpointError(
                    f"layer {self.layer.number}: expected {part} of the experts once, found it as "
                    f"{' and as '.join(_spellings(self.layer, part))}; the folder mixes two checkpoints"
                )
        hidden = keys.required(keys.text_config(self.config), keys.HIDDEN)
        first = self.tensor(both, tuple(DECODE))
        if len(first.shape) != 3 or hidden not in first.shape[1:]:
            raise CheckpointError(
                f"{first}: expected shape [{self.experts}, 2 * intermediate, {hidden}] or "
                f"[{self.experts}, {hidden}, 2 * intermediate], found {list(first.shape)}"
            )
        double = first.shape[2] if first.shape[1] == hidden else first.shape[1]
        intermediate = double // 2
        out_in = ((self.experts, double, hidden), (self.experts, hidden, intermediate))
        in_out = ((self.experts, hidden, double), (self.experts, intermediate, hidden))
        self.tensor(both, tuple(DECODE), out_in[0], in_out[0])
        second = self.tensor(down, tuple(DECODE), out_in[1], in_out[1])
        # Where hidden is 2 * intermediate the first shape fits both orders, but then the second fits only one.
        self.transposed = (first.shape, second.shape) == in_out
        if not self.transposed and (first.shape, second.shape) != out_in:
            raise CheckpointError(
                f"{first} and {second}: expected both as [E, out, in] or both as [E, in, out], found shapes "
                f"{list(first.shape)} and {list(second.shape)}"
            )
        self.both, self.down = first, second
        return hidden, intermediate

    def rows(self, expert: int, matrix: int) -> Rows:
        tensor = self.down if matrix == DOWN else self.both
        raw = read_part(self.shards, tensor, expert).reshape(*tensor.shape[1:], -1)
        if self.transposed:
            raw = raw.transpose(1, 0, 2)
        if matrix != DOWN:
            interleaved = keys.model_type(self.config).startswith(INTERLEAVED)
            half = self.intermediate
            first = matrix if interleaved else (0 if matrix == GATE else half)
            raw = raw[first :: 2 if interleaved else 1][:half]
        decode = DECODE[tensor.dtype]
        return lambda start, stop: decode(np.ascontiguousarray(raw[start:stop]).reshape(stop - start, -1))

    def _spelling(self, part: str) -> str:
        first, second = _spellings(self.layer, part)
        return second if second in self.shards.tensors else first


def _spellings(layer: MoeLayer, part: str) -> tuple[str, str]:
    return f"{layer.name}.{part}", f"{layer.name}.{part}.weight"
