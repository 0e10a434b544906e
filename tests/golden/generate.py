"""Writes int8x.npz, the golden vectors of the numerics contract: inputs, intermediates and output bits by the oracle.

The file is the contract's memory: it is never written anew unless the contract itself changes, which is what
`python -m tests.golden.generate --new-contract` (from the repository's root) says. The test pins its SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moetier.contract import Family, LayerGeometry, oracle
from tests.kernels.support import Layer, expected, make_inputs, make_layer, part_of

GOLDEN = Path(__file__).with_name("int8x.npz")

PLAIN = Family()
CLAMPED = Family(swiglu_limit=0.5)
INSIDE = Family(route_weight_before_down=True)
BOTH = Family(swiglu_limit=10.0, route_weight_before_down=True)
FAMILIES = {"plain": PLAIN, "clamped": CLAMPED, "inside": INSIDE, "both": BOTH}

Inputs = tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]
Edit = Callable[[Inputs, np.random.Generator, Layer], None]


@dataclass(frozen=True)
class Case:
    """How one case is made. `edit` changes inputs that were drawn at random."""

    name: str
    hidden: int = 64
    intermediate: int = 64
    experts: int = 2
    top_k: int = 2
    slices: int = 1
    tokens: int = 5
    family: Family = PLAIN
    scales: tuple[int, int] = (118, 124)
    down_scales: tuple[int, int] | None = None
    first_slice: int = 0
    slice_count: int | None = None
    bf16: bool = True
    edit: Edit | None = None

    @property
    def geometry(self) -> LayerGeometry:
        return LayerGeometry(self.hidden, self.intermediate, self.experts, self.top_k, self.slices)


def put(row: int | slice, column: int | slice, value: float) -> Edit:
    """An edit that sets some of x."""

    def edit(inputs: Inputs, rng: np.random.Generator, layer: Layer) -> None:
        inputs[0][row, column] = value

    return edit


def scale_x(exponent: int) -> Edit:
    def edit(inputs: Inputs, rng: np.random.Generator, layer: Layer) -> None:
        inputs[0][:] = np.ldexp(inputs[0], exponent)

    return edit


def integers_times(exponent: int) -> Edit:
    """Make x integers in -127..127 times 2^exponent, so that each block's e is that exponent."""

    def edit(inputs: Inputs, rng: np.random.Generator, layer: Layer) -> None:
        x = rng.integers(-127, 128, inputs[0].shape).astype(np.float64)
        x[:, ::32] = 127
        inputs[0][:] = oracle.from_bf16(oracle.to_bf16(np.ldexp(x, exponent).astype(np.float32)))

    return edit


def every_magnitude(inputs: Inputs, rng: np.random.Generator, layer: Layer) -> None:
    shape = inputs[0].shape
    x = np.ldexp(rng.uniform(-2, 2, shape), rng.integers(-140, 127, shape)).astype(np.float32)
    inputs[0][:] = oracle.from_bf16(oracle.to_bf16(x))


def repeat_ids(inputs: Inputs, rng: np.random.Generator, layer: Layer) -> None:
    inputs[1][:] = rng.integers(0, 2, inputs[1].shape)


def stray_ids(inputs: Inputs, rng: np.random.Generator, layer: Layer) -> None:
    inputs[1][0], inputs[1][1, 0], inputs[1][2, 1] = [-1, 2], 2**31 - 1, -(2**31)


def odd_weights(inputs: Inputs, rng: np.random.Generator, layer: Layer) -> None:
    inputs[2][:] = np.array([0, -1.25, 1e-38, 1e-30, 3e38, np.inf, np.nan, -0.0, 1e-20, 1], np.float32).reshape(5, 2)


def sum_near_the_largest(inputs: Inputs, rng: np.random.Generator, layer: Layer) -> None:
    y = oracle.expert_rows(oracle.cut(layer.experts[0], 1), *oracle.quantize(inputs[0]), None, PLAIN)
    inputs[2][:, 0] = np.float32(3.402e38) / np.abs(y).max(1)


