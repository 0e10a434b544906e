"""Answers that end by themselves: coding questions one at a time, and mixed long prompts as they come in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Literal

from pydantic import Field

from moetier_bench.corpus import AROUND, CODING, conversation
from moetier_bench.endpoint import Ask
from moetier_bench.probes.base import Probe, Raw, Target, Timed, of_first, one, trial
from moetier_bench.probes.prefill import after_first
from moetier_bench.samples import NO_SAMPLE, Cell, Stream, Trial, figure, first_fault, percentile

ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total{position="
DRAFTS = "vllm:spec_decode_num_drafts_total"


class Coding(Probe):
    """Coding questions at C1, each asked `repeats` times."""

    probe: Literal["coding"] = "coding"
    max_tokens: int = Field(1024, ge=16)
    repeats: int = Field(2, ge=1)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of an answer."""
        return self.max_tokens

    def trials_of(self, raw: Raw) -> dict[str, int] | None:
        """By label."""
        return {f"q{number}": self.repeats for number in range(len(CODING))}

    async def measure(self, target: Target) -> Raw:
        """Ask each in turn."""
        limit = min(self.max_tokens, target.endpoint.positions - 128)
        trials: list[Trial] = []
        for _ in range(self.repeats):
            for number, text in enumerate(CODING):
                ask = target.endpoint.chat(text, limit)
                trials += await target.calm.measured(partial(one, target, f"q{number}", ask))
        return Raw(trials=tuple(trials))

    def cells(self, raw: Raw) -> list[Cell]:
        """Speed of each round, TTFT, truncations, whether the same question is answered alike, drafts accepted."""
        trials = list(raw.trials)
        fault = of_first([first_fault(trial.streams) for trial in trials])
        uncounted = of_first(["the server gives no running usage" if not t.streams[0].tokens else None for t in trials])
        speed = fault or uncounted
        rounds = list(zip(*(raw.labelled(label) for label in dict.fromkeys(t.label for t in trials)), strict=False))
        rates = [] if speed else [after_first(asked) for asked in rounds]
        if speed is None and 0 in rates:
            speed = "every answer came in one chunk"
        answers: dict[str, set[str | None]] = {}
        for asked in trials:
            answers.setdefault(asked.label, set()).add(asked.streams[0].digest)
        alike = sum(len(digests) == 1 for digests in answers.values()) / max(1, len(answers))
        none = None if trials else NO_SAMPLE
        once = "each question was asked once" if self.repeats < 2 else None
        return [
            figure("coding.decode", "tok/s", "higher", rates, speed),
            figure("coding.ttft", "s", "lower", [] if fault else [t.streams[0].ttft for t in trials], fault),
            figure("coding.truncated", "answers", None, [sum(t.streams[0].truncated for t in trials)], fault or none),
            figure("coding.same_again", "share", "higher", [alike], fault or none or once),
            *acceptance(trials, fault),
        ]


def acceptance(trials: list[Trial], fault: str | None) -> list[Cell]:
    """Share of drafts whose token at each position was accepted, by the server's counters."""
    drafts = sum(trial.counters.get(DRAFTS, 0.0) for trial in trials)
    positions = sorted({name for trial in trials for name in trial.counters if name.startswith(ACCEPTED)})
    if not drafts or fault is not None:
        no_draft = "the server drafts no tokens" if trials else NO_SAMPLE
        return [figure("spec.acceptance", "share", "higher", [], fault or no_draft)]
    found = []
    for name in positions:
        shares = [
            trial.counters.get(name, 0.0) / trial.counters[DRAFTS] for trial in trials if trial.counters.get(DRAFTS)
        ]
        number = name.removeprefix(ACCEPTED).rstrip("}")
        found.append(figure(f"spec.acceptance.{number}", "share", "higher", shares))
    return found


