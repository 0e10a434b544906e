"""Evaluation without a server: sets, scoring, result files, pairing. tests/serve/test_api.py asks a real one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from moetier_bench.eval import EvalError
from moetier_bench.eval.ask import answer_of
from moetier_bench.eval.compare import compare, mcnemar
from moetier_bench.eval.items import Item, Text, load_set, load_sets
from moetier_bench.eval.report import Report, Result
from tests.conftest import ROOT

BUNDLED = ROOT / "models" / "eval"
TEXT = Item("copy", 0, ({"role": "user", "content": "Say a b"},), False, "a b")
CALL = Item("toolcalls", 0, ({"role": "user", "content": "x"},), False, {"name": "f", "arguments": {"n": 18}})


@pytest.mark.parametrize(("task", "items"), [("arithmetic", 200), ("copy", 50), ("json", 50), ("toolcalls", 100)])
def test_bundled_sets_load(task: str, items: int, eval_set: Callable[[str], list[dict[str, Any]]]) -> None:
    loaded, raw = load_set(BUNDLED / f"{task}.jsonl"), eval_set(task)
    assert len(loaded) == items
    assert [item.thinking for item in loaded] == [line["enable_thinking"] for line in raw]
    assert all((item.tools != ()) == (task == "toolcalls") for item in loaded)
    same = {json.dumps({**line, "id": 0}) for line in raw}
    assert len({item.digest for item in loaded}) == len(same)


def test_a_line_with_text_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"id": 3, "source": "s", "text": "né"}\n')
    assert load_set(tmp_path / "t.jsonl") == [Text("t", 3, "né")]


def test_all_sets_is_the_default() -> None:
    assert {item.task for item in load_sets(BUNDLED, [])} == {"arithmetic", "copy", "json", "toolcalls"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2"),
        ("[]", "AttributeError"),
        ('{"id": 1, "messages": [], "enable_thinking": false}', "'expected'"),
        ('{"id": 0, "messages": [], "enable_thinking": false, "expected": ""}', "occurs twice"),
        ('{"id": 1, "messages": [], "expected": ""}', "'enable_thinking'"),
        ("[" * 50_000, "RecursionError"),
        ('{"id": 1e999, "text": ""}', "OverflowError"),
    ],
    ids=["cut", "no-object", "nothing-expected", "id-twice", "no-thinking", "deep", "infinite-id"],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": 0, "messages": [], "enable_thinking": false, "expected": ""}\n' + line + "\n")
    with pytest.raises(EvalError, match=says):
        load_set(path)


def test_unknown_set_names_the_known_ones() -> None:
    with pytest.raises(EvalError, match="no set needles; it has arithmetic, copy, json, toolcalls"):
        load_sets(BUNDLED, ["copy", "needles"])


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ("a b", True),
        ("\na b\n", True),
        ("<think>c</think>\na b", True),
        ("<think>a b</think>", False),
        ("a  b", False),
        ("A b", False),
        (None, False),
    ],
)
def test_text_is_compared_exactly_after_the_thinking(content: str | None, right: bool) -> None:
    assert (answer_of(completion(content=content), TEXT) == TEXT.expected) == right


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([("f", '{"n": 18}')], True),
        ([("f", '{"n": "18"}')], False),
        ([("g", '{"n": 18}')], False),
        ([("f", '{"n": 18, "m": 1}')], False),
        ([("f", '{"n": 18')], False),
        ([("f", '{"n": 18}')] * 2, False),
        ([], False),
    ],
    ids=["right", "type", "name", "too-many-arguments", "cut", "twice", "none"],
)
def test_a_call_is_compared_by_name_and_values(calls: list[tuple[str, str]], right: bool) -> None:
    assert (answer_of(completion(calls=calls), CALL) == CALL.expected) == right


def test_report_splits_by_thinking_and_counts_no_skipped_item() -> None:
    (score,) = report("1100", thinking="0101", skipped="0001").scores()
    assert (str(score.all), str(score.without_thinking), str(score.with_thinking)) == ("2/3", "1/2", "1/1")
    assert score.skipped == 1
    assert score.all.score == 0.6667


def test_losses_are_those_of_all_tokens() -> None:
    (loss,) = texts((10, 20.0), (30, 40.0)).losses()
    assert (loss.texts, loss.tokens, loss.loss, loss.perplexity) == (2, 40, 1.5, math.exp(1.5))
    assert loss.bits_per_byte == pytest.approx(60 / math.log(2) / 200)
    assert texts((10, 20.0)).scores() == []


def test_compare_texts_is_paired_by_text() -> None:
    (pair,) = compare(texts((10, 20.0), (30, 40.0)), texts((10, 21.0), (30, 46.0))).texts
    assert (pair.loss_a, pair.loss_b) == (1.5, 67 / 40)
    assert pair.difference == pytest.approx((0.1 + 0.2) / 2)
    assert pair.standard_error == pytest.approx(0.05)


def test_report_comes_back_from_its_file(tmp_path: Path) -> None:
    before = Report({"model": "m"}, (*report("10").results, Result("t", 5, "d", True, answer=[{"name": "f"}])))
    before.save(tmp_path / "new" / "r.json")
    assert Report.load(tmp_path / "new" / "r.json") == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 2}',
        '{"format": 1, "results": []}',
        '{"format":1,"tasks":[],"texts":[],"results":[{}]}',
        "[" * 50_000,
    ],
    ids=["empty", "list", "format", "no-tasks", "empty-result", "deep"],
)
def test_what_is_no_result_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(EvalError, match="expected a result file"):
        Report.load(tmp_path / "r.json")


def test_mcnemar_is_the_two_sided_binomial() -> None:
    assert mcnemar(0, 0) == 1
    assert mcnemar(5, 5) == 1
    assert mcnemar(0, 1) == 1
    assert mcnemar(0, 6) == mcnemar(6, 0) == 2 / 64
    assert mcnemar(1, 9) == 2 * (1 + 10) / 1024
    # 3,000 discordant items: far from what floats hold on the way, near the normal approximation
    assert mcnemar(1400, 1600) == pytest.approx(math.erfc((100 - 0.5) / math.sqrt(3000 / 4) / math.sqrt(2)), rel=1e-2)


def test_compare_pairs_by_item() -> None:
    comparison = compare(report("110010", skipped="000001"), report("101001", order=(5, 3, 2, 1, 0, 4)))
    total = comparison.tasks[-1]
    assert (total.task, total.items, total.correct_a, total.correct_b) == ("all", 5, 3, 2)
    assert (total.only_a, total.only_b, total.p) == (("t 1", "t 4"), ("t 2",), 1.0)
    assert comparison.unpaired == 1


def test_compare_refuses_other_questions() -> None:
    with pytest.raises(EvalError, match="another question"):
        compare(report("1"), report("1", digest="other"))
    with pytest.raises(EvalError, match="no item in common"):
        compare(report("1"), report("1", task="other"))


def test_command_compares_files(tmp_path: Path) -> None:
    for name, correct in (("a", "110"), ("b", "011")):
        report(correct).save(tmp_path / f"{name}.json")
    done = moetier("eval", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json")
    assert done.returncode == 0, done.stderr
    total = json.loads(done.stdout)["tasks"][-1]
    assert (total["only_a"], total["only_b"]) == (["t 0"], ["t 2"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--url", "http://127.0.0.1:9/v1"), "start the server, or give its address with --url"),
        (("--sets", "/nonexistent"), "name their folder with --sets"),
        (("compare", "/nonexistent", "/nonexistent"), "expected a result file"),
    ],
    ids=["no-server", "no-sets", "no-file"],
)
def test_command_says_what_is_wrong(arguments: tuple[str, ...], says: str) -> None:
    done = moetier("eval", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.startswith("moetier: error: ")
    assert "Traceback" not in done.stderr


def moetier(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from moetier.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def report(
    correct: str,
    *,
    thinking: str = "",
    skipped: str = "",
    task: str = "t",
    digest: str = "d",
    order: tuple[int, ...] | None = None,
) -> Report:
    """A report of len(correct) items; a 1 in a string sets that of the item."""
    results = [
        Result(task, i, digest, thinking[i : i + 1] == "1", skipped[i : i + 1] == "1", correct[i] == "1")
        for i in range(len(correct))
    ]
    return Report({}, tuple(results[i] for i in order or range(len(correct))))


def texts(*read: tuple[int, float]) -> Report:
    """A report of texts of 100 bytes: (tokens, nats)."""
    results = [Result("t", i, "d", False, tokens=n, nats=nats, bytes=100) for i, (n, nats) in enumerate(read)]
    return Report({}, tuple(results))


def completion(content: str | None = None, calls: list[tuple[str, str]] | None = None) -> ChatCompletion:
    """An answer as the API's client gives it."""
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": str(i), "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls or [])
        ],
    }
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return ChatCompletion.model_validate(
        {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    )
