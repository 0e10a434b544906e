"""Samples of a measurement (streams, trials, cells) and the arithmetic on them: figures recompute from the streams."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

NO_SAMPLE = "no sample"


class Frozen(BaseModel):
    """A value: strict about its keys, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Stream(Frozen):
    """One streamed answer as the client saw it. Times are seconds since the trial's start.

    due: when it should have been sent; latencies count from here, so that a client that falls behind cannot hide it.
    gaps_us: from `sent` to the first arrival, then from arrival to arrival. An arrival brought at least one token, of
    whatever kind: reasoning, content or part of a tool call.
    tokens: how many each arrival brought, by the server's running usage; None where it gives none.
    cut: we closed it, it did not end by itself. cached_tokens: of the prompt, as the answer's usage says.
    """

    due: float
    sent: float
    end: float
    status: int | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    cut: bool = False
    gaps_us: tuple[int, ...] = ()
    tokens: tuple[int, ...] | None = None
    digest: str | None = None

    @property
    def arrivals(self) -> list[float]:
        """Seconds since the trial's start."""
        return [self.sent + at / 1e6 for at in accumulate(self.gaps_us)]

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to the first token of any kind."""
        return self.arrivals[0] - self.due

    @property
    def truncated(self) -> bool:
        """Whether it ended at the limit of tokens and not by itself."""
        return self.finish == "length"

    def fault(self) -> str | None:
        """Why it is no measurement, if it is none."""
        if self.error is not None:
            return self.error
        if self.status != 200:
            return f"HTTP status {self.status}"
        if not self.gaps_us:
            return "no token arrived"
        if not self.cut and self.finish is None:
            return "the stream broke off: no finish reason"
        if not self.cut and self.completion_tokens is None:
            return "the server gives no usage"
        if self.tokens is not None and not self.cut and sum(self.tokens) != self.completion_tokens:
            return f"running usage counts {sum(self.tokens)} tokens, the final usage {self.completion_tokens}"
        return None


class Trial(Frozen):
    """Streams measured together. counters: what the server's own counters grew by meanwhile.

    label: the cell it belongs to. want: what was asked for, such as the exact tokens of a prompt.
    """

    label: str
    streams: tuple[Stream, ...]
    want: int | None = None
    seconds: float = 0.0
    counters: dict[str, float] = Field(default_factory=dict)
    joules: float | None = None
    foreign_cpus: float | None = None
    """CPUs that processes other than the server and the client used, on average."""


class Cell(Frozen):
    """A figure, its samples and whether it is one: `value` is None exactly where `reason` says why."""

    name: str
    unit: str
    better: str | None = None
    """higher, lower, or None where neither is."""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    samples: tuple[float, ...] = ()
    reason: str | None = None

    @model_validator(mode="after")
    def _null_has_a_reason(self) -> Cell:
        if (self.value is None) != (self.reason is not None):
            raise ValueError(f"cell {self.name}: a value or a reason, not both and not neither")
        return self


def figure(name: str, unit: str, better: str | None, samples: Sequence[float], reason: str | None = None) -> Cell:
    """Cell of the samples' median and range, rounded to 6 significant digits; a reason makes it null."""
    if reason is None and not samples:
        reason = NO_SAMPLE
    if reason is not None:
        return Cell(name=name, unit=unit, better=better, reason=reason)
    rounded = tuple(significant(sample) for sample in samples)
    value = significant(statistics.median(rounded))
    return Cell(name=name, unit=unit, better=better, value=value, low=min(rounded), high=max(rounded), samples=rounded)


def significant(value: float, digits: int = 6) -> float:
    """`value` with so many significant digits."""
    return float(f"{value:.{digits}g}")


def first_fault(streams: Iterable[Stream]) -> str | None:
    """Reason of the first stream that is no measurement, with how many there are."""
    faults = [fault for fault in (stream.fault() for stream in streams) if fault is not None]
    return f"{len(faults)} of the requests failed, the first: {faults[0]}" if faults else None


def tokens_until(stream: Stream, at: float) -> float:
    """Tokens that had arrived at a time, those of a chunk spread evenly over the gap before it.

    Before the first arrival none, after the last one all: a stall counts as time without tokens. Needs `tokens`.
    """
    assert stream.tokens is not None
    total, before = 0.0, None
    for arrival, tokens in zip(stream.arrivals, stream.tokens, strict=True):
        if arrival > at:
            share = 0.0 if before is None else (at - before) / (arrival - before)
            return total + tokens * share
        total, before = total + tokens, arrival
    return total


def tokens_per_second(streams: Iterable[Stream], start: float, end: float) -> float:
    """All streams' tokens between two times, over that time."""
    return math.fsum(tokens_until(s, end) - tokens_until(s, start) for s in streams) / (end - start)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies (the nearest of them, upwards)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def plain(value: BaseModel) -> Any:
    """JSON values, without what is at its default."""
    return value.model_dump(mode="json", exclude_defaults=True)
