"""Comparisons: what passes, what regresses, and what too few items or samples leave unproven."""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy import stats

from moetier_bench.compare import FEWEST_SAMPLES, Verdict, compare, lengths, quality, same_answers, speed
from moetier_bench.documents import Library
from moetier_bench.eval.compare import mcnemar
from moetier_bench.probes import AnyProbe
from moetier_bench.probes.base import Raw
from moetier_bench.result import Result
from moetier_bench.samples import Cell, figure
from tests.bench.made import answers, made

ROOT = Path(__file__).resolve().parents[2]


def whole(a: str, b: str) -> Verdict:
    lines, _, _ = quality(answers(a), answers(b))
    return lines[0].verdict


def test_equal_quality_of_many_items_passes() -> None:
    assert whole("r" * 100 + "w" * 30, "r" * 100 + "w" * 30) is Verdict.PASS


def test_equal_quality_of_few_items_is_unproven() -> None:
    assert whole("r" * 40, "r" * 40) is Verdict.UNPROVEN


def test_a_loss_that_chance_does_not_explain_regresses_however_few_the_items() -> None:
    assert whole("r" * 20, "w" * 8 + "r" * 12) is Verdict.REGRESS


def test_better_quality_is_no_regression() -> None:
    assert whole("w" * 20 + "r" * 120, "r" * 140) is Verdict.PASS


def test_discordant_items_are_listed() -> None:
    _, only_a, only_b = quality(answers("rrw"), answers("rwr"))
    assert only_a == ("arithmetic 1",)
    assert only_b == ("arithmetic 2",)


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (0, 6), (3, 9), (40, 41), (500, 300)])
def test_mcnemar_is_the_binomial_test_of_scipy(only_a: int, only_b: int) -> None:
    expected = stats.binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert mcnemar(only_a, only_b) == pytest.approx(expected, rel=1e-9)


def pairs(factor: float, count: int = 50, cut: int = 0) -> Verdict:
    a, b = answers("r" * count, 100), answers("t" * cut + "r" * (count - cut), round(100 * factor))
    return lengths("x", list(zip(a, b, strict=True))).verdict


@pytest.mark.parametrize(
    ("factor", "count", "cut", "verdict"),
    [
        pytest.param(1.0, 50, 0, Verdict.PASS, id="equal"),
        pytest.param(1.11, 50, 0, Verdict.REGRESS, id="11 % longer"),
        pytest.param(0.9, 50, 0, Verdict.REGRESS, id="10 % shorter"),
        pytest.param(1.02, 50, 0, Verdict.REGRESS, id="2 % longer in every answer: the sign test"),
        pytest.param(1.0, 50, 1, Verdict.PASS, id="one more truncated"),
        pytest.param(1.0, 50, 2, Verdict.REGRESS, id="two more truncated"),
        pytest.param(1.0, 10, 0, Verdict.UNPROVEN, id="few"),
    ],
)
def test_lengths(factor: float, count: int, cut: int, verdict: Verdict) -> None:
    assert pairs(factor, count, cut) is verdict


def cell(*samples: float, better: str = "higher") -> Cell:
    return figure("x", "tok/s", better, samples)


