"""Two evaluations of the same items, paired: who is right where the other is wrong, and whether chance explains it."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from moetier_bench.eval import EvalError
from moetier_bench.eval.report import Report, Result

ALL = "all"
Pair = tuple[Result, Result]
"""Results of A and B of one item."""


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
class PairedTexts:
    """A set of texts: nats per token of both, and the mean over texts of B's minus A's.

    standard_error: of that mean; None where there is only one text.
    """

    task: str
    texts: int
    loss_a: float
    loss_b: float
    difference: float
    standard_error: float | None


@dataclass(frozen=True)
class Comparison:
    """unpaired: items that only one of the two has, or that one had to skip."""

    tasks: tuple[Paired, ...]
    texts: tuple[PairedTexts, ...]
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
    asked = [pair for pair in pairs if pair[0].nats is None]
    read = [pair for pair in pairs if pair[0].nats is not None]
    paired = [_paired(task, of_task) for task, of_task in _by_task(asked).items()]
    texts = tuple(_paired_texts(task, of_task) for task, of_task in _by_task(read).items())
    total = [_paired(ALL, asked)] if asked else []
    return Comparison((*paired, *total), texts, len(of_a.keys() ^ of_b.keys()))


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p of McNemar's test: under chance each discordant item falls to either side alike."""
    discordant = only_a + only_b
    tail = sum(math.comb(discordant, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / (1 << discordant))


def _by_item(report: Report) -> dict[tuple[str, int], Result]:
    return {(result.task, result.id): result for result in report.results if not result.skipped}


def _by_task(pairs: list[Pair]) -> dict[str, list[Pair]]:
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair[0].task, []).append(pair)
    return groups


def _paired(task: str, pairs: list[Pair]) -> Paired:
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


def _paired_texts(task: str, pairs: list[Pair]) -> PairedTexts:
    losses = [[(result.nats or 0) / max(result.tokens, 1) for result in pair] for pair in pairs]
    differences = [b - a for a, b in losses]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    loss_a, loss_b = (
        math.fsum(pair[side].nats or 0 for pair in pairs) / max(sum(pair[side].tokens for pair in pairs), 1)
        for side in (0, 1)
    )
    return PairedTexts(task, len(pairs), loss_a, loss_b, statistics.fmean(differences), error)
