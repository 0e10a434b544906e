"""Sustained decode: so many streams at once, each past its first token, none at its end, counted by usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

from pydantic import Field

from moetier_bench.probes.base import Counts, Probe, Raw, Running, Target, Timed, growth, of_first
from moetier_bench.samples import Cell, Stream, Trial, figure, first_fault, percentile, tokens_per_second

STALL_SECONDS = 10.0
"""How long after the window a stream's next token is waited for. Without one, it counts as stalled in the window."""


class Decode(Probe):
    """Throughput by concurrency. seconds: of the window, which begins warmup_seconds after the last first token."""

    probe: Literal["decode"] = "decode"
    levels: Counts = (1, 2, 4, 8, 16, 32)
    repeats: int = Field(5, ge=1)
    seconds: float = Field(10, gt=0)
    warmup_seconds: float = Field(1, ge=0)
    stagger_seconds: float = Field(0.02, ge=0)
    prompt_tokens: int = Field(64, ge=1)

    def trials_of(self, raw: Raw) -> dict[str, int] | None:
        """By label."""
        return {f"C{level}": self.repeats for level in self.levels}

    async def measure(self, target: Target) -> Raw:
        """One dropped trial first: it warms what the server compiles or reads at first use."""
        await self._trial(target, self.levels[0])
        trials: list[Trial] = []
        for level in self.levels:
            for _ in range(self.repeats):
                trials += await target.calm.measured(partial(self._trial, target, level))
        return Raw(trials=tuple(trials))

    async def _trial(self, target: Target, level: int) -> Trial:
        endpoint = target.endpoint
        length = min(self.prompt_tokens, endpoint.positions - 1)
        room = endpoint.positions - length
        asks = [endpoint.completion(await target.prompts.exactly(length), room, ignore_eos=True) for _ in range(level)]
        await endpoint.idle()
        before, mark = await endpoint.counters(), target.meter.mark()
        running = Running(endpoint, [Timed(i * self.stagger_seconds, ask) for i, ask in enumerate(asks)])
        await self._until_over(running)
        foreign, joules = target.meter.foreign_cpus(mark), target.meter.joules(mark)
        running.cut()
        streams = await running.streams()
        await endpoint.idle()
        return Trial(
            label=f"C{level}",
            streams=streams,
            want=level,
            seconds=round(time.perf_counter() - running.start, 6),
            counters=growth(before, await endpoint.counters()),
            joules=joules,
            foreign_cpus=foreign,
        )

    async def _until_over(self, running: Running) -> None:
        """Until every stream has an arrival after the window's end, or one has ended, or stalls."""
        while not all(recorder.at for recorder in running.recorders):
            if running.any_ended:
                return
            await asyncio.sleep(0.005)
        end = max(recorder.at[0] for recorder in running.recorders) + self.warmup_seconds + self.seconds
        while not running.any_ended and time.perf_counter() < end + STALL_SECONDS:
            now = time.perf_counter()
            if now > end and all(recorder.at[-1] >= end for recorder in running.recorders):
                return
            await asyncio.sleep(max(0.005, min(end - now, 0.1)))

    def window(self, streams: Sequence[Stream]) -> tuple[float, float] | str:
        """Begin and end of the measured time, or why there is none."""
        fault = first_fault(streams)
        if fault is not None:
            return fault
        if any(stream.tokens is None for stream in streams):
            return "the server gives no running usage: how many tokens a chunk holds is not known"
        begin = max(stream.arrivals[0] for stream in streams) + self.warmup_seconds
        end = begin + self.seconds
        early = [stream for stream in streams if not stream.cut and stream.arrivals[-1] < end]
        if early:
            return (
                f"{len(early)} of {len(streams)} streams ended before the window of {self.seconds:g} s did: "
                "shorten it, or give the model more positions"
            )
        return begin, end

    def cells(self, raw: Raw) -> list[Cell]:
        """Per level: tokens a second, the p99 gap between a stream's arrivals, joules a token."""
        return [cell for level in self.levels for cell in self._of(level, raw.labelled(f"C{level}"))]

    def _of(self, level: int, trials: list[Trial]) -> list[Cell]:
        windows = [self.window(trial.streams) for trial in trials]
        reason = of_first([window if isinstance(window, str) else None for window in windows])
        reason = reason or of_first([_wrong_level(trial, level) for trial in trials])
        rates, gaps = [], []
        for trial, window in zip(trials, windows, strict=True):
            if not isinstance(window, str) and reason is None:
                rates.append(tokens_per_second(trial.streams, *window))
                gaps.append(1e3 * percentile(gaps_within(trial.streams, *window), 0.99))
        unread = of_first(["no energy counter can be read" if trial.joules is None else None for trial in trials])
        energy = [(trial.joules or 0) / max(1, sum(sum(s.tokens or ()) for s in trial.streams)) for trial in trials]
        return [
            figure(f"decode.C{level}", "tok/s", "higher", rates, reason),
            figure(f"decode.C{level}.gap_p99", "ms", "lower", gaps, reason),
            figure(f"decode.C{level}.energy", "J/token", "lower", energy, reason or unread),
        ]


def _wrong_level(trial: Trial, level: int) -> str | None:
    if len(trial.streams) != level or trial.want != level:
        return f"expected {level} streams, found {len(trial.streams)}"
    return None


def gaps_within(streams: Sequence[Stream], begin: float, end: float) -> list[float]:
    """Seconds between a stream's arrivals, for the gaps that reach into the window. A stall is a gap to its end."""
    found = []
    for stream in streams:
        for before, after in pairwise((*stream.arrivals, max(end, stream.arrivals[-1]))):
            if after > begin and before < end and after > before:
                found.append(after - before)
    return found
