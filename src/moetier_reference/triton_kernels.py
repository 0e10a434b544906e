"""A routed-expert layer in Triton: portable, grouped by expert, the same kernels for decode and prefill.

Pairs are numbered token * top_k + position. `plan_*` sorts them by expert; a tile is up to BM pairs of one expert. The
slot table is read on the device, so a captured graph follows it. Pairs whose expert has no slot are left alone.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl

from moetier_reference.triton_math import bf16_bits, flush, quantize_blocks, scaled, swiglu, unpack


@triton.jit
def quantize(x, q, e, K: tl.constexpr, B: tl.constexpr):
    """X bf16 bits int16 [T, K] -> q int8 [T, K], e int8 [T, K/32]; one program takes B blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * B + tl.arange(0, B)
    at = (block[:, None] * 32 + tl.arange(0, 32)[None, :])[None]
    live = block < K // 32
    bits = tl.load(x + row * K + at, mask=live[None, :, None], other=0).to(tl.int32) << 16
    values, exponents = quantize_blocks(bits.to(tl.float32, bitcast=True))
    tl.store(q + row * K + at, values, mask=live[None, :, None])
    tl.store(e + row * (K // 32) + block[None], exponents, mask=live[None])


@triton.jit
def plan_count(ids, slot_table, counts, pairs, E: tl.constexpr, BLOCK: tl.constexpr):
    """Counts int32 [E] += how many pairs each expert in a slot has. Integer atomics: their order changes nothing."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + p, mask=p < pairs, other=-1).to(tl.int32)
    routed = (expert >= 0) & (expert < E)
    slot = tl.load(slot_table + expert, mask=routed, other=-1)
    tl.atomic_add(counts + expert, 1, mask=routed & (slot >= 0))


@triton.jit
def plan_scan(counts, offsets, cursor, tile_ends, E: tl.constexpr, E_PAD: tl.constexpr, BM: tl.constexpr):
    """One program: where each expert's pairs start, where its tiles of BM pairs end; counts is zeroed.

    cursor starts as offsets and, when plan_scatter is done, is where the expert's pairs end.
    """
    expert = tl.arange(0, E_PAD)
    live = expert < E
    count = tl.load(counts + expert, mask=live, other=0)
    start = tl.cumsum(count, 0) - count
    tl.store(offsets + expert, start, mask=live)
    tl.store(cursor + expert, start, mask=live)
    tl.store(tile_ends + expert, tl.cumsum((count + BM - 1) // BM, 0), mask=live)
    tl.debug_barrier()
    tl.store(counts + expert, tl.zeros((E_PAD,), tl.int32), mask=live)


@triton.jit
def plan_scatter(ids, slot_table, cursor, order, pairs, E: tl.constexpr, BLOCK: tl.constexpr):
    """Order int32 [pairs]: the pairs, grouped by expert, in any order within one (every row is computed alone)."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + p, mask=p < pairs, other=-1).to(tl.int32)
    routed = (expert >= 0) & (expert < E)
    routed = routed & (tl.load(slot_table + expert, mask=routed, other=-1) >= 0)
    at = tl.atomic_add(cursor + expert, 1, mask=routed)
    tl.store(order + at, p, mask=routed)


@triton.jit
def find_tile(tile, offsets, ends, tile_ends, order, E: tl.constexpr, E_PAD: tl.constexpr, BM: tl.constexpr):
    """Tile number -> its expert (E beyond the last tile), its pairs [BM] and which of them are real."""
    every = tl.arange(0, E_PAD)
    last = tl.load(tile_ends + every, mask=every < E, other=0x7FFFFFFF)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    found = expert < E
    first = tl.max(tl.where((every < expert) & (every < E), last, 0), 0)
    row = tl.load(offsets + expert, mask=found, other=0) + (tile - first) * BM + tl.arange(0, BM)
    live = row < tl.load(ends + expert, mask=found, other=0)
    return expert, tl.load(order + row, mask=live, other=0), live


@triton.jit
def row_sums(q, e, live, codes, scales, n, B: tl.constexpr, S: tl.constexpr):
    """The contract's numbers 3 and 4: q, e pointers [M] to activation rows, codes and scales of a tile16 matrix, n [N].

    acc gets only d * 2^c, so nothing of it can move into the matrix unit's own accumulator.
    """
    k, byte = tl.arange(0, 32), tl.arange(0, 16)
    tile = (n // 16) * B
    code_rows = codes + tile * 256 + (n % 16) * 16
    scale_rows = scales + tile * 16 + n % 16
    total = tl.zeros((q.shape[0], n.shape[0]), tl.float32)
    for s in range(S):
        acc = tl.zeros((q.shape[0], n.shape[0]), tl.float32)
        for i in range(B // S):
            b = s * (B // S) + i
            activation = tl.load(q[:, None] + b * 32 + k[None, :], mask=live[:, None], other=0)
            weight = unpack(tl.load(code_rows[:, None] + b * 256 + byte[None, :]))
            d = tl.dot(activation, tl.trans(weight), out_dtype=tl.int32)
            acc = acc + scaled(d, tl.load(e + b, mask=live, other=0), tl.load(scale_rows + b * 16))
        total = total + acc
    return total


@triton.jit
def gate_up(
    q, e, weights, order, offsets, ends, tile_ends, slot_table, slots, stride, hq, he,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    SLICES: tl.constexpr, SLICE_BYTES: tl.constexpr, S: tl.constexpr, LIMIT: tl.constexpr, WEIGHTED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gate, up, SwiGLU and the second quantization: hq int8 [pairs, I], he int8 [pairs, I/32]. INNER is a slice's I."""
    expert, pair, live = find_tile(tl.program_id(0), offsets, ends, tile_ends, order, E, E_PAD, BM)
    if expert >= E:
        return
    codes: tl.constexpr = INNER * HIDDEN // 2
    sizes: tl.constexpr = INNER * HIDDEN // 32
    i = tl.program_id(1) * BN
    part = i // INNER
    n = i - part * INNER + tl.arange(0, BN)
    record = slots + tl.load(slot_table + expert).to(tl.int64) * stride + part * SLICE_BYTES
    token = (pair // TOP_K).to(tl.int64)
    qt, et = q + token * HIDDEN, e + token * (HIDDEN // 32)
    g = row_sums(qt, et, live, record, record + 3 * codes, n, HIDDEN // 32, S)
    u = row_sums(qt, et, live, record + codes, record + 3 * codes + sizes, n, HIDDEN // 32, S)
    weight = tl.load(weights + pair, mask=live, other=0.0)
    h = swiglu(g, u, weight, LIMIT, WEIGHTED)
    values, exponents = quantize_blocks(tl.reshape(h, (BM, BN // 32, 32)))
    at = i + tl.arange(0, BN)
    row = pair.to(tl.int64) * (INNER * SLICES)
    tl.store(hq + row[:, None] + at[None, :], tl.reshape(values, (BM, BN)), mask=live[:, None])
    block = i // 32 + tl.arange(0, BN // 32)
    tl.store(he + (row // 32)[:, None] + block[None, :], exponents, mask=live[:, None])


@triton.jit
def slice_tree(
    q, e, live, record, n, HIDDEN: tl.constexpr, INNER: tl.constexpr, SLICE_BYTES: tl.constexpr, S: tl.constexpr,
    FIRST: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Down projection of slices FIRST to FIRST + COUNT, combined by the pairwise tree."""
    if COUNT == 1:
        codes: tl.constexpr = INNER * HIDDEN // 2
        sizes: tl.constexpr = INNER * HIDDEN // 32
        at = record + FIRST * SLICE_BYTES
        y = row_sums(
            q + FIRST * INNER, e + FIRST * (INNER // 32), live, at + 2 * codes, at + 3 * codes + 2 * sizes, n,
            INNER // 32, S,
        )  # fmt: skip
    else:
        half: tl.constexpr = COUNT // 2
        left = slice_tree(q, e, live, record, n, HIDDEN, INNER, SLICE_BYTES, S, FIRST, half)
        y = left + slice_tree(q, e, live, record, n, HIDDEN, INNER, SLICE_BYTES, S, FIRST + half, half)
    return y


@triton.jit
def down(
    hq, he, order, offsets, ends, tile_ends, slot_table, slots, stride, rows,
    E: tl.constexpr, E_PAD: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, SLICES: tl.constexpr,
    SLICE_BYTES: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows float32 [pairs, HIDDEN]: the experts' answers, one row a pair."""
    expert, pair, live = find_tile(tl.program_id(0), offsets, ends, tile_ends, order, E, E_PAD, BM)
    if expert >= E:
        return
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    record = slots + tl.load(slot_table + expert).to(tl.int64) * stride
    row = pair.to(tl.int64)
    inner: tl.constexpr = INNER * SLICES
    y = slice_tree(
        hq + row * inner, he + row * (inner // 32), live, record, n, HIDDEN, INNER, SLICE_BYTES, S, 0, SLICES
    )
    tl.store(rows + row[:, None] * HIDDEN + n[None, :], y, mask=live[:, None])


@triton.jit
def combine(
    rows, ids, weights, slot_table, out,
    E: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, HIDDEN: tl.constexpr, WEIGHTED: tl.constexpr,
    CHECKED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Out bf16 bits int16 [T, HIDDEN]: a token's rows added in ascending expert id, equal ids in the router's order.

    CHECKED: a routed expert without a slot makes its token NaN, for its row was not computed.
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    position = tl.arange(0, TOP_K_PAD)
    expert = tl.load(ids + token * TOP_K + position, mask=position < TOP_K, other=0x7FFFFFFF).to(tl.int32)
    before = (expert[None, :] < expert[:, None]) | (
        (expert[None, :] == expert[:, None]) & (position[None, :] < position[:, None])
    )
    rank = tl.sum(before.to(tl.int32), 1)
    acc = tl.zeros((BN,), tl.float32)
    for r in range(TOP_K):
        at = tl.sum(tl.where(rank == r, position, 0), 0)
        which = tl.load(ids + token * TOP_K + at).to(tl.int32)
        if (which >= 0) & (which < E):
            y = tl.load(rows + (token * TOP_K + at) * HIDDEN + n, mask=n < HIDDEN, other=0.0)
            if not WEIGHTED:
                y = y * tl.load(weights + token * TOP_K + at)
            y = flush(y)
            if CHECKED:
                y = tl.where(tl.load(slot_table + which) < 0, float("nan"), y)
            acc = acc + y
    tl.store(out + token * HIDDEN + n, bf16_bits(acc), mask=n < HIDDEN)
