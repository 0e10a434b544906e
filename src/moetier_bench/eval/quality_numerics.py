"""The arithmetics that quality is compared between: what each rounds, and where, inside a routed-expert layer.

All of them have the same exact weights, SwiGLU in their own precision, and a sum over the token's pairs in it. They
differ in the four roundings of `Arithmetic`. "ours" is none of them: it is moetier's kernel, not an emulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]

FP8_BLOCK = 128
"""Values along a row that share one scale; what is left at the end of a row, or a shorter row, is a block too."""
FP8_LEAST_MAXIMUM = 1e-10
"""Largest magnitude that a block counts as having at least, so that a block of zeros has a scale."""


def exact(x: Tensor) -> Tensor:
    """No rounding."""
    return x


def bf16(x: Tensor) -> Tensor:
    """To bf16, to nearest even, and back."""
    return x.to(torch.bfloat16).to(x.dtype)


def fp8_blocks(x: Tensor) -> Tensor:
    """To e4m3 in blocks of 128 along the last axis with a power of two as scale, and back; x is float32.

    The scale is max(largest magnitude of the block, 1e-10) / 448 rounded up to a power of two (UE8M0): the least
    power of two that puts the block inside e4m3's +-448, so that nothing saturates. x / scale is exact, and is rounded
    to nearest even, e4m3's subnormals included.
    """
    whole = x.shape[-1] // FP8_BLOCK * FP8_BLOCK
    parts = []
    if whole:
        parts.append(_fp8_rows(x[..., :whole].reshape(*x.shape[:-1], -1, FP8_BLOCK)).flatten(-2))
    if whole < x.shape[-1]:
        parts.append(_fp8_rows(x[..., whole:]))
    return torch.cat(parts, dim=-1)


def _fp8_rows(block: Tensor) -> Tensor:
    """Each row of the last axis is a block."""
    largest = block.abs().amax(-1, keepdim=True).clamp_min(FP8_LEAST_MAXIMUM)
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1); 448 = 0.875 * 2^9
    scale = torch.ldexp(torch.ones_like(largest), exponent - 9 + (mantissa > 0.875).to(exponent.dtype))
    return (block / scale).to(torch.float8_e4m3fn).to(block.dtype) * scale


def _bf16_then_fp8(x: Tensor) -> Tensor:
    return fp8_blocks(bf16(x))


@dataclass(frozen=True)
class Arithmetic:
    """One way to compute a layer. Products are added up in `dtype`.

    operand rounds the layer's input before the gate and up projections, and h = silu(gate) * up before down;
    product rounds what gate and up give; output rounds the layer's result, the weighted sum over the token's pairs.
    """

    name: str
    dtype: torch.dtype = torch.float32
    operand: Rounding = exact
    product: Rounding = exact
    output: Rounding = exact


TRUTH = Arithmetic("float64", torch.float64)
"""The format that errors are measured against."""
REFERENCE = "reference"
OURS = "ours"
ARITHMETICS = {
    arithmetic.name: arithmetic
    for arithmetic in (
        Arithmetic(REFERENCE),
        Arithmetic("bf16", operand=bf16, output=bf16),
        Arithmetic("fp8", operand=fp8_blocks, output=bf16),
        Arithmetic("fp8-bf16", operand=_bf16_then_fp8, product=bf16, output=bf16),
    )
}
"""reference: float32. bf16: activations as most engines have them. fp8: the vendor's quantization of activations and
nothing else of its kernel. fp8-bf16: that, and the bf16 roundings around it: x, gate, up and h are bf16 first."""
VARIANTS = (REFERENCE, OURS, *(name for name in ARITHMETICS if name != REFERENCE))
