"""Two evaluations of the same items, paired: who is right where the other is wrong, and whether chance explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moetier.eval import EvalError
from moetier.eval.report import Report, Result

ALL = "all"


@dataclass(frozen=True)
class Paired:
    """One task (or all). only_a, only_b: ids of the items that only A, only B has right. p: McNemar's exact test."""

    task: str
    items: int
    correct_a: int
    correct_b: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    p: float


@dataclass(frozen=True)
class Comparison:
    """unpaired: items that only one of the two has, or that one had to skip."""

    tasks: tuple[Paired, ...]
    unpaired: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def compare(a: Report, b: Report) -> Comparison:
    """Pair the results by task and id; EvalError if the two asked different questions, or share none."""
    of_a, of_b = _by_item(a), _by_item(b)
    pairs = [(of_a[key], of_b[key]) for key in of_a if key in of_b]
    if not pairs:
        raise EvalError("the two evaluations have no item in common; run both on the same sets")
    for one, other in pairs:
        if one.digest != other.digest:
            raise EvalError(
                f"item {one.id} of {one.task} is another question in the second file; run both on the same sets"
            )
    tasks = dict.fromkeys(one.task for one, _ in pairs)
    paired = [_paired(task, [pair for pair in pairs if pair[0].task == task]) for task in tasks]
    return Comparison((*paired, _paired(ALL, pairs)), len(of_a.keys() ^ of_b.keys()))


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p of McNemar's test: under chance each discordant item falls to either side alike."""
    discordant = only_a + only_b
    tail = sum(math.comb(discordant, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / (1 << discordant))


def _by_item(report: Report) -> dict[tuple[str, int], Result]:
    return {(result.task, result.id): result for result in report.results if not result.skipped}


def _paired(task: str, pairs: Sequence[tuple[Result, Result]]) -> Paired:
    only_a = tuple(f"{a.task} {a.id}" for a, b in pairs if a.correct and not b.correct)
    only_b = tuple(f"{a.task} {a.id}" for a, b in pairs if b.correct and not a.correct)
    return Paired(
        task,
        len(pairs),
        sum(a.correct for a, _ in pairs),
        sum(b.correct for _, b in pairs),
        only_a,
        only_b,
        mcnemar(len(only_a), len(only_b)),
    )
