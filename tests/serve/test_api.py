"""The bundled model over the OpenAI API, as `make serve` serves it: a quarter of its experts in DRAM."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from moetier.trace.record import Trace
from moetier_bench.eval.ask import Server as Asked
from moetier_bench.eval.ask import evaluate
from moetier_bench.eval.items import load_set
from moetier_bench.eval.report import Report
from tests.conftest import ROOT
from tests.serve.server import COMMAND, LIMIT_SECONDS, Server, serving

MODEL = "nano-mxfp4"
CLIENTS = 8
TOP_K = 4
ITEMS_OF_A_SET = 3

Items = Callable[[str], list[dict[str, Any]]]
Answer = tuple[list[str], list[float]]
"""Tokens and logprobs of an answer, the runner-up's of each position included."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def store(folder: Path) -> Path:
    """Where the first server builds nano's store."""
    return folder / "store"


@pytest.fixture(scope="module")
def server(nano: Path, store: Path, folder: Path) -> Iterator[Server]:
    """The server of most tests. It records every layer call, and a routing trace."""
    recorded = ("--set", f"record_calls={folder / 'calls'}", "--record", str(folder / "trace"))
    with serving(nano, store, folder / "quarter", dram_records="25%", options=recorded) as server:
        yield server


@pytest.mark.parametrize(
    ("task", "reached", "clients"),
    [
        pytest.param("arithmetic", 0.905, CLIENTS, marks=pytest.mark.long),
        ("copy", 0.960, 1),
        ("json", 1.000, 1),
        ("toolcalls", 1.000, CLIENTS),
    ],
)
def test_scores_of_the_models_readme(task: str, reached: float, clients: int, server: Server) -> None:
    """At least those minus 2 points. Small sets one at a time: batches, whose rounding varies, could cost an item."""
    items = load_set(ROOT / "models" / "eval" / f"{task}.jsonl")
    (score,) = Report({}, tuple(evaluate(Asked(f"{server.url}/v1", MODEL), items, clients))).scores()
    assert score.all.items == len(items)
    assert score.all.score >= round(reached - 0.02, 4), score


def test_eval_command_asks_questions_and_reads_texts(server: Server, tmp_path: Path) -> None:
    """Of each set, an item that does not fit the model is counted apart."""
    long, question = "so " * 3000, {"id": 0, "messages": [text_message("Compute 1 + 6.")]}
    asked = {**question, "enable_thinking": True, "expected": "7"}
    sets = {
        "sums": [asked, {**asked, "id": 1, "expected": "8"}, {**asked, "id": 2, "messages": [text_message(long)]}],
        "texts": [{"id": 0, "text": "import os"}, {"id": 1, "text": "import xq"}, {"id": 2, "text": long}],
    }
    for name, items in sets.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    command = [COMMAND, "eval", "--url", f"{server.url}/v1", "--sets", str(tmp_path), "--json"]
    out = tmp_path / "out.json"
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (sums,), (texts,) = report["tasks"], report["texts"]
    assert (sums["score"], sums["with_thinking"], sums["skipped"]) == (0.5, {"correct": 1, "items": 2}, 1)
    assert (texts["texts"], texts["skipped"]) == (2, 1)
    usual, unusual, skipped = Report.load(out).results[3:]
    assert 0 < (usual.nats or 0) < (unusual.nats or 0)
    assert (usual.bytes, unusual.bytes, skipped.skipped) == (9, 9, True)


