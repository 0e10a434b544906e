"""The numerics contract "int8x" in NumPy: the definition of right. Every kernel equals it bit for bit.

docs/design.md states the contract; its numbers 1 to 7 stand beside the functions here. Every float operation below is
one float32 operation, rounded to nearest even on its own. M is tokens (or pairs), N rows and K columns of a matrix,
B = K/32 its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from moetier.contract import BLOCK, E2M1_INTEGERS, ExpertMatrices, Family, Matrix, unpack_codes

CONTRACT = "int8x"

F32 = np.float32
Floats = NDArray[np.float32]
TINY = F32(2.0**-100)
BAD_ROW = 127
"""Exponent that marks a row with a NaN or an infinity; no finite row reaches it."""
BF16_NAN = np.uint16(0x7FC0)
# Overflow to infinity and NaN are results that the contract defines, not accidents to warn about.
DEFINED = np.errstate(over="ignore", invalid="ignore", under="ignore")


def flush(x: Floats) -> Floats:
    """F(x) = +0 if |x| < 2^-100, else x; NaN stays."""
    return np.where(np.abs(x) < TINY, F32(0), x).astype(F32)


# 2. Activations


@DEFINED
def quantize(x: Floats) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """[M, K] -> q int8 [M, K], e int8 [M, B]: x ~ q * 2^e, where 127 * 2^e is the least bound of the block."""
    bad = ~np.isfinite(x).all(-1, keepdims=True)
    block = flush(np.where(np.isfinite(x), x, F32(0))).reshape(x.shape[0], -1, BLOCK)
    mantissa, exponent = np.frexp(np.abs(block).max(-1))  # mantissa in [0.5, 1), or 0
    e = np.where(mantissa <= F32(127 / 128), exponent - 7, exponent - 6)
    e = np.where(mantissa == 0, 0, e)
    q = np.rint(np.ldexp(block, -e[..., None])).astype(np.int8).reshape(x.shape)
    q = np.where(bad, np.int8(0), q)
    return q, np.where(bad, BAD_ROW, e).astype(np.int8)


# 3. and 4. Blocks and row sums


@DEFINED
def block_values(matrix: Matrix, q: NDArray[np.int8], e: NDArray[np.int8]) -> Floats:
    """Values v of every block: codes and scales of [N, K], activations [M, K] and [M, B] -> float32 [M, N, B]."""
    n, k = matrix.shape
    w = E2M1_INTEGERS[unpack_codes(matrix.codes)].reshape(n, -1, BLOCK)
    # Products of a block sum to less than 2^24, so float32 holds them exactly in any order of addition.
    d = np.matmul(
        q.reshape(-1, k // BLOCK, BLOCK).transpose(1, 0, 2).astype(F32), w.transpose(1, 2, 0).astype(F32)
    ).transpose(1, 2, 0)
    c = matrix.scales.astype(np.int32)[None] + e.astype(np.int32)[:, None] - 128
    v = np.where(c < -126, F32(0), np.ldexp(d, np.clip(c, -126, 111)))
    return np.where((e == BAD_ROW)[:, None] | (c > 111), F32(np.nan), v).astype(F32)


def segments(blocks: int) -> int:
    """S, the largest power of two <= 8 that divides the number of blocks."""
    return next(s for s in (8, 4, 2, 1) if blocks % s == 0)


@DEFINED
def fold(x: Floats) -> Floats:
    """Sum over the last axis, one after the other from +0."""
    total = np.zeros(x.shape[:-1], F32)
    for i in range(x.shape[-1]):
        total = total + x[..., i]
    return total


@DEFINED
def row_sums(matrix: Matrix, q: NDArray[np.int8], e: NDArray[np.int8]) -> Floats:
    """The matrix [N, K] times the activations -> float32 [M, N]: block order within segments, segments in order."""
    v = block_values(matrix, q, e)
    parts = fold(v.reshape(*v.shape[:2], segments(v.shape[2]), -1))
    total = parts[..., 0]
    for i in range(1, parts.shape[-1]):
        total = total + parts[..., i]
    return total


# 5. SwiGLU


def exp_negative(t: Floats) -> Floats:
    """exp(t) for t in [-80, 0]: Cody-Waite reduction and a Horner polynomial of degree 7, no fused operation."""
    n = np.rint(t * F32(1.44269504))
    r = (t - n * F32(0.693359375)) - n * F32(-2.12194440e-4)
    p = np.full_like(t, F32(1 / 5040))
    for c in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        p = p * r + F32(c)  # two roundings
    exponential: Floats = np.ldexp(p, n.astype(np.int32)).astype(F32)
    return exponential


@DEFINED
def swiglu(g: Floats, u: Floats, family: Family, weight: Floats | None) -> Floats:
    """silu(gate) * up [M, I]. weight [M] is the route weight; it enters here only where the family says so."""
    if family.swiglu_limit is not None:
        limit = F32(family.swiglu_limit)
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)  # NaN propagates
    g = flush(g)
    exponential = exp_negative(-np.minimum(np.abs(np.where(np.isnan(g), F32(0), g)), F32(80)))
    sigma = np.where(g >= 0, F32(1), exponential) / (F32(1) + exponential)
    a = np.where(g < F32(-80), F32(0), flush(g * sigma))
    h = flush(a * u)
    if family.route_weight_before_down:
        assert weight is not None
        h = flush(h * weight[:, None])
    return h


# 6. Down


@DEFINED
def pairwise(parts: list[Floats]) -> Floats:
    """Sum of a power of two of parts, by a tree over neighbours."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[0::2], parts[1::2], strict=True)]
    return parts[0]


