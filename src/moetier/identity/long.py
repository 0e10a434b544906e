"""The identity check: the same layer calls through every path, compared as integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetier.contract import oracle
from moetier.engine.counters import Counters
from moetier.engine.host import TieredLayer
from moetier.engine.recording import Call
from moetier.errors import SettingsError
from moetier.identity.calls import random_call, run
from moetier.kernels.cpu import CpuExperts, ThreadPool, available_isas
from moetier.store.store import Store
from moetier.tiers.disk import DiskReader
from moetier.tiers.dram import DramTier
from moetier.tiers.heat import Heat
from moetier.tiers.policy import Lru
from moetier.tiers.staging import Staging

MAX_TOKENS = 64
STAGING_RECORDS = 4
ORACLE_EVERY = 50
"""One random call in so many also goes through the oracle, which is slow."""


@dataclass(frozen=True)
class Difference:
    """Where two paths disagree."""

    paths: tuple[str, str]
    layer: int
    values: int


@dataclass
class IdentityReport:
    """Counts of a comparison. bytes: record bytes that the calls touched, over all paths."""

    calls: int = 0
    pairs: int = 0
    bytes: int = 0
    oracle_calls: int = 0
    differ: int = 0
    paths: list[str] = field(default_factory=list)
    first: Difference | None = None

    def compare(self, name: str, reference: str, layer: int, out: NDArray[np.uint16], bits: NDArray[np.uint16]) -> None:
        """Count the values of `out` that are not `bits`, both bf16 bits."""
        values = int((out != bits).sum())
        self.differ += values
        if values and self.first is None:
            self.first = Difference((reference, name), layer, values)


class Paths:
    """Every way to compute one layer of a store: tiers x instruction sets x threads."""

    def __init__(self, store: Store, threads: tuple[int, ...], isas: tuple[str, ...], max_tokens: int) -> None:
        self.store = store
        self._geometry = store.manifest.layer_geometry
        self._reader = DiskReader(store, threads=4)
        self._staging = Staging(STAGING_RECORDS, store.layout.stride)
        self._pools = [ThreadPool(count) for count in threads]
        self._kernels = {
            f"{isa}/{pool.threads} thread{'s' if pool.threads > 1 else ''}": CpuExperts(
                self._geometry, store.manifest.layer_family, pool, isa=isa, max_tokens=max_tokens
            )
            for isa, pool in product(isas, self._pools)
        }

    def of_layer(self, layer: int) -> dict[str, TieredLayer]:
        """The paths of one layer by name; the first holds every record in DRAM."""
        experts, stride = self._geometry.experts, self.store.layout.stride
        paths: dict[str, TieredLayer] = {}
        for tier, slots in (("all-DRAM", experts), ("quarter-DRAM", experts // 4), ("disk-only", 0)):
            dram = DramTier(experts, slots, stride, Lru(experts))
            for name, kernel in self._kernels.items():
                heat = Heat(len(self.store.manifest.layers), experts, "")
                path = TieredLayer(layer, kernel, dram, self._staging, self._reader, heat, Counters())
                if not paths or dram.resident.size == 0:
                    path.preload(slots)
                paths[f"{tier}/{name}"] = path
        return paths

    def close(self) -> None:
        """End the threads and close the files."""
        self._reader.close()
        for pool in self._pools:
            pool.close()


def check_random(
    store: Store,
    calls: int,
    seed: int,
    threads: tuple[int, ...] = (1, 2),
    progress: Callable[[int], None] | None = None,
) -> IdentityReport:
    """`calls` random layer calls of 1 to 64 tokens through every path, and the oracle on a sample."""
    layers = len(store.manifest.layers)
    generator = np.random.default_rng(seed)
    report = IdentityReport()
    paths = Paths(store, threads, available_isas(), MAX_TOKENS)
    try:
        for layer in range(layers):
            share = calls // layers + (layer < calls % layers)
            named = paths.of_layer(layer)
            for index, call in enumerate(islice(random_calls(store, layer, generator), share)):
                bits = _compare(report, named, call, store)
                if index % ORACLE_EVERY == 0:
                    _compare_oracle(report, next(iter(named)), call, bits, store)
                if progress is not None:
                    progress(report.calls)
            for path in named.values():
                path.tier.check_integrity()
    finally:
        paths.close()
    return report


def check_recorded(
    store: Store, calls: Iterator[Call], progress: Callable[[int], None] | None = None
) -> IdentityReport:
    """Recorded calls computed again with every record in DRAM, against the bits that they gave when served."""
    report = IdentityReport(paths=["as served", "all-DRAM"])
    by_layer: dict[int, TieredLayer] = {}
    recorded = list(calls)
    largest = max((call.x.shape[0] for call in recorded), default=1)
    paths = Paths(store, (1,), available_isas()[:1], largest)
    try:
        for call in recorded:
            _check_fits(call, store)
            if call.layer not in by_layer:
                by_layer[call.layer] = next(iter(paths.of_layer(call.layer).values()))
            _count(report, call, store, 1)
            report.compare("all-DRAM", "as served", call.layer, run(by_layer[call.layer], call), call.out)
            if progress is not None:
                progress(report.calls)
    finally:
        paths.close()
    return report


def _check_fits(call: Call, store: Store) -> None:
    """SettingsError where a recorded call is not one of this store's layers."""
    geometry, layers = store.manifest.layer_geometry, len(store.manifest.layers)
    tokens = call.x.shape[0]
    expected = (tokens, geometry.hidden), (tokens, geometry.top_k), (tokens, geometry.top_k), (tokens, geometry.hidden)
    found = call.x.shape, call.ids.shape, call.weights.shape, call.out.shape
    if found != expected or not 0 <= call.layer < layers:
        raise SettingsError(
            f"a recorded call does not fit {store.path}: expected a layer below {layers} and shapes {expected}, found "
            f"layer {call.layer} and {found}; name the store that it was recorded with"
        )


