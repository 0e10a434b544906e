"""The contract's small functions in Triton; the names are those of the oracle.

Every float operation is one rounded float32 operation: kernels are compiled with enable_fp_fusion=False, division is
`div_rn`, rounding to an integer adds and takes away 1.5 * 2^23 and bf16 is rounded on its bits, so that the
interpreter, every GPU and the oracle agree. Blocks of 32 lie on the last axis.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl

TINY = tl.constexpr(2.0**-100)
BAD_BLOCK = tl.constexpr(127)
ROUND = tl.constexpr(1.5 * 2.0**23)
EXP_BITS = tl.constexpr(0x7F800000)


@triton.jit
def flush(x):
    return tl.where(tl.abs(x) < TINY, 0.0, x)


@triton.jit
def rint(x):
    """X to the nearest even integer, for |x| < 2^22."""
    return (x + ROUND) - ROUND


@triton.jit
def power(n):
    """2^n as a float32, for n in [-126, 127]."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantize_blocks(x):
    """X float32 [R, B, 32] -> q int8 [R, B, 32], e int8 [R, B].

    A block with a NaN or an infinity has e = 127 and q = 0. The oracle gives that to the whole row; one such block
    makes every sum of the row NaN, so the results are the same.
    """
    x = flush(x)
    a = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    bad = a >= EXP_BITS
    e = (a >> 23) - 133 + ((a & 0x7FFFFF) > 0x7E0000).to(tl.int32)
    e = tl.where((a == 0) | bad, 0, e)
    q = rint(tl.where(bad[:, :, None], 0.0, x) * power(-e)[:, :, None])
    return q.to(tl.int32).to(tl.int8), tl.where(bad, BAD_BLOCK, e).to(tl.int8)


@triton.jit
def unpack(codes):
    """Bytes [N, 16] of one block -> its integers w int8 [N, 32]; the low nibble is the even k."""
    byte = codes.to(tl.int32)
    c = tl.reshape(tl.join(byte & 15, byte >> 4), (codes.shape[0], 32))
    m = c & 7
    w = tl.where(m < 2, m, (2 + (m & 1)) << (tl.maximum(m >> 1, 1) - 1))
    return tl.where(c >= 8, -w, w).to(tl.int8)


@triton.jit
def scaled(d, e, s):
    """V = d * 2^(e + s - 128) of the contract's number 3: d int32 [M, N], e int8 [M], s uint8 [N]."""
    e = e.to(tl.int32)[:, None]
    c = e + s.to(tl.int32)[None, :] - 128
    v = d.to(tl.float32) * power(tl.minimum(tl.maximum(c, -126), 111))
    v = tl.where(c < -126, 0.0, v)
    return tl.where((e == BAD_BLOCK) | (c > 111), float("nan"), v)


@triton.jit
def exp_negative(t):
    n = rint(t * 1.44269504)
    r = (t - n * 0.693359375) - n * -2.12194440e-4
    p = tl.full(t.shape, 1 / 5040, tl.float32)
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * power(n.to(tl.int32))


@triton.jit
def swiglu(g, u, weight, LIMIT: tl.constexpr, WEIGHTED: tl.constexpr):
    """silu(g) * u, [M, N]; LIMIT: the family's clamp or None; weight [M] enters where WEIGHTED."""
    if LIMIT is not None:
        g = tl.where(g > LIMIT, LIMIT, g)  # a comparison with NaN is false: NaN stays
        u = tl.where(u > LIMIT, LIMIT, u)
        u = tl.where(u < -LIMIT, -LIMIT, u)
    g = flush(g)
    size = tl.where(g != g, 0.0, tl.abs(g))
    exponential = exp_negative(-tl.where(size > 80.0, 80.0, size))
    sigma = tl.div_rn(tl.where(g >= 0, 1.0, exponential), 1.0 + exponential)
    h = flush(tl.where(g < -80.0, 0.0, flush(g * sigma)) * u)
    if WEIGHTED:
        h = flush(h * weight[:, None])
    return h


@triton.jit
def bf16_bits(x):
    """float32 -> bf16 bits int16, to nearest even; not finite -> 0x7FC0."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & EXP_BITS) == EXP_BITS, 0x7FC0, rounded).to(tl.int16)
