"""Exactly scored evaluation sets over the API, and the same for many minutes while memory and handles are watched."""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import aiohttp
from pydantic import Field

from moetier_bench.eval import EvalError
from moetier_bench.eval.ask import Server, evaluate
from moetier_bench.eval.items import Item, Text, load_set
from moetier_bench.eval.report import Report
from moetier_bench.eval.report import Result as Answer
from moetier_bench.meter import Footprint
from moetier_bench.probes.base import Probe, Raw, Target, Tasks, growth, of_first
from moetier_bench.samples import Cell, Trial, figure

_ERROR = re.compile(r"status=([45][\dx]+)")
OTHERS = 0.25
"""CPUs of others from which on the energy of whole devices and packages is not said to be the server's."""
TASKS = ("arithmetic", "copy", "json", "toolcalls", "needle", "heldout_text")


class Quality(Probe):
    """Evaluation sets at temperature 0. limit: the first items of each set; None: all."""

    probe: Literal["quality"] = "quality"
    tasks: Tasks = TASKS
    limit: int | None = Field(None, ge=1)
    concurrency: int = Field(8, ge=1)
    max_tokens: int = Field(256, ge=1)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of an answer."""
        return self.max_tokens

    async def measure(self, target: Target) -> Raw:
        """Return what answered is not kept, only whether it was right and how long it was."""
        items, skipped = _load(target.sets, self.tasks, self.limit)
        server = Server(f"{target.url}/v1", target.endpoint.model, target.api_key, self.max_tokens, retries=0)
        # One text at a time: the server's logits of a whole text take far more memory than those of an answer.
        texts = [item for item in items if isinstance(item, Text)]
        asked = [item for item in items if isinstance(item, Item)]
        answers: list[Answer] = []
        try:
            answers += await asyncio.to_thread(evaluate, server, asked, self.concurrency)
            answers += await asyncio.to_thread(evaluate, server, texts, 1)
        except EvalError as error:
            skipped |= {task: str(error) for task in self.tasks if task not in skipped}
            answers = []
        return Raw(answers=tuple(replace(answer, answer=None) for answer in answers), skipped=skipped)

    def cells(self, raw: Raw) -> list[Cell]:
        """Per set the share that is right, the median length of an answer, truncations; of texts the loss."""
        report = Report({}, raw.answers)
        scores = {score.task: score for score in report.scores()}
        losses = {loss.task: loss for loss in report.losses()}
        cells = []
        for task in self.tasks:
            if task in losses:
                cells.append(figure(f"quality.{task}", "nats/token", "lower", [losses[task].loss]))
                continue
            asked = [a for a in raw.answers if a.task == task and not a.skipped]
            reason = raw.skipped.get(task) or (None if asked else "no item fits the model's positions")
            share = [scores[task].all.correct / len(asked)] if asked else []
            lengths = [statistics.median(answer.tokens for answer in asked)] if asked else []
            cut = [sum(answer.finish_reason == "length" for answer in asked)]
            cells += [
                figure(f"quality.{task}", "share", "higher", share, reason),
                figure(f"quality.{task}.tokens", "tokens", None, lengths, reason),
                figure(f"quality.{task}.truncated", "answers", "lower", cut, reason),
            ]
        return cells


class Soak(Probe):
    """Traffic for minutes: the sets again and again, footprint every `every` seconds.

    per_second: requests, on average; None: as many as are answered.
    """

    probe: Literal["soak"] = "soak"
    minutes: float = Field(20, gt=0)
    concurrency: int = Field(8, ge=1)
    per_second: float | None = Field(None, gt=0)
    tasks: Tasks = TASKS[:4]
    every: float = Field(10, gt=0)
    max_tokens: int = Field(256, ge=1)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of an answer."""
        return self.max_tokens

    async def measure(self, target: Target) -> Raw:
        """Rounds over all items until the time is over; a failed request ends it, and is the reason."""
        items, skipped = _load(target.sets, self.tasks, None)
        if not items:
            return Raw(skipped={"soak": "; ".join(skipped.values())})
        server = Server(f"{target.url}/v1", target.endpoint.model, target.api_key, self.max_tokens, retries=0)
        answers: list[Answer] = []
        footprints: list[Footprint] = []
        before, mark = await target.endpoint.counters(), target.meter.mark()
        rounds = asyncio.create_task(self._rounds(server, items, answers, target.deadline))
        while not rounds.done():
            footprint = target.meter.footprint()
            footprints += [footprint] if footprint else []
            await asyncio.wait({rounds}, timeout=self.every)
        traffic = Trial(
            label="soak",
            streams=(),
            foreign_cpus=target.meter.foreign_cpus(mark),
            joules=target.meter.joules(mark),
            seconds=round(time.perf_counter() - mark.at, 3),
            counters=growth(before, await self._counters(target)),
        )
        wrong = rounds.exception() or failures(traffic.counters)
        kept = tuple(replace(answer, answer=None) for answer in answers)
        return Raw(
            trials=(traffic,),
            answers=kept,
            footprints=tuple(footprints),
            skipped={"soak": str(wrong)} if wrong is not None else {},
        )

    async def _counters(self, target: Target) -> dict[str, float]:
        """The server's, none where it is gone."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            return await target.endpoint.counters()
        return {}

    async def _rounds(self, server: Server, items: list[Item | Text], answers: list[Answer], deadline: float) -> None:
        """Append what `evaluate` answers, a batch at a time, until the time is over."""
        began, batch = time.monotonic(), 4 * self.concurrency
        while time.monotonic() < min(began + 60 * self.minutes, deadline):
            chosen = [items[(len(answers) + n) % len(items)] for n in range(batch)]
            answers += await asyncio.to_thread(evaluate, server, chosen, self.concurrency)
            if self.per_second is not None:
                await asyncio.sleep(max(0.0, began + len(answers) / self.per_second - time.monotonic()))

    def cells(self, raw: Raw) -> list[Cell]:
        """Requests, tokens a second, share of right ones in the first and the last third, growth of what is held."""
        reason = raw.skipped.get("soak")
        tokens = [t.counters.get("vllm:generation_tokens_total", 0.0) for t in raw.trials]
        rates = [made / t.seconds for t, made in zip(raw.trials, tokens, strict=True)]
        energy = [(t.joules or 0) / max(1.0, made) for t, made in zip(raw.trials, tokens, strict=True)]
        unread = of_first([_not_its_own(trial) for trial in raw.trials])
        third = max(1, len(raw.answers) // 3)
        first, last = (_share(part) for part in (raw.answers[:third], raw.answers[-third:]))
        settled = raw.footprints[len(raw.footprints) // 4 :]
        short = None if len(settled) >= 4 else "fewer than four readings of the footprint after the first quarter"
        grown = [settled[-1].rss_mib - settled[0].rss_mib] if settled else []
        handles = [settled[-1].handles - settled[0].handles] if settled else []
        return [
            figure("soak.requests", "requests", None, [len(raw.answers)], reason),
            figure("soak.throughput", "tok/s", "higher" if self.per_second is None else None, rates, reason),
            figure("soak.energy", "J/token", "lower", energy, reason or unread),
            figure("soak.right_first_third", "share", "higher", first, reason),
            figure("soak.right_last_third", "share", "higher", last, reason),
            figure("soak.rss_growth", "MiB", "lower", grown, reason or short),
            figure("soak.handle_growth", "handles", "lower", handles, reason or short),
            *self._cut_short(raw),
        ]

    def _cut_short(self, raw: Raw) -> list[Cell]:
        """How long it was, where it was not as long as it should be."""
        if not raw.footprints:
            return []
        seconds = raw.footprints[-1].at - raw.footprints[0].at
        if seconds + 2 * self.every >= 60 * self.minutes:
            return []
        return [figure("soak.minutes", "min", None, [seconds / 60])]


def _not_its_own(trial: Trial) -> str | None:
    """Why a trial's energy is not the server's."""
    if trial.joules is None:
        return "no energy counter can be read"
    return f"others used {trial.foreign_cpus:g} CPUs meanwhile" if (trial.foreign_cpus or 0) > OTHERS else None


def failures(counters: dict[str, float]) -> str | None:
    """Answers with an error's status, by the server's own counters: a client that asks again would hide them."""
    found = {k: n for k, n in counters.items() if k.startswith("http_requests_total") and _ERROR.search(k)}
    named = ", ".join(f"{n:.0f} of {_ERROR.findall(name)[0]}" for name, n in found.items())
    return f"the server answered with errors: {named}" if found else None


def _load(folders: Sequence[Path], tasks: Sequence[str], limit: int | None) -> tuple[list[Item | Text], dict[str, str]]:
    """Items of the sets that are here, and of the others why not."""
    items: list[Item | Text] = []
    skipped = {}
    for task in tasks:
        path = next((path for folder in folders if (path := folder / f"{task}.jsonl").is_file()), None)
        if path is None:
            skipped[task] = f"the set {task} is not here"
        else:
            items += load_set(path)[:limit]
    return items, skipped


def _share(answers: Sequence[Answer]) -> list[float]:
    return [sum(answer.correct for answer in answers) / len(answers)] if answers else []
