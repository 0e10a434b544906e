"""Results of an evaluation: one result per item, scores per task, and the file that keeps them for pairing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from moetier.errors import StoreError
from moetier.files import read_small, write_output
from moetier_bench.eval import EvalError
from moetier_bench.eval.items import MAX_BYTES

FORMAT = 1


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Result:
    """One item's outcome. skipped: the prompt does not fit the model; it counts nowhere.

    tokens: of the answer; of a text, those that have a likelihood (all but the first).
    """

    task: str
    id: int
    digest: str
    thinking: bool
    skipped: bool = False
    correct: bool = False
    answer: Any = None
    finish_reason: str | None = None
    tokens: int = 0
    seconds: float = 0.0
    nats: float | None = None
    """Nats of a text: minus the log of its likelihood. None: a question."""
    bytes: int = 0
    """Bytes of a text, in UTF-8."""


_RESULTS = TypeAdapter(tuple[Result, ...])


@dataclass(frozen=True)
class Count:
    """So many of so many."""

    correct: int
    items: int

    def __str__(self) -> str:
        return f"{self.correct}/{self.items}"

    @property
    def score(self) -> float:
        """Share of correct items; 0 of none."""
        return round(self.correct / self.items, 4) if self.items else 0.0


@dataclass(frozen=True)
class TaskScore:
    """Scores of one task, and of its items without and with thinking."""

    task: str
    all: Count
    without_thinking: Count
    with_thinking: Count
    skipped: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "score": self.all.score}


@dataclass(frozen=True)
class TextLoss:
    """Likelihood of a set of texts: nats per token, its exponential, and bits per byte of text."""

    task: str
    texts: int
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float
    skipped: int


@dataclass(frozen=True)
class Report:
    """An evaluation. about: what was asked where and how, as plain values."""

    about: dict[str, Any]
    results: tuple[Result, ...] = field(default=())

    def scores(self) -> list[TaskScore]:
        """Per task of questions, in the order in which they were asked."""
        return [_score(task, results) for task, results in self._by_task(text=False).items()]

    def losses(self) -> list[TextLoss]:
        """Per set of texts."""
        return [_loss(task, results) for task, results in self._by_task(text=True).items()]

    def summary(self) -> dict[str, Any]:
        """Scores and losses as plain values."""
        return {
            "tasks": [score.as_dict() for score in self.scores()],
            "texts": [asdict(loss) for loss in self.losses()],
        }

    def _by_task(self, text: bool) -> dict[str, list[Result]]:
        groups: dict[str, list[Result]] = {}
        for result in self.results:
            if (result.nats is not None) == text:
                groups.setdefault(result.task, []).append(result)
        return groups

    def save(self, path: Path) -> None:
        """Write everything as one JSON object."""
        state = {
            "format": FORMAT,
            **self.about,
            **self.summary(),
            "results": [asdict(result) for result in self.results],
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_output(path, json.dumps(state, indent=1) + "\n")
        except OSError as error:
            raise EvalError(f"{path} cannot be written: {error.strerror}; name another file with --out") from error

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a file of `save`; EvalError if it is none."""
        try:
            state = json.loads(read_small(path, MAX_BYTES))
            if state.pop("format") != FORMAT:
                raise ValueError(f"expected format {FORMAT}")
            del state["tasks"], state["texts"]
            results = _RESULTS.validate_python(state.pop("results"))
        except (OSError, StoreError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise EvalError(
                f"{path}: expected a result file, found {type(error).__name__}: {error}; make one with "
                "`moetier eval --out FILE`"
            ) from error
        return cls(state, results)


def _score(task: str, results: list[Result]) -> TaskScore:
    asked = [result for result in results if not result.skipped]
    return TaskScore(
        task,
        _count(asked),
        _count(result for result in asked if not result.thinking),
        _count(result for result in asked if result.thinking),
        len(results) - len(asked),
    )


def _loss(task: str, results: list[Result]) -> TextLoss:
    read = [result for result in results if not result.skipped]
    tokens, size = sum(result.tokens for result in read), sum(result.bytes for result in read)
    nats = math.fsum(result.nats or 0 for result in read)
    loss = nats / max(tokens, 1)
    bits_per_byte = nats / math.log(2) / max(size, 1)
    return TextLoss(task, len(read), tokens, loss, math.exp(loss), bits_per_byte, len(results) - len(read))


def _count(results: Iterable[Result]) -> Count:
    outcomes = [result.correct for result in results]
    return Count(sum(outcomes), len(outcomes))
