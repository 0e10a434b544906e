"""Results of a long evaluation, one line each, so that it can be cut anywhere and go on; and the verdict over them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moetier_bench.eval import EvalError
from moetier_bench.eval.compare import Comparison
from moetier_bench.eval.items import Item, Text
from moetier_bench.eval.report import Count, Report, Result

MOST_POINTS = 1.0
"""Points (of 100) that a variant may lose against the reference and still be not worse."""
LEAST_P = 0.05


class ResultLog:
    """A JSON Lines file: first what was evaluated, then a line per item. A line that was cut short is dropped."""

    def __init__(self, path: Path, about: dict[str, Any] | None = None) -> None:
        """Open it, or begin it; EvalError if it is of something else. about None: whatever it is of."""
        self.path, self.about = path, about or {}
        self.results: list[Result] = []
        if path.exists():
            self._load()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(self.about)

    def has(self, item: Item | Text) -> bool:
        """Whether this item is in it; EvalError if another question has its id."""
        for result in self.results:
            if (result.task, result.id) == (item.task, item.id):
                if result.digest != item.digest:
                    raise EvalError(f"{self.path}: {item.task} {item.id} was another question; remove the file")
                return True
        return False

    def add(self, result: Result) -> None:
        """Append a result; it is in the file when this returns."""
        self.results.append(result)
        self._append(asdict(result))

    def report(self) -> Report:
        """All results, by set and id."""
        return Report(self.about, tuple(sorted(self.results, key=lambda result: (result.task, result.id))))

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _load(self) -> None:
        raw = self.path.read_bytes()
        whole = raw.rfind(b"\n") + 1
        if whole != len(raw):
            with self.path.open("r+b") as file:
                file.truncate(whole)
        try:
            found, *lines = [json.loads(line) for line in raw[:whole].splitlines()]
            self.results = [Result(**line) for line in lines]
        except (ValueError, TypeError) as error:
            raise EvalError(
                f"{self.path}: expected results of a quality evaluation, found {type(error).__name__}: {error}; "
                "remove the file"
            ) from error
        if self.about and found != self.about:
            raise EvalError(f"{self.path}: expected results of {self.about}, found {found}; name another file")
        if len({(result.task, result.id) for result in self.results}) != len(self.results):
            raise EvalError(f"{self.path}: an item is there twice, so two runs wrote at once; remove one of its lines")
        self.about = found


@dataclass(frozen=True)
class Verdict:
    """Whether a variant is not worse than the reference, over all questions that both answered.

    points_lost: percentage points; negative where the variant is better. p: McNemar's exact.
    """

    items: int
    points_lost: float
    p: float

    @property
    def not_worse(self) -> bool:
        """At most one point lost, with p >= 0.05; a variant that is better is not worse, whatever p is."""
        return self.points_lost <= 0 or (self.p >= LEAST_P and self.points_lost <= MOST_POINTS)


def same_answers(a: Report, b: Report) -> Count:
    """Questions to which both gave the same answer, right or wrong, of those that both answered."""
    answers = {(result.task, result.id): result.answer for result in _answered(a)}
    same = [answers[key] == result.answer for result in _answered(b) if (key := (result.task, result.id)) in answers]
    return Count(sum(same), len(same))


def _answered(report: Report) -> list[Result]:
    return [result for result in report.results if result.nats is None and not result.skipped]


def verdict(comparison: Comparison) -> Verdict | None:
    """Judge the reference (A) against a variant (B); None where they share no question."""
    if not comparison.tasks:
        return None
    total = comparison.tasks[-1]
    return Verdict(total.items, 100 * (total.correct_a - total.correct_b) / total.items, total.p)
