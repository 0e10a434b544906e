"""Random layer calls for every check, and what it says where two ways to compute one differ."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moetier.contract import LayerGeometry, oracle
from moetier.engine.host import TieredLayer
from moetier.engine.recording import Call
from moetier.errors import MoetierError

HOSTILE = np.array([0, 3e38, -1e-38, 2.0**-101, np.nan, np.inf], np.float32)
"""Values that no model should make."""


class IdentityError(MoetierError):
    """Two paths of this process differ in a bit."""

    exit_code = 1


def random_rows(tokens: int, hidden: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """Activations as a model would make them, [T, hidden]: rows of other sizes, two outlier channels."""
    x = generator.standard_normal((tokens, hidden)) * np.exp2(generator.uniform(-6, 6, (tokens, 1)))
    x[:, generator.integers(hidden, size=2)] *= 100
    rows: NDArray[np.float32] = x.astype(np.float32)
    return rows


def random_routing(
    geometry: LayerGeometry, tokens: int, generator: np.random.Generator, among: NDArray[np.int32] | None = None
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Skewed routing: distinct experts a token, ids int32 and weights float32 [T, top_k] that sum to 1.

    among: the experts to route to, the most popular first; default all.
    """
    experts = np.arange(geometry.experts, dtype=np.int32) if among is None else among
    popularity = -np.log(np.arange(1, experts.size + 1))
    gumbel = generator.gumbel(size=(tokens, experts.size)) + popularity
    ids = experts[np.argsort(-gumbel, axis=1)[:, : geometry.top_k]]
    weights = generator.random((tokens, geometry.top_k)).astype(np.float32) + np.float32(1e-3)
    return np.ascontiguousarray(ids), weights / weights.sum(1, keepdims=True)


def random_call(
    geometry: LayerGeometry,
    layer: int,
    tokens: int,
    generator: np.random.Generator,
    among: NDArray[np.int32] | None = None,
    hostile: float = 0.0,
) -> Call:
    """A call that was not computed. hostile: the share of rows that are all one of HOSTILE."""
    x = random_rows(tokens, geometry.hidden, generator)
    for row in np.flatnonzero(generator.random(tokens) < hostile):
        x[row] = generator.choice(HOSTILE)
    ids, weights = random_routing(geometry, tokens, generator, among)
    return Call(layer, oracle.to_bf16(x), ids, weights, np.empty(0, np.uint16))


def run(layer: TieredLayer, call: Call) -> NDArray[np.uint16]:
    """The bits of a call."""
    out = np.full(call.x.shape, 0xFFFF, np.uint16)
    layer.forward(call.x, call.ids, call.weights, out)
    return out


def require_equal(
    one: tuple[str, NDArray[np.uint16]], two: tuple[str, NDArray[np.uint16]], where: str, advice: str
) -> None:
    """IdentityError, which says where and what to do, unless two paths, by name, gave the same bits."""
    differ = int((one[1] != two[1]).sum())
    if differ:
        raise IdentityError(
            f"identity check: the paths {one[0]!r} and {two[0]!r} differ in {differ} of {one[1].size} values of "
            f"{where}: expected equal bits. Nothing is served; {advice}"
        )
