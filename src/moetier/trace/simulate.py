"""Replays a routing trace against slots and a policy: what would have been hit. A step is scored, then learnt from.

The slots of a layer are `resident` ones, fixed by heat, and `spare` ones, which the policy refills after each step.
Heat is learnt from the first part of the trace (or given), and only the rest is scored: nothing is known in advance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from moetier.errors import SettingsError
from moetier.tiers.policy import POLICIES, Policy, refills
from moetier.trace.record import Trace, TracedCall, TraceHeader


@dataclass(frozen=True)
class Plan:
    """A plan to simulate.

    slots: per layer. resident: how many of them are fixed by heat. fills: the most copies after a step, all layers
    together; None for no limit. learn: the share of the trace's steps that only teaches (heat and policy).
    """

    slots: int
    policy: str = "frequency"
    resident: int = 0
    fills: int | None = None
    learn: float = 0.2


@dataclass
class Score:
    """Score of many steps. uses: distinct experts of a layer call, each a hit or a miss; pairs: (token, expert)."""

    steps: int = 0
    calls: int = 0
    uses: int = 0
    hits: int = 0
    pairs: int = 0
    pair_hits: int = 0
    layers_with_miss: int = 0
    fills: int = 0
    layer_uses: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    layer_hits: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def hit_rate(self) -> float:
        """Share of the distinct experts of calls that were in slots, 0 to 1."""
        return self.hits / self.uses if self.uses else 1.0

    @property
    def misses_per_step(self) -> float:
        return (self.uses - self.hits) / self.steps if self.steps else 0.0

    @property
    def layers_with_miss_per_step(self) -> float:
        return self.layers_with_miss / self.steps if self.steps else 0.0

    def summary(self) -> dict[str, float | int | list[float]]:
        """Plain numbers for JSON; per-layer hit rates by index in the store."""
        rates = self.layer_hits / np.maximum(self.layer_uses, 1)
        return {
            "steps": self.steps,
            "hit_rate": self.hit_rate,
            "pair_hit_rate": self.pair_hits / self.pairs if self.pairs else 1.0,
            "misses_per_step": self.misses_per_step,
            "layers_with_miss_per_step": self.layers_with_miss_per_step,
            "fills_per_step": self.fills / self.steps if self.steps else 0.0,
            "layer_hit_rates": [round(float(rate), 6) for rate in rates],
        }


@dataclass(frozen=True)
class Scores:
    """Steps that only decode, and steps with a prompt in them."""

    decode: Score
    prefill: Score


class _Slots:
    """One layer's slots in the simulation."""

    def __init__(self, plan: Plan, experts: int) -> None:
        self.policy: Policy = POLICIES[plan.policy](experts)
        self.resident: NDArray[np.bool_] = np.zeros(experts, np.bool_)
        self.spare: NDArray[np.bool_] = np.zeros(experts, np.bool_)
        self.spares = plan.slots

    def settle(self, plan: Plan, hottest: NDArray[np.int32]) -> None:
        """Heat is known: fix the residents, and fill the other slots with the next hottest."""
        self.resident[hottest[: plan.resident]] = True
        self.spare[:] = False
        self.spare[hottest[plan.resident : plan.slots]] = True
        self.spares = plan.slots - plan.resident
        self.policy.place(hottest[: plan.slots])

    def run(self, call: TracedCall, distinct: NDArray[np.int32], limit: int) -> int:
        """Learn from a call and refill; the number of copies."""
        self.policy.touch(distinct, call.step.prefill)
        missed = distinct[~(self.resident | self.spare)[distinct]]
        live = np.flatnonzero(self.spare).astype(np.int32)
        swaps = refills(self.policy, missed, live, self.spares - live.size, limit)
        for swap in swaps:
            if swap.victim is not None:
                self.spare[swap.victim] = False
            self.spare[swap.expert] = True
        return len(swaps)