def text_message(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("thinking", [False, True], ids=["direct", "thinking"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tool_call_arrives_parsed(stream: bool, thinking: bool, server: Server, eval_set: Items) -> None:
    item = first(eval_set("toolcalls"), thinking)
    message = (streamed if stream else whole)(server, item)
    assert message["finish_reason"] == "tool_calls"
    assert (message["name"], json.loads(message["arguments"])) == tuple(item["expected_call"].values())
    assert message["content"].strip() == ""
    assert bool(message["reasoning"].strip()) == thinking


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_reasoning_arrives_apart_from_the_answer(stream: bool, server: Server, eval_set: Items) -> None:
    item = first(eval_set("arithmetic"), thinking=True)
    message = (streamed if stream else whole)(server, item)
    assert message["content"].strip() == item["expected"]
    assert item["expected"] in message["reasoning"]
    assert "think>" not in message["reasoning"] + message["content"]
    assert (message["finish_reason"], message["name"]) == ("stop", "")


def test_eight_clients_recorded_calls_are_those_of_all_in_dram(
    server: Server, store: Path, folder: Path, eval_set: Items
) -> None:
    items = sample(eval_set)
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda item: ask(server, item), items * 2))
    command = [COMMAND, "identity", "--store", str(store), "--replay", str(folder / "calls"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["differ"] == 0
    assert report["calls"] >= 4 * max(len(tokens) for tokens, _ in map(tokens_of, answers))


def test_metrics_add_up(server: Server, eval_set: Items) -> None:
    """Ours beside vLLM's, and no older than a second or two."""
    before = metrics(server)
    answer = ask(server, sample(eval_set)[0])
    assert answer.usage is not None
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (
        (now := metrics(server))["tokens"] >= before["tokens"] + 4 * (answer.usage.total_tokens - 1) and adds_up(now)
    ) or not min(now["sentinel_records"], now["sentinel_calls"]):
        assert time.monotonic() < deadline, f"the counters do not arrive, or do not add up: {now}"
        time.sleep(0.2)
    assert now["hits"] > before["hits"]
    assert now["misses"] > 0
    assert now["cpu_microseconds"] > 0
    assert now["healed"] == now["corrupt_records"] == now["corrupt_calls"] == 0


def adds_up(now: dict[str, float]) -> bool:
    """What was read in the middle of a layer's call does not yet. A quarter of 32 experts in each of 4 layers was read
    at the start.
    """
    return (
        now["pairs"] == TOP_K * now["tokens"]
        and now["hits"] + now["misses"] == now["reads"]
        and now["store_reads"] == now["misses"] + 4 * 8
    )


def metrics(server: Server) -> dict[str, float]:
    """Sums of our metrics over layers, tiers and ranks."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=LIMIT_SECONDS) as answer:
        text = answer.read().decode()
    assert "vllm:prompt_tokens_total" in text
    names = ("tokens", "pairs", "hits", "misses", "reads", "store_reads", "cpu_microseconds", "sentinel_records")
    names += ("sentinel_calls", "corrupt_records", "corrupt_calls")
    lines = [line for line in text.splitlines() if line.startswith("moetier_")]
    return {
        name: sum(float(line.split()[-1]) for line in lines if line.startswith(f"moetier_{metric}_total{{"))
        for name, metric in [*zip(names, names, strict=True), ("healed", "records_healed")]
    }


def test_trace_of_the_traffic(server: Server, folder: Path, eval_set: Items) -> None:
    """While it is being recorded: calls of every layer, prompts and decode told apart, and the verbs that read it."""
    deadline, steps = time.monotonic() + LIMIT_SECONDS, []
    while sum(not step[0].step.prefill for step in steps) < 10:  # it is written every second, while calls come
        assert time.monotonic() < deadline, "the trace does not grow"
        ask(server, sample(eval_set)[0])
        steps = list(Trace.open(folder / "trace").steps())
    assert all([call.layer for call in step] == [0, 1, 2, 3] for step in steps[:-1]), "the last may not be whole yet"
    assert {call.ids.shape[0] for step in steps if not step[0].step.prefill for call in step} <= set(
        range(1, CLIENTS + 1)
    )
    prompts = [step for step in steps if step[0].step.prefill]
    assert 0 < len(prompts) < len(steps)
    command = [COMMAND, "trace", "simulate", str(folder / "trace"), "--slots", "25%", "--slots", "32", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert {run["policy"] for run in runs} == {"lru", "second-touch", "frequency"}
    for run in runs:
        rate = run["decode"]["hit_rate"]
        assert rate == 1 if run["slots"] == 32 else 0 < rate <= 1
    shown = subprocess.run(
        [COMMAND, "trace", "show", str(folder / "trace")], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert "experts                32" in shown.stdout


@pytest.mark.parametrize("dram_records", ["0", pytest.param("100%", marks=pytest.mark.long)])
def test_one_at_a_time_answers_survive_a_restart(
    dram_records: str, nano: Path, store: Path, tmp_path: Path, alone: list[Answer], eval_set: Items
) -> None:
    """Tokens and logprobs, bit for bit, whatever share of the experts the new server keeps in DRAM."""
    with serving(nano, store, tmp_path / "again", dram_records=dram_records) as again:
        assert [tokens_of(ask(again, item)) for item in sample(eval_set)] == alone


@pytest.fixture(scope="module")
def alone(server: Server, request: pytest.FixtureRequest) -> list[Answer]:
    """Answers of the first server to one request at a time."""
    eval_set: Items = request.getfixturevalue("eval_set")
    return [tokens_of(ask(server, item)) for item in sample(eval_set)]


def sample(eval_set: Items) -> list[dict[str, Any]]:
    """A few items of each set, with and without thinking."""
    return [
        item
        for task in ("arithmetic", "copy", "json", "toolcalls")
        for thinking in (False, True)
        for item in [item for item in eval_set(task) if item["enable_thinking"] == thinking][:ITEMS_OF_A_SET]
    ]


def first(items: list[dict[str, Any]], thinking: bool) -> dict[str, Any]:
    return next(item for item in items if item["enable_thinking"] == thinking)


def request_of(item: dict[str, Any]) -> dict[str, Any]:
    """An item as the API takes it."""
    tools = {"tools": item["tools"]} if "tools" in item else {}
    template = {"chat_template_kwargs": {"enable_thinking": item["enable_thinking"]}}
    return {"model": MODEL, "messages": item["messages"], "temperature": 0, "max_tokens": 256, **tools} | {
        "extra_body": template
    }


def ask(server: Server, item: dict[str, Any]) -> ChatCompletion:
    with server.client() as client:
        return client.chat.completions.create(**request_of(item), logprobs=True, top_logprobs=2)


def tokens_of(answer: ChatCompletion) -> Answer:
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    tops = [top for token in logprobs.content for top in (token, *token.top_logprobs)]
    return [top.token for top in tops], [top.logprob for top in tops]


def whole(server: Server, item: dict[str, Any]) -> dict[str, str]:
    """A message in one piece: content, reasoning, the call's name and arguments, finish_reason."""
    with server.client() as client:
        choice = client.chat.completions.create(**request_of(item)).choices[0]
    calls = [call.function for call in choice.message.tool_calls or []]
    assert len(calls) <= 1
    return {
        "content": choice.message.content or "",
        "reasoning": getattr(choice.message, "reasoning", None) or "",
        "name": "".join(call.name for call in calls),
        "arguments": "".join(call.arguments for call in calls),
        "finish_reason": choice.finish_reason,
    }


def streamed(server: Server, item: dict[str, Any]) -> dict[str, str]:
    """The same of a message that arrives in pieces, put together."""
    message = dict.fromkeys(("content", "reasoning", "name", "arguments", "finish_reason"), "")
    pieces = 0
    with server.client() as client:
        for chunk in client.chat.completions.create(**request_of(item), stream=True):
            (choice,) = chunk.choices
            pieces += 1
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            message["finish_reason"] += choice.finish_reason or ""
            for call in choice.delta.tool_calls or []:
                assert call.index == 0
                message["name"] += call.function.name or ""
                message["arguments"] += call.function.arguments or ""
    assert pieces > 2
    return message