class Mixed(Probe):
    """Long prompts that arrive at random times whether the server keeps up or not; answers end by themselves.

    ask: question, a conversation about a document, of which an answer that was truncated is none; text, a text to be
    continued (results of older suites have it), whose answers end at max_tokens. shortest, longest: of the document or
    text, in tokens. Latency counts from when a request was due: a client that waits for the server must not hide its
    queue.
    """

    probe: Literal["mixed"] = "mixed"
    ask: Literal["question", "text"] = "text"
    requests: int = Field(24, ge=1)
    per_second: float = Field(2, gt=0)
    shortest: int = Field(128, ge=1)
    longest: int = Field(8192, ge=1)
    max_tokens: int = Field(512, ge=1)
    repeats: int = Field(1, ge=1)
    seed: int = 0

    @property
    def most_tokens(self) -> int | None:
        """Tokens of an answer."""
        return self.max_tokens

    def trials_of(self, raw: Raw) -> dict[str, int] | None:
        """By label."""
        return {} if raw.skipped else {"mixed": self.repeats}

    async def measure(self, target: Target) -> Raw:
        """Times, lengths and questions are drawn from the seed: the same in every trial of every run."""
        around = AROUND if self.ask == "question" else 0
        longest = min(self.longest, target.endpoint.positions - self.max_tokens - around)
        if longest < self.shortest:
            return Raw(skipped={"mixed": f"the server has {target.endpoint.positions} positions"})
        trials: list[Trial] = []
        for _ in range(self.repeats):
            trials += await target.calm.measured(partial(self._trial, target, longest))
        return Raw(trials=tuple(trials))

    async def _trial(self, target: Target, longest: int) -> Trial:
        draw = random.Random(self.seed)  # noqa: S311 (no secret)
        at, requests = 0.0, []
        for _ in range(self.requests):
            length = round(self.shortest * (longest / self.shortest) ** draw.random())
            requests.append(Timed(at, await self._asked(target, length, draw)))
            at += draw.expovariate(self.per_second)
        return await trial(target, "mixed", requests)

    async def _asked(self, target: Target, length: int, draw: random.Random) -> Ask:
        tokens = await target.prompts.exactly(length)
        if self.ask == "text":
            return target.endpoint.completion(tokens, self.max_tokens)
        document = await target.endpoint.text(tokens)
        return target.endpoint.chat(conversation(document, draw), self.max_tokens)

    def cells(self, raw: Raw) -> list[Cell]:
        """TTFT and whole latency from when due, tokens over the whole time, truncations, HTTP errors."""
        streams = [stream for trial in raw.trials for stream in trial.streams]
        none = raw.skipped.get("mixed") or (None if streams else NO_SAMPLE)
        fault = none or first_fault(streams)
        reason = fault or self._did_not_end(streams)
        ttft = [[stream.ttft for stream in trial.streams] for trial in raw.trials if reason is None]
        whole = [stream.end - stream.due for stream in streams if reason is None]
        failed = sum(stream.fault() is not None for stream in streams)
        return [
            figure("mixed.ttft", "s", "lower", [seconds for found in ttft for seconds in found], reason),
            figure("mixed.ttft_p99", "s", "lower", [percentile(found, 0.99) for found in ttft if found], reason),
            figure("mixed.latency", "s", "lower", whole, reason),
            figure("mixed.throughput", "tok/s", "higher", [_throughput(trial) for trial in raw.trials], reason),
            figure("mixed.truncated", "answers", None, [sum(stream.truncated for stream in streams)], fault),
            figure("mixed.failed", "requests", "lower", [failed], none),
        ]

    def _did_not_end(self, streams: Sequence[Stream]) -> str | None:
        """Why these are not answers that ended by themselves."""
        truncated = sum(stream.truncated for stream in streams)
        if self.ask == "text" or 2 * truncated <= len(streams):
            return None
        return f"{truncated} of {len(streams)} answers were truncated at {self.max_tokens} tokens"


def _throughput(trial: Trial) -> float:
    """Tokens a second from when the first request was due to the last one's end."""
    total = sum(stream.completion_tokens or 0 for stream in trial.streams)
    seconds = max((s.end for s in trial.streams), default=0.0) - min((s.due for s in trial.streams), default=0.0)
    return total / seconds if seconds > 0 else 0.0
