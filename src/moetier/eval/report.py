"""What an evaluation found: one result per item, scores per task, and the file that keeps them for pairing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moetier.eval import EvalError

FORMAT = 1


@dataclass(frozen=True)
class Result:
    """One item's outcome. skipped: the prompt does not fit the model; it counts nowhere."""

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
class Report:
    """An evaluation. about: what was asked where and how, as plain values."""

    about: dict[str, Any]
    results: tuple[Result, ...] = field(default=())

    def scores(self) -> list[TaskScore]:
        """Per task, in the order in which they were asked."""
        return [self._score(task) for task in dict.fromkeys(result.task for result in self.results)]

    def _score(self, task: str) -> TaskScore:
        of_task = [result for result in self.results if result.task == task]
        asked = [result for result in of_task if not result.skipped]
        return TaskScore(
            task,
            _count(asked),
            _count(result for result in asked if not result.thinking),
            _count(result for result in asked if result.thinking),
            len(of_task) - len(asked),
        )

    def save(self, path: Path) -> None:
        """Write everything as one JSON object."""
        state = {
            "format": FORMAT,
            **self.about,
            "tasks": [score.as_dict() for score in self.scores()],
            "results": [asdict(result) for result in self.results],
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(state, indent=1) + "\n")
        except OSError as error:
            raise EvalError(f"{path} cannot be written: {error.strerror}; name another file with --out") from error

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a file of `save`; EvalError if it is none."""
        try:
            state = json.loads(path.read_text())
            if state.pop("format") != FORMAT:
                raise ValueError(f"expected format {FORMAT}")
            del state["tasks"]
            results = tuple(Result(**result) for result in state.pop("results"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvalError(
                f"{path}: expected a result file of `moetier eval --out`, found {type(error).__name__}: {error}"
            ) from error
        return cls(state, results)


def _count(results: Iterable[Result]) -> Count:
    outcomes = [result.correct for result in results]
    return Count(sum(outcomes), len(outcomes))
