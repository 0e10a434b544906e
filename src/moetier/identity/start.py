"""The identity check at start: a few random calls through every path of this process, or it does not serve.

It takes seconds: each call routes to few experts, and goes through every tier with the kernel that will serve and
through two other kernels, which change from call to call. Then every kernel is held to the oracle, once, in a small
layer of the same kind. `moetier identity` is the long check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from shlex import quote

import numpy as np
from numpy.typing import NDArray

from moetier.engine.counters import Counters
from moetier.engine.host import TieredLayer
from moetier.engine.model import TieredModel
from moetier.engine.recording import Call
from moetier.identity.calls import random_call, require_equal, run
from moetier.identity.oracle import check_against_oracle
from moetier.kernels.cpu import CpuExperts, ThreadPool, available_isas
from moetier.tiers.disk import DiskReader
from moetier.tiers.dram import DramTier
from moetier.tiers.heat import Heat
from moetier.tiers.policy import Lru
from moetier.tiers.staging import Staging

TOKENS = (1, 4, 1, 16)
"""Tokens of the calls, in turn."""
STAGING_RECORDS = 2

Path = Callable[[Call], NDArray[np.uint16]]
"""A way to compute a call: its `out` is not looked at, the bits are returned."""


@dataclass(frozen=True)
class Checked:
    """Counts of a check: calls, comparisons of one path with the first, and the names of all paths.

    oracle: kernels that were held to the definition.
    """

    calls: int
    comparisons: int
    paths: tuple[str, ...]
    oracle: int = 0


def self_check(model: TieredModel, calls: int, more: Mapping[str, Path] | None = None, seed: int = 0) -> Checked:
    """Compare `calls` random calls over the paths of `model` and `more` ones; IdentityError at the first difference."""
    generator = np.random.default_rng(seed)
    checker = _Checker(model)
    compared, names = 0, dict[str, None]()
    path = quote(str(model.store.path))
    advice = (
        f"run `moetier identity --store {path}` here and on another machine: either this one's CPU or memory is at "
        "fault, or moetier"
    )
    try:
        for number, tokens in zip(range(calls), cycle(TOKENS), strict=False):
            layer = int(generator.integers(len(model.store.manifest.layers)))
            call = checker.random_call(layer, tokens, generator)
            paths = {**checker.paths(number, call), **(more or {})}
            (reference, run), *others = paths.items()
            bits = run(call)
            where = (
                f"a call of layer {model.store.manifest.layers[layer].number} with {tokens} tokens, experts "
                f"{np.unique(call.ids).tolist()}"
            )
            for name, other in others:
                require_equal((reference, bits), (name, other(call)), where, advice)
            compared += len(others)
            names.update(dict.fromkeys(paths))
    finally:
        checker.close()
    family, isas = model.store.manifest.layer_family, dict.fromkeys((model.kernel.isa, *available_isas()))
    held = check_against_oracle(model.part.narrow, family, tuple(isas), model.pool) if calls else 0
    return Checked(calls, compared, tuple(names), held)


class _Checker:
    """Kernels and rooms of the check, apart from those that serve: nothing that it does is counted there."""

    def __init__(self, model: TieredModel) -> None:
        self._part = model.part
        self._heat = Heat(len(model.store.manifest.layers), self._part.geometry.experts, "")
        self._reader = DiskReader(model.store, 2, model.healer, model.part)
        self._staging = Staging(STAGING_RECORDS, model.part.room, model.part.shift)
        self._single = ThreadPool(1, model.pool.cpus[:1])
        served = model.kernel.isa
        self._served = (f"{served}/{model.pool.threads} threads", model.make_kernel(served, model.pool, max(TOKENS)))
        self._others = [
            (f"{isa}/{pool.threads} threads", model.make_kernel(isa, pool, max(TOKENS)))
            for pool in (model.pool, self._single)
            for isa in available_isas()
            if (isa, pool) != (served, model.pool)
        ]

    def random_call(self, layer: int, tokens: int, generator: np.random.Generator) -> Call:
        """Return a call of few experts, so that it takes little room."""
        geometry = self._part.geometry
        few = min(geometry.experts, geometry.top_k + 2)
        chosen = generator.choice(geometry.experts, few, replace=False).astype(np.int32)
        return random_call(geometry, layer, tokens, generator, chosen)

    def paths(self, number: int, call: Call) -> dict[str, Path]:
        """By name, for one call: the kernel that serves over every tier, and two others over DRAM."""
        name, kernel = self._served
        distinct = np.unique(call.ids).astype(np.int32)
        tier, half, none = (self._tier(size) for size in (distinct.size, distinct.size // 2, 0))
        for filled in (tier, half):
            self._layer(kernel, call.layer, filled).fetcher.load(distinct[: filled.slots])
        layers = {
            f"DRAM/{name}": self._layer(kernel, call.layer, tier),
            f"DRAM and disk/{name}": self._layer(kernel, call.layer, half),
            f"disk/{name}": self._layer(kernel, call.layer, none),
        }
        for index in range(2 * number, 2 * number + min(2, len(self._others))):
            other, other_kernel = self._others[index % len(self._others)]
            layers[f"DRAM/{other}"] = self._layer(other_kernel, call.layer, tier)
        return {name: partial(run, layer) for name, layer in layers.items()}

    def _tier(self, slots: int) -> DramTier:
        experts = self._part.geometry.experts
        return DramTier(experts, slots, self._part.room, Lru(experts), self._part.shift)

    def _layer(self, kernel: CpuExperts, index: int, tier: DramTier) -> TieredLayer:
        return TieredLayer(index, kernel, tier, self._staging, self._reader, self._heat, Counters())

    def close(self) -> None:
        self._reader.close()
        self._single.close()
