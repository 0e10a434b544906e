"""Two results, A the baseline and B the candidate: quality, lengths and speed, each passed, regressed or unproven."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
from scipy import stats

from moetier_bench.eval import compare as paired
from moetier_bench.eval.report import Report
from moetier_bench.eval.report import Result as Answer
from moetier_bench.probes.answers import Coding
from moetier_bench.render import why_empty
from moetier_bench.result import Result, Section
from moetier_bench.samples import Cell, Stream

P_LEVEL = 0.05
LENGTH_GATE = 0.05
"""The most by which the median or geometric mean of the answers' lengths may differ."""
EXTRA_TRUNCATED = 1
FEWEST_ITEMS = 120
"""A loss of 5 % gives six discordant items of 120, the fewest that can reach p < 0.05 when all fall to one side."""
FEWEST_OF_TASK = 30
FEWEST_SAMPLES = 5
"""Fewer samples of a speed give no interval worth the name."""
SPEED_GATE = 0.05
RESAMPLES = 9999
PARTS = ("quality", "speed")
NOT_SPEED = ("quality.", "soak.", "boot.", "tiers.", "mixed.failed", "coding.same_again")
"""Cells that are judged otherwise, or that a run has one sample of."""
HOW_OFTEN = {"repeats", "levels", "lengths", "followers"}
"""Parameters of a probe that decide which cells there are and how many samples they have, not what a sample is."""
ABOUT = 0.05
"""Share by which prompts of the same probe may differ in length: a chat's template, a text cut at a token."""


class Verdict(IntEnum):
    """Exit codes of `bench compare`; the worst of all lines is the whole's (REGRESS before UNPROVEN)."""

    PASS = 0
    REGRESS = 1
    UNPROVEN = 3


