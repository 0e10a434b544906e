"""What a log of the engine's steps (step_log.py) says of a prompt that entered, and of those that ran beside it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """begin: when it was scheduled. end: when its tokens left the engine. tokens: by request.

    Where vLLM schedules ahead, a step begins before the one before has ended, and the tokens of that one leave only
    when this one has been launched.
    """

    begin: float
    end: float
    tokens: dict[str, int]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def of(self, name: str) -> int:
        """Tokens of the request whose id has `name` in it."""
        return sum(count for request, count in self.tokens.items() if name in request)


def read(log: Path, offset: int) -> list[Step]:
    """The steps written behind `offset` bytes."""
    with log.open("rb") as file:
        file.seek(offset)
        lines = [json.loads(line) for line in file.read().decode().splitlines()]
    return [Step(line["begin"], line["end"], line["tokens"]) for line in lines]


def entering(steps: Sequence[Step], prompt: str) -> list[Step]:
    """From the first step that holds a part of the prompt to the last; generated tokens are no part."""
    held = [at for at, step in enumerate(steps) if step.of(prompt)]
    return list(steps[held[0] : held[-1] + 1]) if held else []


def gaps(steps: Sequence[Step], within: Sequence[Step], streams: str) -> list[float]:
    """Seconds between tokens of each running stream as they leave the engine, of all gaps that some time between the
    begin of `within` and its end is in: not only those that a step of `within` ends.
    """
    found: list[float] = []
    last: dict[str, float] = {}
    for step in steps:
        for request in (name for name in step.tokens if streams in name):
            if within and request in last and step.end > within[0].begin and last[request] < within[-1].end:
                found.append(step.end - last[request])
            last[request] = step.end
    return found


def most_between(steps: Sequence[Step], prompt: str, streams: str) -> int:
    """Steps with a part of the prompt between two tokens of a stream, at most."""
    chunks = list(itertools.accumulate(int(step.of(prompt) > 0) for step in steps))
    most, last = 0, {}
    for step, held in zip(steps, chunks, strict=True):
        for request in (name for name in step.tokens if streams in name):
            most = max(most, held - last.get(request, held))
            last[request] = held
    return most
