"""A probe: parameters that can be written in a suite, a measurement, and the pure way from it to cells."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field

from moetier_bench.client import Recorder
from moetier_bench.corpus import Prompts
from moetier_bench.endpoint import Ask, Endpoint, growth
from moetier_bench.eval.report import Result as Answer
from moetier_bench.meter import Footprint, Meter
from moetier_bench.samples import Cell, Frozen, Stream, Trial

Named = TypeVar("Named", int, str)


def _each_once(values: tuple[Named, ...]) -> tuple[Named, ...]:
    twice = [str(value) for value in dict.fromkeys(values) if values.count(value) > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)} is named more than once; each gives one cell")
    return values


Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), AfterValidator(_each_once)]
"""Counts of streams or tokens: at least one, each once, since each names a cell."""
Tasks = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_each_once)]
"""Names of evaluation sets."""


class Raw(Frozen):
    """Measurement of a probe. skipped: by the cell's name, why a part was not measured."""

    trials: tuple[Trial, ...] = ()
    answers: tuple[Answer, ...] = ()
    footprints: tuple[Footprint, ...] = ()
    skipped: dict[str, str] = Field(default_factory=dict)

    def labelled(self, label: str) -> list[Trial]:
        """Trials of one label."""
        return [trial for trial in self.trials if trial.label == label]


@dataclass
class Calm:
    """Trials that others disturb are measured again. limit: CPUs of others that are let pass (None: any); left: how
    often more, in one probe. What was disturbed stays in the record, and no figure comes from it.
    """

    limit: float | None = None
    left: int = 10

    async def measured(self, measure: Callable[[], Awaitable[Trial]]) -> list[Trial]:
        """A trial, after those that were disturbed."""
        trials = [await measure()]
        while not undisturbed(trials[-1], self.limit) and self.left > 0:
            self.left -= 1
            trials.append(await measure())
        return trials


def undisturbed(trial: Trial, limit: float | None) -> bool:
    """Whether others left the machine alone during a trial, as far as is known."""
    return limit is None or trial.foreign_cpus is None or trial.foreign_cpus <= limit


@dataclass(frozen=True)
class Target:
    """Target of a measurement: a server, the prompts for it, the meter beside it. sets: folders of evaluation sets.

    deadline: by time.monotonic(), when a probe of minutes ends although its time is not over. calm: of this probe.
    """

    endpoint: Endpoint
    prompts: Prompts
    meter: Meter
    url: str
    api_key: str | None = None
    sets: tuple[Path, ...] = ()
    deadline: float = math.inf
    calm: Calm = field(default_factory=Calm)


class Probe(Frozen):
    """Base of all probes."""

    @property
    def most_tokens(self) -> int | None:
        """That one answer is asked to have; None where that depends on the model's positions."""
        return None

    def trials_of(self, raw: Raw) -> dict[str, int] | None:
        """How many trials each label has, those that were disturbed left out; None where it has none of its own."""
        return None

    async def measure(self, target: Target) -> Raw:
        """Measure; what the server does wrong is in the result, not raised."""
        raise NotImplementedError

    def cells(self, raw: Raw) -> list[Cell]:
        """The figures, from nothing but the parameters and what was measured."""
        raise NotImplementedError


@dataclass(frozen=True)
class Timed:
    """A request and when it is due, in seconds from the trial's start."""

    due: float
    ask: Ask


class Running:
    """Requests of one trial under way."""

    def __init__(self, endpoint: Endpoint, requests: Sequence[Timed]) -> None:
        """Start their clock; each is sent when it is due."""
        self.start = time.perf_counter()
        self.recorders = [Recorder(self.start + request.due) for request in requests]
        pairs = zip(requests, self.recorders, strict=True)
        self._tasks = [asyncio.create_task(self._one(endpoint, request, recorder)) for request, recorder in pairs]

    async def _one(self, endpoint: Endpoint, request: Timed, recorder: Recorder) -> Stream:
        await asyncio.sleep(max(0.0, recorder.due - time.perf_counter()))
        return await endpoint.stream(request.ask, self.start, recorder)

    @property
    def any_ended(self) -> bool:
        """Whether one has ended, well or not."""
        return any(task.done() for task in self._tasks)

    def cut(self) -> None:
        """Close what still runs."""
        for recorder in self.recorders:
            recorder.cut.set()

    async def streams(self) -> tuple[Stream, ...]:
        """All streams, when all have ended."""
        try:
            return tuple(await asyncio.gather(*self._tasks))
        finally:
            for task in self._tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*self._tasks, return_exceptions=True)


async def trial(target: Target, label: str, requests: Sequence[Timed], want: int | None = None) -> Trial:
    """Send requests when they are due and wait for all; with the server's counters and the meter around them."""
    endpoint, meter = target.endpoint, target.meter
    await endpoint.idle()
    before, mark = await endpoint.counters(), meter.mark()
    running = Running(endpoint, requests)
    streams = await running.streams()
    foreign, joules = meter.foreign_cpus(mark), meter.joules(mark)
    seconds = round(time.perf_counter() - running.start, 6)
    counters = await endpoint.counters_after(before, sum(stream.prompt_tokens or 0 for stream in streams))
    return Trial(
        label=label,
        streams=streams,
        want=want,
        seconds=seconds,
        counters=counters,
        joules=joules,
        foreign_cpus=foreign,
    )


async def one(target: Target, label: str, ask: Ask, want: int | None = None) -> Trial:
    """A trial of a single request."""
    return await trial(target, label, [Timed(0.0, ask)], want)


async def cold(target: Target, length: int, max_tokens: int, **more: Any) -> list[Trial]:
    """A trial of one new prompt of exactly so many tokens, after those that were disturbed."""

    async def measure() -> Trial:
        ask = target.endpoint.completion(await target.prompts.exactly(length), max_tokens, **more)
        return await one(target, str(length), ask, want=length)

    return await target.calm.measured(measure)


def not_cold(trial: Trial) -> str | None:
    """Why a trial's prompts are not proved to have been computed whole, by the server's own counters."""
    asked = sum(stream.prompt_tokens or 0 for stream in trial.streams)
    if trial.want is not None and asked != trial.want:
        return f"{trial.want} prompt tokens were meant, the server counted {asked}"
    computed = trial.counters.get("vllm:prompt_tokens_by_source_total{source=local_compute}")
    hits = trial.counters.get("vllm:prefix_cache_hits_total", 0.0)
    counted = trial.counters.get("vllm:prompt_tokens_total")
    if counted is None:
        return "not proved cold: the server has no counters of prompt tokens"
    if counted != asked:
        return f"the server counted {counted:.0f} prompt tokens, we sent {asked}: someone else uses it"
    if hits or (computed is not None and computed != asked):
        return f"not cold: the server took {hits or asked - (computed or 0):.0f} tokens from its prefix cache"
    return None


def of_first(reasons: Sequence[str | None]) -> str | None:
    """The first reason there is."""
    return next((reason for reason in reasons if reason is not None), None)


__all__ = [
    "Calm",
    "Counts",
    "Probe",
    "Raw",
    "Running",
    "Target",
    "Tasks",
    "Timed",
    "cold",
    "growth",
    "not_cold",
    "of_first",
    "one",
    "trial",
]