def expert_rows(
    slices: list[tuple[Matrix, Matrix, Matrix]],
    q: NDArray[np.int8],
    e: NDArray[np.int8],
    weight: Floats | None,
    family: Family,
) -> Floats:
    """One expert on M quantized tokens -> y float32 [M, hidden]. slices: gate, up, down of each slice in order."""
    parts = []
    for gate, up, down in slices:
        h = swiglu(row_sums(gate, q, e), row_sums(up, q, e), family, weight)
        parts.append(row_sums(down, *quantize(h)))
    return pairwise(parts)


def cut(expert: ExpertMatrices, slices: int) -> list[tuple[Matrix, Matrix, Matrix]]:
    """An expert as equal narrower experts along its intermediate size."""
    inner = expert.gate.shape[0] // slices
    parts = []
    for start in range(0, inner * slices, inner):
        rows = slice(start, start + inner)
        down = Matrix(
            expert.down.codes[:, start // 2 : (start + inner) // 2],
            expert.down.scales[:, start // BLOCK : (start + inner) // BLOCK],
        )
        parts.append(
            (
                Matrix(expert.gate.codes[rows], expert.gate.scales[rows]),
                Matrix(expert.up.codes[rows], expert.up.scales[rows]),
                down,
            )
        )
    return parts


# 7. Combine


def to_bf16(x: Floats) -> NDArray[np.uint16]:
    """float32 -> bf16 bits, to nearest even; not finite -> 0x7FC0."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isfinite(x), rounded, BF16_NAN)


def from_bf16(bits: NDArray[np.uint16]) -> Floats:
    """bf16 bits -> float32 of the same shape."""
    return (bits.astype(np.uint32) << 16).view(F32)


@DEFINED
def moe_layer(
    x: Floats,
    ids: NDArray[np.integer],
    weights: Floats,
    experts: Mapping[int, ExpertMatrices],
    num_experts: int,
    family: Family,
    slices: int = 1,
) -> NDArray[np.uint16]:
    """The whole layer: x [T, hidden], ids and weights [T, top_k] -> bf16 bits [T, hidden].

    Pairs of a token add up in ascending expert id (equal ids in the router's order); ids outside [0, num_experts) are
    skipped. `experts` needs those that are routed to.
    """
    q, e = quantize(x)
    acc = np.zeros(x.shape, F32)
    order = np.argsort(ids, axis=1, kind="stable")
    ranked_ids = np.take_along_axis(ids, order, 1)
    ranked_weights = np.take_along_axis(weights.astype(F32), order, 1)
    for expert in np.unique(ids[(ids >= 0) & (ids < num_experts)]):
        parts = cut(experts[int(expert)], slices)
        for k in range(ids.shape[1]):  # a second pass over k only matters where a token names an expert twice
            tokens = np.flatnonzero(ranked_ids[:, k] == expert)
            if tokens.size:
                weight = ranked_weights[tokens, k]
                y = expert_rows(parts, q[tokens], e[tokens], weight, family)
                acc[tokens] += flush(y if family.route_weight_before_down else y * weight[:, None])
    return to_bf16(acc)
