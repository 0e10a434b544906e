"""Every kernel of this build against the definition of right, once for each kind of layer: about a tenth of a second.

Paths that are compared with each other may all be wrong alike: built with a compiler flag that changes arithmetic, for
one. So each instruction set also computes a small layer of the kind that is served (its family, its slices, sums cut
into as many segments) over random records, and must give the oracle's bits. Some of its rows are such as no model
makes: zeros, huge, tiny, NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moetier.contract import BLOCK, ExpertMatrices, Family, LayerGeometry, Matrix, RecordLayout, oracle
from moetier.identity.calls import HOSTILE, IdentityError, random_routing, random_rows
from moetier.kernels.cpu import CpuExperts, ThreadPool
from moetier.tiers.arena import Arena

EXPERTS, TOP_K, TOKENS = 3, 2, 9
MOST_BLOCKS = 3
"""Blocks of a segment at most: from three on the order of additions inside one shows."""


def small(geometry: LayerGeometry) -> LayerGeometry:
    """A layer of the same kind: as many slices, and K cut into as many segments."""

    def blocks(size: int) -> int:
        whole = size // BLOCK
        segments = oracle.segments(whole)
        fitting = range(1, min(MOST_BLOCKS, whole // segments) + 1)
        return segments * max(n for n in fitting if oracle.segments(n * segments) == segments)

    inner = blocks(geometry.slice_intermediate) * geometry.slices
    return LayerGeometry(blocks(geometry.hidden) * BLOCK, inner * BLOCK, EXPERTS, TOP_K, geometry.slices)


def check_against_oracle(
    geometry: LayerGeometry, family: Family, isas: Sequence[str], pool: ThreadPool, seed: int = 0
) -> int:
    """How many instruction sets were compared; IdentityError where one does not give the oracle's bits."""
    g, generator = small(geometry), np.random.default_rng(seed)
    layout = RecordLayout.of(g)
    arena, experts = Arena(EXPERTS, layout.stride), dict[int, ExpertMatrices]()
    for expert in range(EXPERTS):
        experts[expert] = _random_expert(g, generator)
        layout.pack(experts[expert], arena.view(expert))
    x, ids, weights = _call(g, generator)
    right = oracle.moe_layer(oracle.from_bf16(x), ids, weights, experts, EXPERTS, family, g.slices)
    addresses = np.array([arena.address(expert) for expert in range(EXPERTS)], np.uint64)
    for isa in isas:
        kernel, out = CpuExperts(g, family, pool, isa=isa, max_tokens=TOKENS), np.empty_like(x)
        for tokens in (slice(0, 1), slice(0, TOKENS)):  # one token has kernels of its own
            kernel.forward(x[tokens], ids[tokens], weights[tokens], addresses, out[tokens])
            if differ := int((out[tokens] != right[tokens]).sum()):
                raise IdentityError(
                    f"identity check: kernel {isa!r} differs from the contract's definition in {differ} of "
                    f"{out[tokens].size} values of a layer of hidden {g.hidden}, intermediate {g.intermediate}, "
                    f"{g.slices} slices, {family}: expected equal bits. Nothing is served. Build moetier again without "
                    "compiler flags of your own (unset CXXFLAGS CFLAGS LDFLAGS) and with another compiler if that "
                    "does not help; if it does not, this machine's CPU or memory is at fault"
                )
    return len(isas)


def _random_expert(g: LayerGeometry, generator: np.random.Generator) -> ExpertMatrices:
    def matrix(rows: int, k: int) -> Matrix:
        codes = generator.integers(0, 256, (rows, k // 2), np.uint8)
        return Matrix(codes, generator.integers(117, 125, (rows, k // BLOCK), np.uint8))

    return ExpertMatrices(
        matrix(g.intermediate, g.hidden), matrix(g.intermediate, g.hidden), matrix(g.hidden, g.intermediate)
    )


def _call(
    g: LayerGeometry, generator: np.random.Generator
) -> tuple[NDArray[np.uint16], NDArray[np.int32], NDArray[np.float32]]:
    x = random_rows(TOKENS, g.hidden, generator)
    x[-HOSTILE.size :, generator.integers(g.hidden)] = HOSTILE
    x[-HOSTILE.size] = 0
    return oracle.to_bf16(x), *random_routing(g, TOKENS, generator)