SECOND, TWO_SECONDS = cell(*[1] * 5, better="lower"), cell(*[2] * 5, better="lower")


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        pytest.param(cell(100, 101, 99, 100, 100), cell(99, 100, 101, 100, 100), Verdict.PASS, id="equal"),
        pytest.param(cell(100, 101, 99, 100, 100), cell(80, 81, 79, 80, 80), Verdict.REGRESS, id="20 % slower"),
        pytest.param(cell(100, 140, 60, 90, 110), cell(98, 60, 140, 95, 101), Verdict.UNPROVEN, id="too wide"),
        pytest.param(cell(100, 100, 100), cell(50, 50, 50), Verdict.UNPROVEN, id="three samples"),
        pytest.param(
            cell(1, 1, 1, 1, 1, better="lower"),
            cell(2, 2, 2, 2, 2, better="lower"),
            Verdict.REGRESS,
            id="twice the time",
        ),
        pytest.param(cell(1, 1, 1, 1, 1), figure("x", "tok/s", "higher", [], "no"), Verdict.UNPROVEN, id="null"),
        pytest.param(cell(0, 0, 0, 0, 0), cell(1, 1, 1, 1, 1), Verdict.UNPROVEN, id="zeros"),
    ],
)
def test_speed(a: Cell, b: Cell, verdict: Verdict) -> None:
    assert speed(a, b, 0.05).verdict is verdict


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        pytest.param({"max_tokens": 32}, "not measured alike: max_tokens 16 and 32", id="otherwise"),
        pytest.param({"repeats": 7}, None, id="more often"),
    ],
)
def test_what_was_measured_otherwise_is_not_compared(changed: dict[str, int], told: str | None) -> None:
    a = made("tiny/a")
    *others, coding = a.sections
    asked = coding.model_copy(update={"probe": coding.probe.model_copy(update=changed)})
    lines = compare(a, a.model_copy(update={"sections": (*others, asked)}), parts=("speed",)).lines
    found = {line.about: line for line in lines}
    assert (found["coding.ttft"].text == told) == (told is not None)
    assert found["coding.ttft"].verdict is Verdict.UNPROVEN or told is None
    assert "not measured alike" not in found["decode.C1"].text


def test_prompts_that_were_cut_to_a_servers_positions_are_another_workload() -> None:
    a = made("tiny/a")
    decode, prefill, coding = a.sections
    cut = tuple(
        trial.model_copy(update={"streams": tuple(s.model_copy(update={"prompt_tokens": 16}) for s in trial.streams)})
        for trial in prefill.raw.trials
    )
    shorter = prefill.model_copy(update={"raw": prefill.raw.model_copy(update={"trials": cut})})
    lines = compare(a, a.model_copy(update={"sections": (decode, shorter, coding)}), parts=("speed",)).lines
    found = {line.about: line for line in lines}
    assert found["ttft.32"].text == "not measured alike: 32: prompts of 32 and 16 tokens"
    assert "not measured alike" not in found["decode.C1"].text


@pytest.mark.parametrize(
    ("finish", "most", "said"),
    [
        pytest.param("length", 16, "0 of 5", id="the same limit"),
        pytest.param("length", 32, "no coding question", id="another limit"),
        pytest.param("stop", 32, "0 of 5", id="another limit that none reached"),
    ],
)
def test_answers_cut_at_different_lengths_say_nothing(finish: str, most: int, said: str) -> None:
    def changed(result: Result, **answer: str) -> Result:
        *others, coding = result.sections
        trials = tuple(
            trial.model_copy(update={"streams": tuple(s.model_copy(update=answer) for s in trial.streams)})
            for trial in coding.raw.trials
        )
        raw = coding.raw.model_copy(update={"trials": trials})
        return result.model_copy(update={"sections": (*others, coding.model_copy(update={"raw": raw}))})

    a, b = changed(made("tiny/a"), finish="stop"), changed(made("tiny/b"), finish=finish, digest="other")
    *others, coding = b.sections
    coding = coding.model_copy(update={"probe": coding.probe.model_copy(update={"max_tokens": most})})
    assert same_answers(a, b.model_copy(update={"sections": (*others, coding)})).startswith(said)


def test_whole_results() -> None:
    a, b = made("tiny/a", gap=0.005), made("tiny/b", gap=0.01)
    found = compare(a, b, parts=("speed",))
    assert found.verdict is Verdict.REGRESS
    assert {line.about for line in found.lines if line.verdict is Verdict.REGRESS} >= {"decode.C1", "decode.C2"}
    assert found.same_answers == "5 of 5 coding questions were answered alike"
    assert compare(a, b, parts=("quality",)).verdict is Verdict.UNPROVEN


@pytest.mark.parametrize("probe", Library(ROOT).suite("standard").probes, ids=lambda probe: str(probe.probe))
def test_the_standard_suite_has_samples_enough_to_compare_every_speed(probe: AnyProbe) -> None:
    trials = probe.trials_of(Raw())
    assert trials
    assert min(trials.values()) >= FEWEST_SAMPLES