def simulate(trace: Trace, plan: Plan, heat: NDArray[np.uint64] | None = None) -> Scores:
    """Scores of `plan` on `trace`. heat: [layers, experts] from elsewhere, instead of learning it from the first part.

    SettingsError where the plan does not fit the trace.
    """
    header = trace.header
    _check(plan, header, heat)
    layers = [_Slots(plan, header.experts) for _ in range(header.layers)]
    total = sum(1 for _ in trace.steps())
    learning = 0 if heat is not None else max(1, round(total * plan.learn))
    if learning >= total:
        raise SettingsError(
            f"{trace.path}: expected more than {learning} steps, as so many only teach, found {total}; record a longer "
            "trace, or give heat"
        )
    counts = np.zeros((header.layers, header.experts), np.uint64) if heat is None else heat
    steps = trace.steps()
    for step in islice(steps, learning):
        for call in step:
            distinct, pairs = _routed(call, header.experts)
            counts[call.layer, distinct] += np.minimum(pairs, call.step.sequences or pairs).astype(np.uint64)
            layers[call.layer].policy.touch(distinct, call.step.prefill)
    for slots, row in zip(layers, counts, strict=True):
        slots.settle(plan, np.argsort(-row.astype(np.float64), kind="stable").astype(np.int32))
    return _score(steps, layers, plan, header)


def hit_rate(trace: Trace, slots: int, policy: str = "frequency", resident: int = 0) -> float:
    """Share of decode's distinct experts that `slots` of each layer hold, 0 to 1."""
    return simulate(trace, Plan(slots, policy, resident)).decode.hit_rate


def _score(steps: Iterator[list[TracedCall]], layers: list[_Slots], plan: Plan, header: TraceHeader) -> Scores:
    def empty() -> Score:
        return Score(layer_uses=np.zeros(header.layers, np.int64), layer_hits=np.zeros(header.layers, np.int64))

    scores = Scores(empty(), empty())
    for step in steps:
        score = scores.prefill if step[0].step.prefill else scores.decode
        score.steps += 1
        left = header.layers * header.experts if plan.fills is None else plan.fills
        for call in step:
            slots = layers[call.layer]
            distinct, pairs = _routed(call, header.experts)
            hit = (slots.resident | slots.spare)[distinct]
            hits = int(hit.sum())
            score.calls += 1
            score.uses += distinct.size
            score.hits += hits
            score.pairs += int(pairs.sum())
            score.pair_hits += int(pairs[hit].sum())
            score.layers_with_miss += hits < distinct.size
            score.layer_uses[call.layer] += distinct.size
            score.layer_hits[call.layer] += hits
            fills = slots.run(call, distinct, left)
            score.fills += fills
            left -= fills
    return scores


def _routed(call: TracedCall, experts: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Distinct experts of a call, ascending, and the pairs of each."""
    distinct, pairs = np.unique(call.ids[call.ids < experts], return_counts=True)
    return distinct.astype(np.int32), pairs.astype(np.int64)


def _check(plan: Plan, header: TraceHeader, heat: NDArray[np.uint64] | None) -> None:
    if not 0 <= plan.resident <= plan.slots <= header.experts:
        raise SettingsError(
            f"expected resident <= slots <= {header.experts} experts of a layer, found {plan.resident} resident of "
            f"{plan.slots} slots; lower them"
        )
    if plan.policy not in POLICIES:
        raise SettingsError(f"policy {plan.policy!r} is not known; expected one of {', '.join(POLICIES)}")
    if plan.fills is not None and plan.fills < 0:
        raise SettingsError(f"fills: expected 0 or more copies a step, found {plan.fills}")
    if not 0 <= plan.learn < 1:
        raise SettingsError(f"learn: expected a share from 0 to below 1, found {plan.learn}")
    if heat is not None and heat.shape != (header.layers, header.experts):
        raise SettingsError(
            f"heat of {heat.shape} does not fit a trace of {header.layers} layers and {header.experts} experts; name "
            "the heat file of the model that was traced"
        )
