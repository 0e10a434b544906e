"""Which experts a workload asks for: how often what lies in the fastest tiers is enough.

A workload is the chance, expert by expert, that one token of a layer is routed to it, hottest first. From it follow hit
rates of any number of slots, what many tokens together touch, and what is read from disk; nothing is fitted row by row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moetier.errors import SettingsError
from moetier.plan.geometry import Geometry
from moetier.settings import Settings
from moetier.trace.record import Trace
from moetier.trace.simulate import hit_rate as simulated_hit_rate


@dataclass(frozen=True)
class Named:
    """A stated Zipf curve. skew: its exponent; depth: tokens of context behind which decode is predicted."""

    skew: float
    depth: int
    source: str


PUBLISHED_FOR = "deepseek_v41"
"""The model type that the named curves were published for; for others they are assumed."""
PUBLISHED = (
    "Zipf curve from published hit rates: DeepSeek-V4.1-Flash on four 32 GB cards, "
    "110 of 384 experts of a layer in slots, "
)
NAMED = {
    "short": Named(1.52, 1024, PUBLISHED + "short repetitive prompts, about 10 of 40 layers miss an expert in a step"),
    "mixed": Named(1.16, 65536, PUBLISHED + "mixed prompts over 30 minutes, hit rate 0.87 to 0.88"),
    "deep": Named(1.16, 131072, PUBLISHED + "mixed prompts, hit rate 0.87, behind 2K to 512K of context"),
}
DEFAULT = "mixed"
POLICY: str = Settings.model_fields["policy"].default
"""The policy that a server runs unless told otherwise."""


@dataclass(frozen=True, eq=False)
class Workload:
    """chances: float64 [E], descending, of one token to be routed to an expert; they sum to top-k."""

    name: str
    source: str
    chances: NDArray[np.float64]
    depth: int
    skew: float | None = None
    """Exponent of the Zipf curve; None: chances were counted in a trace."""
    trace: Path | None = None

    @property
    def prompts(self) -> Workload:
        """Popularity in prompts: text of all kinds, whatever the answers repeat; a trace speaks for itself."""
        if self.trace is not None or self.name == DEFAULT:
            return self
        return named(DEFAULT, self.chances.size, round(self.top_k))

    @property
    def top_k(self) -> float:
        return float(self.chances.sum())

    def bent(self, factor: float) -> Workload:
        """The same with another skew: how far the answer depends on it. A counted curve is bent in the logarithm."""
        if factor == 1:
            return self
        if self.skew is not None:
            return replace(
                self, skew=self.skew * factor, chances=zipf(self.chances.size, self.top_k, self.skew * factor)
            )
        return replace(self, chances=_scaled(self.chances**factor, self.top_k))

    def hit_rate(self, covered: int) -> float:
        """Share of one token's experts that are among the `covered` of a layer that are kept."""
        if self.trace is not None and 0 < covered < self.chances.size:
            return _simulated(self.trace, covered)
        return float(self.chances[:covered].sum() / self.top_k)

    def miss_chances(self, covered: int, rows: float) -> NDArray[np.float64]:
        """float64 [E - covered]: of each expert not among the `covered`, that any of `rows` tokens is routed to it."""
        return np.minimum(routed(self.chances[covered:], rows) * self._policy(covered), 1.0)

    def held(self, covered: int) -> NDArray[np.float64]:
        """float64 [covered]: of each expert that is kept, that a token is routed to it."""
        kept = self.chances[:covered]
        if self.trace is None or not kept.size:
            return kept
        scaled: NDArray[np.float64] = np.minimum(kept * self.top_k * self.hit_rate(covered) / kept.sum(), 1.0)
        return scaled

    def with_misses(self, covered: int, rows: float, missed: float) -> Workload:
        """The same, but of the experts not among the `covered` so many are missed by `rows` tokens, as was counted."""
        likely = self.miss_chances(covered, rows)
        scaled = 1 - (1 - np.minimum(likely * missed / max(likely.sum(), 1e-12), 1.0)) ** (1 / rows)
        return replace(self, chances=np.r_[self.held(covered), scaled], skew=None)

    def missed(self, covered: int, rows: float) -> float:
        """Distinct experts of a layer, not among the `covered`, that `rows` tokens together are routed to."""
        return float(self.miss_chances(covered, rows).sum())

    def any_missed(self, covered: int, rows: float) -> float:
        """Chance that a layer of such a step has a miss at all."""
        return float(1 - np.prod(1 - self.miss_chances(covered, rows)))

    def _policy(self, covered: int) -> float:
        """Misses of the cache policy on the trace over misses of the best fixed set; 1 for a stated curve."""
        best = float(self.chances[covered:].sum() / self.top_k)
        return (1 - self.hit_rate(covered)) / best if self.trace is not None and best > 0 else 1.0


