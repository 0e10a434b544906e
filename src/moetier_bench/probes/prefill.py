"""Time to the first token of prompts of exact length, each proved to be computed whole; decode behind a context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from moetier_bench.probes.base import Counts, Probe, Raw, Target, cold, not_cold, of_first
from moetier_bench.samples import Cell, Trial, figure, first_fault


class Prefill(Probe):
    """TTFT and tokens a second of prefill, by the prompt's length."""

    probe: Literal["prefill"] = "prefill"
    lengths: Counts = (2048, 8192, 65536)
    repeats: int = Field(5, ge=1)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of an answer."""
        return 1

    def trials_of(self, raw: Raw) -> dict[str, int] | None:
        """By label."""
        return {str(length): self.repeats for length in self.lengths if str(length) not in raw.skipped}

    async def measure(self, target: Target) -> Raw:
        """One dropped prompt of each length first."""
        trials: list[Trial] = []
        skipped = {}
        for length in self.lengths:
            if length + 1 > target.endpoint.positions:
                skipped[str(length)] = _too_long(length + 1, target)
                continue
            await cold(target, length, 1)
            for _ in range(self.repeats):
                trials += await cold(target, length, 1)
        return Raw(trials=tuple(trials), skipped=skipped)

    def cells(self, raw: Raw) -> list[Cell]:
        """Per length: ttft and prefill."""
        return [cell for length in self.lengths for cell in self._of(length, raw)]

    def _of(self, length: int, raw: Raw) -> list[Cell]:
        trials = raw.labelled(str(length))
        reason = raw.skipped.get(str(length)) or of_first([invalid(trial, length) for trial in trials])
        ttft = [] if reason else [trial.streams[0].ttft for trial in trials]
        return [
            figure(f"ttft.{length}", "s", "lower", ttft, reason),
            figure(f"prefill.{length}", "tok/s", "higher", [length / seconds for seconds in ttft], reason),
        ]


class Growth(Probe):
    """Decode of one stream behind a growing context, `tokens` at each length."""

    probe: Literal["growth"] = "growth"
    lengths: Counts = (128, 2048, 8192, 32768)
    tokens: int = Field(128, ge=8)
    repeats: int = Field(3, ge=1)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of an answer."""
        return self.tokens

    def trials_of(self, raw: Raw) -> dict[str, int] | None:
        """By label."""
        return {str(length): self.repeats for length in self.lengths if str(length) not in raw.skipped}

    async def measure(self, target: Target) -> Raw:
        """Each context is a new one."""
        trials: list[Trial] = []
        skipped = {}
        for length in self.lengths:
            if length + self.tokens > target.endpoint.positions:
                skipped[str(length)] = _too_long(length + self.tokens, target)
                continue
            for _ in range(self.repeats):
                trials += await cold(target, length, self.tokens, ignore_eos=True)
        return Raw(trials=tuple(trials), skipped=skipped)

    def cells(self, raw: Raw) -> list[Cell]:
        """Tokens a second after the first, by length."""
        found = []
        for length in self.lengths:
            trials = raw.labelled(str(length))
            reason = raw.skipped.get(str(length)) or of_first([self._invalid(trial, length) for trial in trials])
            rates = [] if reason else [after_first([trial]) for trial in trials]
            found.append(figure(f"growth.{length}", "tok/s", "higher", rates, reason))
        return found

    def _invalid(self, trial: Trial, length: int) -> str | None:
        stream = trial.streams[0]
        if first_fault(trial.streams) is None and stream.completion_tokens != self.tokens:
            return f"expected {self.tokens} tokens, found {stream.completion_tokens}"
        return invalid(trial, length) or (None if stream.tokens else "the server gives no running usage")


def after_first(trials: Sequence[Trial]) -> float:
    """Tokens a second of single streams together, each from its first arrival to its last; 0 if all came at once."""
    tokens, seconds = 0, 0.0
    for trial in trials:
        (stream,) = trial.streams
        assert stream.tokens is not None
        arrivals = stream.arrivals
        tokens, seconds = tokens + sum(stream.tokens[1:]), seconds + arrivals[-1] - arrivals[0]
    return tokens / seconds if seconds > 0 else 0.0


def invalid(trial: Trial, length: int) -> str | None:
    """Why a trial of one cold prompt of exactly `length` tokens is none."""
    if len(trial.streams) != 1 or trial.want != length:
        return f"expected one prompt of {length} tokens"
    return first_fault(trial.streams) or not_cold(trial)


def _too_long(needed: int, target: Target) -> str:
    return f"needs {needed} positions, the server has {target.endpoint.positions}"
