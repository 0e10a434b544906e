"""Measure what streams do to each other: a prefix that many share, a long prompt beside running streams."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Literal

from pydantic import Field

from moetier_bench.probes.base import Probe, Raw, Running, Target, Timed, growth, not_cold, of_first, one
from moetier_bench.probes.decode import gaps_within
from moetier_bench.samples import Cell, Trial, figure, first_fault, percentile

ANSWER = 8
"""Tokens of an answer behind a prefix."""


class Prefix(Probe):
    """A long prefix, then `followers` questions behind it; `repeats` such prefixes. prefix: tokens, cut to three
    quarters of the positions.
    """

    probe: Literal["prefix"] = "prefix"
    prefix: int = Field(65536, ge=64)
    followers: int = Field(4, ge=1)
    tail: int = Field(32, ge=1)
    repeats: int = Field(1, ge=1)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of an answer."""
        return ANSWER

    def trials_of(self, raw: Raw) -> dict[str, int] | None:
        """By label."""
        return {"cold": self.repeats, "warm": self.repeats * self.followers}

    async def measure(self, target: Target) -> Raw:
        """The first of each prefix is cold, the others find it."""
        length = min(self.prefix, target.endpoint.positions * 3 // 4)
        trials = []
        for _ in range(self.repeats):
            shared = await target.prompts.exactly(length)
            for label in ("cold", *["warm"] * self.followers):
                prompt = shared + await target.prompts.exactly(self.tail)
                ask = target.endpoint.completion(prompt, ANSWER)
                trials.append(await one(target, label, ask, want=length + self.tail))
        return Raw(trials=tuple(trials))

    def cells(self, raw: Raw) -> list[Cell]:
        """TTFT without and with the prefix; the latter only where the server's counters show hits."""
        cold, warm = raw.labelled("cold"), raw.labelled("warm")
        of_cold = of_first([first_fault(trial.streams) or not_cold(trial) for trial in cold])
        of_warm = of_first([first_fault(trial.streams) or _not_warm(trial) for trial in warm])
        hits = [trial.counters.get("vllm:prefix_cache_hits_total", 0.0) / (trial.want or 1) for trial in warm]
        return [
            figure("prefix.cold_ttft", "s", "lower", [] if of_cold else [t.streams[0].ttft for t in cold], of_cold),
            figure("prefix.warm_ttft", "s", "lower", [] if of_warm else [t.streams[0].ttft for t in warm], of_warm),
            figure("prefix.hit_share", "share", "higher", hits, of_warm),
        ]


def _not_warm(trial: Trial) -> str | None:
    hits = trial.counters.get("vllm:prefix_cache_hits_total", 0.0)
    return None if 2 * hits >= (trial.want or 0) else "the server's counters show no hit of the prefix"


class Fairness(Probe):
    """`running` streams decode; after `seconds` a prompt of `length` tokens enters."""

    probe: Literal["fairness"] = "fairness"
    running: int = Field(4, ge=1)
    seconds: float = Field(3, gt=0)
    length: int = Field(8192, ge=1)
    repeats: int = Field(3, ge=1)

    def trials_of(self, raw: Raw) -> dict[str, int] | None:
        """By label."""
        return {"enter": self.repeats}

    async def measure(self, target: Target) -> Raw:
        """The last stream of a trial is the one that enters."""
        length = min(self.length, target.endpoint.positions - 1)
        trials: list[Trial] = []
        for _ in range(self.repeats):
            trials += await target.calm.measured(partial(self._trial, target, length))
        return Raw(trials=tuple(trials))

    async def _trial(self, target: Target, length: int) -> Trial:
        endpoint, prompts = target.endpoint, target.prompts
        short = min(64, endpoint.positions // 2)
        room = endpoint.positions - short
        asks = [endpoint.completion(await prompts.exactly(short), room, ignore_eos=True) for _ in range(self.running)]
        long = endpoint.completion(await prompts.exactly(length), 1)
        await endpoint.idle()
        before, mark = await endpoint.counters(), target.meter.mark()
        due = [0.0] * self.running + [self.seconds]
        running = Running(endpoint, [Timed(at, ask) for at, ask in zip(due, [*asks, long], strict=True)])
        deadline = running.start + self.seconds + 600
        while not running.recorders[-1].at and not running.recorders[-1].error and time.perf_counter() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # the running streams' first gap after it
        running.cut()
        streams = await running.streams()
        await endpoint.idle()
        counters = growth(before, await endpoint.counters())
        foreign = target.meter.foreign_cpus(mark)
        return Trial(label="enter", streams=streams, want=length, counters=counters, foreign_cpus=foreign)

    def cells(self, raw: Raw) -> list[Cell]:
        """The p99 gap of the running streams before the prompt enters, and from then to its first token."""
        reason = of_first([self._invalid(trial) for trial in raw.trials])
        calm, during = [], []
        for trial in raw.trials if reason is None else ():
            *others, entered = trial.streams
            began = max(stream.arrivals[0] for stream in others)
            calm.append(1e3 * percentile(gaps_within(others, began, entered.due), 0.99))
            during.append(1e3 * percentile(gaps_within(others, entered.due, entered.arrivals[0]), 0.99))
        return [
            figure("fairness.gap_p99_before", "ms", "lower", calm, reason),
            figure("fairness.gap_p99_during", "ms", "lower", during, reason),
        ]

    def _invalid(self, trial: Trial) -> str | None:
        fault = first_fault(trial.streams)
        if fault is not None:
            return fault
        *others, entered = trial.streams
        if any(not stream.cut for stream in others):
            return "a running stream ended before the long prompt was in"
        if max(stream.arrivals[0] for stream in others) >= entered.due:
            return f"the running streams had not begun after {self.seconds:g} s"
        return None if entered.prompt_tokens == trial.want else "the long prompt has not the length that was meant"