def random_calls(store: Store, layer: int, generator: np.random.Generator) -> Iterator[Call]:
    """Calls of 1 to 64 tokens, with a few rows that no model should make."""
    while True:
        tokens = int(generator.integers(1, MAX_TOKENS + 1))
        yield random_call(store.manifest.layer_geometry, layer, tokens, generator, hostile=0.02)


def _compare(report: IdentityReport, named: dict[str, TieredLayer], call: Call, store: Store) -> NDArray[np.uint16]:
    """One call through all paths; the first is the reference, its bits are returned."""
    report.paths = list(named)
    _count(report, call, store, len(named))
    results = {name: run(path, call) for name, path in named.items()}
    reference, bits = next(iter(results.items()))
    for name, out in results.items():
        report.compare(name, reference, call.layer, out, bits)
    return bits


def _compare_oracle(report: IdentityReport, reference: str, call: Call, bits: NDArray[np.uint16], store: Store) -> None:
    geometry = store.manifest.layer_geometry
    record = np.empty(store.layout.stride, np.uint8)
    experts: dict[int, Any] = {}
    tokens = slice(0, 4)  # a few rows of a call say as much as all of them
    for expert in np.unique(call.ids[tokens]):
        store.read_record(call.layer, int(expert), record)
        experts[int(expert)] = store.layout.unpack(record)
    out = oracle.moe_layer(
        oracle.from_bf16(call.x[tokens]),
        call.ids[tokens],
        call.weights[tokens],
        experts,
        geometry.experts,
        store.manifest.layer_family,
        geometry.slices,
    )
    report.oracle_calls += 1
    report.compare("oracle", reference, call.layer, out, bits[tokens])


def _count(report: IdentityReport, call: Call, store: Store, paths: int) -> None:
    report.calls += 1
    report.pairs += call.ids.size
    report.bytes += np.unique(call.ids).size * store.layout.stride * paths