def cases() -> Iterator[Case]:
    """Every case, in the file's order."""
    for blocks in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24):
        yield Case(f"hidden-{32 * blocks}", hidden=32 * blocks, intermediate=32)
    for blocks in (1, 2, 3, 4, 5, 8, 16):
        yield Case(f"intermediate-{32 * blocks}", hidden=32, intermediate=32 * blocks)
    for name, family in FAMILIES.items():
        yield Case(f"family-{name}", family=family, experts=4, top_k=3)
        yield Case(f"slices-4-{name}", family=family, slices=4, intermediate=128)
    for slices in (2, 8):
        yield Case(f"slices-{slices}", slices=slices, intermediate=256, hidden=32)
    for first, count in ((0, 1), (3, 1), (0, 2), (2, 2)):
        rank = Case(f"rank-{first}-{count}", slices=4, intermediate=128, family=BOTH)
        yield replace(rank, first_slice=first, slice_count=count)
    yield Case("one-token", tokens=1)
    yield Case("many-tokens", tokens=37)
    yield Case("float32-x", bf16=False)
    yield Case("zero-blocks", edit=put(slice(0, 3), slice(32, 64), 0.0))
    yield Case("zero-rows", edit=put(slice(1, 3), slice(None), 0.0))
    yield Case("below-the-flush", edit=put(2, slice(None), 2.0**-101), family=INSIDE)
    yield Case("at-the-flush", edit=put(2, slice(0, 40), 2.0**-100))
    yield Case("nan-row", edit=put(2, 17, np.nan))
    yield Case("infinite-rows", edit=put(slice(1, 3), 40, -np.inf), slices=2)
    yield Case("every-magnitude", edit=every_magnitude, hidden=256)
    yield Case("every-scale", scales=(0, 254), hidden=256)
    yield Case("every-gate-scale", scales=(0, 254), down_scales=(118, 124), hidden=256)
    yield Case("every-down-scale", down_scales=(0, 254), intermediate=256)
    for exponent, scale in ((-106, 254), (-106, 108), (-106, 107), (0, 0), (0, 2), (0, 1), (0, 239), (0, 240)):
        extreme = Case(f"e{exponent}-s{scale}", scales=(scale, scale), down_scales=(118, 124))
        yield replace(extreme, edit=integers_times(exponent))
    for scale in (0, 117, 118, 254):
        extreme = Case(f"e121-s{scale}", scales=(scale, scale), down_scales=(118, 124))
        yield replace(extreme, edit=integers_times(120))
    yield Case("overflow-in-gate-and-up", scales=(205, 215), edit=scale_x(20))
    yield Case("overflow-in-some-rows", scales=(205, 215), edit=put(slice(0, 2), slice(None), 2.0**-99), slices=2)
    yield Case("overflow-in-down", down_scales=(230, 235))
    yield Case("overflow-in-combine", edit=sum_near_the_largest, experts=1, top_k=1)
    yield Case("swiglu-range", scales=(112, 131), intermediate=256, hidden=32)
    yield Case("expert-twice", edit=repeat_ids, experts=3, top_k=3)
    yield Case("ids-outside", edit=stray_ids)
    yield Case("odd-weights", edit=odd_weights)
    yield Case("odd-weights-inside", edit=odd_weights, family=BOTH)


def make(case: Case, seed: int) -> tuple[Layer, Inputs]:
    rng = np.random.default_rng([20261129, seed])
    layer = make_layer(rng, case.geometry, case.scales, case.down_scales)
    inputs = make_inputs(rng, case.geometry, case.tokens)
    if not case.bf16:
        inputs[0][:] = rng.standard_normal(inputs[0].shape)
    with np.errstate(over="ignore"):
        if case.edit is not None:
            case.edit(inputs, rng, layer)
    return layer, inputs


def arrays_of(case: Case, seed: int) -> dict[str, NDArray]:
    """Inputs; the quantized x; y of expert 0 on every token with its first weight; the layer's bf16 bits."""
    layer, (x, ids, weights) = make(case, seed)
    count = case.slices if case.slice_count is None else case.slice_count
    q, e = oracle.quantize(x)
    first = part_of(layer.experts[0], case.geometry, case.first_slice, count)
    y = oracle.expert_rows(oracle.cut(first, count), q, e, weights[:, 0], case.family)
    out = expected(layer, x, ids, weights, case.family, case.first_slice, count)
    y = np.where(np.isnan(y), np.float32(np.nan), y)  # one NaN: its sign and payload are no part of the contract
    stored_x = (x.view(np.uint32) >> 16).astype(np.uint16) if case.bf16 else x  # NaN and infinity keep their bits
    return {
        "records": layer.memory, "x": stored_x, "ids": ids, "weights": weights, "q": q, "e": e,
        "y": y.view(np.uint32), "out": out,
    }  # fmt: skip


def description(case: Case) -> dict[str, object]:
    fields = {name: getattr(case, name) for name in ("name", "first_slice", "slice_count")}
    return fields | {"geometry": asdict(case.geometry), "family": asdict(case.family)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-contract", action="store_true", help="the contract changed: replace the golden vectors")
    if not parser.parse_args().new_contract and GOLDEN.exists():
        print(f"{GOLDEN} exists and is not replaced. Say --new-contract if the contract changed.", file=sys.stderr)
        return 2
    everything = list(cases())
    arrays = {"cases": np.array(json.dumps([description(case) for case in everything]))}
    for seed, case in enumerate(everything):
        arrays |= {f"{case.name}/{name}": array for name, array in arrays_of(case, seed).items()}
    np.savez_compressed(GOLDEN, **arrays)
    digest = hashlib.sha256(GOLDEN.read_bytes()).hexdigest()
    print(f"{len(everything)} cases, {GOLDEN.stat().st_size} bytes, sha256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