def routed(chances: NDArray[np.float64], rows: float) -> NDArray[np.float64]:
    """Return the chance of each expert that any of `rows` tokens is routed to it, where one is with these chances."""
    likely: NDArray[np.float64] = 1 - (1 - np.minimum(chances, 1.0)) ** rows
    return likely


def hit_rate(slots: int, experts: int, workload: str = DEFAULT, top_k: int = 8) -> float:
    """Share of one token's experts found in `slots` of a layer of `experts`, under a named workload."""
    return named(workload, experts, top_k).hit_rate(slots)


@lru_cache(maxsize=64)
def zipf(experts: int, top_k: float, skew: float) -> NDArray[np.float64]:
    """Chances falling as rank ** -skew; a token takes an expert once, so none is above 1."""
    chances = _scaled(np.arange(1, experts + 1, dtype=np.float64) ** -skew, top_k)
    chances.flags.writeable = False
    return chances


def _scaled(weights: NDArray[np.float64], top_k: float) -> NDArray[np.float64]:
    """min(1, c * weights), weights descending, with the c that makes the sum top_k, found by halving its logarithm."""
    weights = np.maximum(weights, 1e-280)
    low, high = np.log(top_k / weights.sum()), -np.log(weights[min(int(np.ceil(top_k)), weights.size) - 1])
    for _ in range(80):
        middle = (low + high) / 2
        if np.minimum(1.0, np.exp(middle) * weights).sum() < top_k:
            low = middle
        else:
            high = middle
    chances: NDArray[np.float64] = np.minimum(1.0, np.exp(high) * weights)
    return chances


def named(name: str, experts: int, top_k: int) -> Workload:
    """One of short, mixed and deep."""
    if name not in NAMED:
        raise SettingsError(
            f"workload {name!r} is not known; expected {', '.join(NAMED)}, or a trace file of `moetier trace record`"
        )
    found = NAMED[name]
    return Workload(name, found.source, zipf(experts, top_k, found.skew), found.depth, found.skew)


def of(name: str, geometry: Geometry) -> Workload:
    """A named workload, or that of a trace file; SettingsError if the trace is of another model."""
    if name in NAMED or not Path(name).exists():
        return named(name, geometry.experts, geometry.top_k)
    path = Path(name)
    header = Trace.open(path).header
    if (header.experts, header.top_k) != (geometry.experts, geometry.top_k):
        raise SettingsError(
            f"{path} traces a model of {header.experts} experts, top-{header.top_k}; {geometry.name} has "
            f"{geometry.experts}, top-{geometry.top_k}: record one of this model"
        )
    chances = _counted(path)
    source = f"decode steps of {path}; hit rates by replay under the policy {POLICY}, which learns from its first fifth"
    return Workload(path.name, source, _scaled(chances, header.top_k), NAMED[DEFAULT].depth, trace=path)


def _counted(path: Path) -> NDArray[np.float64]:
    """Picks of each rank, mean of the layers, of the steps without a prompt."""
    trace = Trace.open(path)
    counts = np.zeros((trace.header.layers, trace.header.experts))
    for call in trace.calls():
        if not call.step.prefill:
            ids = call.ids[call.ids < trace.header.experts]
            counts[call.layer] += np.bincount(ids, minlength=trace.header.experts)
    used = counts[counts.sum(axis=1) > 0]
    if not used.size:
        raise SettingsError(f"{path}: expected steps that decode, found only prompts; record a trace while it answers")
    shares = used / used.sum(axis=1, keepdims=True)
    ranked = np.sort(shares, axis=1)[:, ::-1].mean(axis=0)
    smallest = ranked[ranked > 0].min()
    floored: NDArray[np.float64] = np.maximum(ranked, smallest / 2)  # never seen is not never
    return floored


@lru_cache(maxsize=256)
def _simulated(path: Path, slots: int) -> float:
    return simulated_hit_rate(Trace.open(path), slots, POLICY)