@dataclass(frozen=True)
class Line:
    """One statement. text: the evidence in words."""

    about: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Comparison:
    """All lines, the items that only one has right, and whether greedy answers were equal token for token."""

    lines: tuple[Line, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    same_answers: str

    @property
    def verdict(self) -> Verdict:
        """A regression anywhere, else unproven anywhere (or nothing to compare), else passed."""
        found = {line.verdict for line in self.lines}
        if Verdict.REGRESS in found:
            return Verdict.REGRESS
        return Verdict.PASS if found == {Verdict.PASS} else Verdict.UNPROVEN

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        lines = [{**asdict(line), "verdict": line.verdict.name.lower()} for line in self.lines]
        return {**asdict(self), "lines": lines, "verdict": self.verdict.name.lower()}


def compare(a: Result, b: Result, speed_gate: float = SPEED_GATE, parts: Sequence[str] = PARTS) -> Comparison:
    """Compare everything that both measured, or the named parts of it."""
    lines: list[Line] = []
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    if "quality" in parts:
        answers = [tuple(x for s in r.sections if s.probe.probe == "quality" for x in s.raw.answers) for r in (a, b)]
        of_quality, only_a, only_b = quality(*answers)
        lines += of_quality
    if "speed" in parts:
        lines += speeds(a, b, speed_gate)
    return Comparison(tuple(lines), only_a, only_b, same_answers(a, b))


def quality(a: Sequence[Answer], b: Sequence[Answer]) -> tuple[list[Line], tuple[str, ...], tuple[str, ...]]:
    """McNemar's exact test over all items, and the lengths of every task."""
    keys = {(x.task, x.id) for x in a if not x.skipped} & {(x.task, x.id) for x in b if not x.skipped}
    if not keys:
        return [Line("quality", Verdict.UNPROVEN, "no item that both answered")], (), ()
    whole = paired.compare(Report({}, tuple(a)), Report({}, tuple(b)))
    together = whole.tasks[-1:]
    lines = [_mcnemar(task) for task in together]
    only_a, only_b = (together[0].only_a, together[0].only_b) if together else ((), ())
    lines += [_loss(texts) for texts in whole.texts]
    for name in dict.fromkeys(x.task for x in a if x.nats is None):
        of_a = {x.id: x for x in a if x.task == name and not x.skipped}
        of_b = {x.id: x for x in b if x.task == name and not x.skipped}
        lines.append(lengths(name, [(of_a[key], of_b[key]) for key in of_a if key in of_b]))
    return lines, only_a, only_b


def _mcnemar(task: paired.Paired) -> Line:
    text = (
        f"{task.correct_a} and {task.correct_b} of {task.items} right, {len(task.only_a)} only A, "
        f"{len(task.only_b)} only B, p = {task.p:.3g}"
    )
    if task.p < P_LEVEL and len(task.only_a) > len(task.only_b):
        return Line("quality", Verdict.REGRESS, text)
    if task.items < FEWEST_ITEMS:
        return Line("quality", Verdict.UNPROVEN, f"{text}; {FEWEST_ITEMS} items could show a loss of 5 %")
    return Line("quality", Verdict.PASS, text)


def _loss(texts: paired.PairedTexts) -> Line:
    """Judge texts: worse where the mean difference is above zero by more than twice its standard error."""
    text = f"{texts.loss_a:.5f} and {texts.loss_b:.5f} nats a token over {texts.texts} texts"
    if texts.standard_error is None:
        return Line(texts.task, Verdict.UNPROVEN, text)
    worse = texts.difference > 2 * texts.standard_error and texts.difference > 0
    verdict = Verdict.REGRESS if worse else Verdict.PASS
    return Line(texts.task, verdict, f"{text}, B - A = {texts.difference:+.5f} +- {texts.standard_error:.5f}")


def lengths(task: str, pairs: Sequence[tuple[Answer, Answer]]) -> Line:
    """Ratio of the answers' tokens, B to A: median, geometric mean, sign test without ties, more truncations."""
    ratios = [b.tokens / a.tokens for a, b in pairs if a.tokens > 0 and b.tokens > 0]
    about = f"{task}: length"
    if not ratios:
        return Line(about, Verdict.UNPROVEN, "no pair of answers with tokens")
    median = statistics.median(ratios)
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    longer, shorter = sum(ratio > 1 for ratio in ratios), sum(ratio < 1 for ratio in ratios)
    p = float(stats.binomtest(longer, longer + shorter).pvalue) if longer + shorter else 1.0
    cut_a, cut_b = (sum(pair[side].finish_reason == "length" for pair in pairs) for side in (0, 1))
    text = (
        f"ratio {median:.3f} (median) {mean:.3f} (geometric mean) over {len(ratios)} answers, {longer} longer, "
        f"{shorter} shorter, p = {p:.3g}; truncated {cut_a} and {cut_b}"
    )
    broken = abs(median - 1) > LENGTH_GATE or abs(mean - 1) > LENGTH_GATE or p < P_LEVEL
    if broken or cut_b - cut_a > EXTRA_TRUNCATED:
        return Line(about, Verdict.REGRESS, text)
    return Line(about, Verdict.PASS if len(ratios) >= FEWEST_OF_TASK else Verdict.UNPROVEN, text)


def speeds(a: Result, b: Result, gate: float) -> Iterator[Line]:
    """Every cell of both where more or less is better, but those of quality."""
    of_a, of_b = a.cells, b.cells
    unlike, others = dict[str, str](), {section.probe.probe: section for section in b.sections}
    for section in a.sections:
        if (same := others.get(section.probe.probe)) is not None:
            unlike |= dict.fromkeys((cell.name for cell in section.cells), _measured_otherwise(section, same))
    for name, one in of_a.items():
        other = of_b.get(name)
        if other is None or one.better is None or name.startswith(NOT_SPEED):
            continue
        if one.value is None and other.value is None:
            continue
        sides = (("A", why_empty(one, a)), ("B", why_empty(other, b)))
        empty = "; ".join(f"{side} has none: {why}" for side, why in sides if why is not None)
        why = empty or unlike.get(name)
        yield Line(name, Verdict.UNPROVEN, why) if why else speed(one, other, gate)


def _measured_otherwise(a: Section, b: Section) -> str:
    """In what a sample of A is not what one of B is, if in anything: the probe's parameters, or its longest prompts,
    which a server of fewer positions cuts.
    """
    of_a, of_b = (section.probe.model_dump() for section in (a, b))
    differ = [name for name in of_a if name not in HOW_OFTEN and of_a[name] != of_b.get(name)]
    told = [f"{name} {of_a[name]} and {of_b.get(name)}" for name in differ]
    longest = [_longest_prompts(section) for section in (a, b)]
    for label in longest[0].keys() & longest[1].keys():
        one, other = (of[label] for of in longest)
        if abs(one - other) > ABOUT * max(one, other):
            told.append(f"{label}: prompts of {one} and {other} tokens")
    return f"not measured alike: {', '.join(sorted(told))}" if told else ""


def _longest_prompts(section: Section) -> dict[str, int]:
    """In tokens, by the trials' label; of those whose server counted them."""
    found: dict[str, int] = {}
    for trial in section.raw.trials:
        tokens = [stream.prompt_tokens for stream in trial.streams if stream.prompt_tokens]
        if tokens:
            found[trial.label] = max(found.get(trial.label, 0), *tokens)
    return found


def speed(a: Cell, b: Cell, gate: float) -> Line:
    """B's gain over A with a 95 % bootstrap interval of the ratio of means; above 1 B is better."""
    if a.value is None or b.value is None:
        missing = "A" if a.value is None else "B"
        return Line(a.name, Verdict.UNPROVEN, f"{missing} has none: {a.reason or b.reason}")
    if min(a.samples) <= 0 or min(b.samples) <= 0:
        return Line(a.name, Verdict.UNPROVEN, f"{a.value:g} and {b.value:g} {a.unit}: no ratio of zeros")
    gain = _gain(np.array(a.samples), np.array(b.samples), better=a.better)
    text = f"{a.value:g} and {b.value:g} {a.unit}; of all samples' means, B is {gain:.3f} times as good"
    if min(len(a.samples), len(b.samples)) < FEWEST_SAMPLES:
        return Line(a.name, Verdict.UNPROVEN, f"{text}; fewer than {FEWEST_SAMPLES} samples give no interval")
    low, high = interval(a, b)
    text += f", 95 % interval {low:.3f} to {high:.3f}"
    if high < 1 - gate:
        return Line(a.name, Verdict.REGRESS, text)
    return Line(a.name, Verdict.PASS if low >= 1 - gate else Verdict.UNPROVEN, text)


def interval(a: Cell, b: Cell) -> tuple[float, float]:
    """Bootstrap (percentile) interval of B's gain: the ratio of mean samples."""
    gain = partial(_gain, better=a.better)
    if len(set(a.samples)) == len(set(b.samples)) == 1:
        fixed = float(gain(np.array(a.samples), np.array(b.samples)))
        return fixed, fixed
    found = stats.bootstrap(
        (np.array(a.samples), np.array(b.samples)),
        gain,
        n_resamples=RESAMPLES,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def _gain(x: Any, y: Any, better: str | None, axis: int = -1) -> Any:
    """How many times as good samples y are as x: the ratio of their means."""
    ratio = np.mean(y, axis=axis) / np.mean(x, axis=axis)
    return ratio if better == "higher" else 1 / ratio


def same_answers(a: Result, b: Result) -> str:
    """How many coding questions were answered alike, token for token as far as their text shows.

    Where one was cut at another length than the other could be, that is not known, and it is left out.
    """
    of_a, of_b = _coding(a), _coding(b)
    alike = []
    for question in of_a.keys() & of_b.keys():
        (one, most_of_a), (other, most_of_b) = of_a[question], of_b[question]
        if most_of_a == most_of_b or not (one.truncated or other.truncated):
            alike.append(one.digest == other.digest)
    return (
        f"{sum(alike)} of {len(alike)} coding questions were answered alike" if alike else "no coding question in both"
    )


def _coding(result: Result) -> dict[str, tuple[Stream, int]]:
    """Return the first answer of each coding question, and the tokens that it could have."""
    return {
        trial.label: (trial.streams[0], section.probe.max_tokens)
        for section in result.sections
        if isinstance(section.probe, Coding)
        for trial in reversed(section.raw.trials)
    }
