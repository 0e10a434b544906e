"""What a log of the engine's steps (step_log.py) says of a prompt that entered, and of those that ran beside it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """seconds: from its begin, or from the end of the one before where that is later. tokens: by request."""

    begin: float
    end: float
    seconds: float
    tokens: dict[str, int]

    def of(self, name: str) -> int:
        """Tokens of the request whose id has `name` in it."""
        return sum(count for request, count in self.tokens.items() if name in request)


def read(log: Path, offset: int) -> list[Step]:
    """The steps written behind `offset` bytes."""
    with log.open("rb") as file:
        file.seek(offset)
        lines = [json.loads(line) for line in file.read().decode().splitlines()]
    found: list[Step] = []
    for line in lines:
        begin = max(line["begin"], found[-1].end) if found else line["begin"]
        found.append(Step(line["begin"], line["end"], line["end"] - begin, line["tokens"]))
    return found


def entering(steps: Sequence[Step], prompt: str) -> list[Step]:
    """From the first step that holds a part of the prompt to the last; generated tokens are no part."""
    held = [at for at, step in enumerate(steps) if step.of(prompt)]
    return list(steps[held[0] : held[-1] + 1]) if held else []


def gaps(steps: Sequence[Step], within: Sequence[Step], streams: str) -> list[float]:
    """Seconds between tokens of each running stream as they leave the engine, where the later one is of `within`."""
    wanted, found, last = {step.end for step in within}, [], {}
    for step in steps:
        for request in (name for name in step.tokens if streams in name):
            if step.end in wanted and request in last:
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
