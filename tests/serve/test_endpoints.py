"""vLLM's other endpoints and habits on a served model: messages, responses, structured output, aborted requests."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import psutil
import pytest

from tests.serve.server import LIMIT_SECONDS, Server, serving

MODEL = "nano-mxfp4"


KEY, OTHER_KEY = "key-of-the-endpoints", "another-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CHUNK = 256
"""Tokens of a prompt in a step: longer prompts take several."""


@pytest.fixture(scope="module")
def server(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on every address, with keys, and small steps."""
    folder = tmp_path_factory.mktemp("endpoints")
    keys = folder / "keys"
    keys.touch(0o600)
    keys.write_text(f"{OTHER_KEY}\n{KEY}\n")
    options, vllm = ("--host", "0.0.0.0", "--api-key-file", str(keys)), ("--max-num-batched-tokens", str(CHUNK))
    with serving(nano, folder / "store", folder / "server", options=options, vllm=vllm) as server:
        yield server


def ask(server: Server, path: str, **body: Any) -> httpx.Response:
    body = {"model": MODEL, "temperature": 0, **body}
    return httpx.post(f"{server.url}{path}", json=body, headers=HEADERS, timeout=LIMIT_SECONDS)


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = ask(server, path, **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_messages(server: Server) -> None:
    answer = post(server, "/v1/messages", max_tokens=64, messages=[{"role": "user", "content": "What is 17 + 25?"}])
    assert answer["role"] == "assistant"
    assert any("42" in part.get("text", "") for part in answer["content"]), answer


def test_responses(server: Server) -> None:
    answer = post(server, "/v1/responses", input="What is 17 + 25?", max_output_tokens=64)
    assert answer["status"] == "completed"
    assert "42" in json.dumps(answer["output"])


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("constraint", "obeys"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
                }
            },
            lambda text: json.loads(text).keys() == {"n"} and isinstance(json.loads(text)["n"], int),
        ),
        ({"structured_outputs": {"choice": ["penguin", "albatross"]}}, lambda text: text in ("penguin", "albatross")),
        ({"structured_outputs": {"regex": "x[0-9]{7}y"}}, lambda text: re.fullmatch("x[0-9]{7}y", text)),
    ],
    ids=["json-schema", "choice", "regex"],
)
def test_structured_output(server: Server, constraint: dict[str, Any], obeys: Callable[[str], bool]) -> None:
    """Answers that the model would never give by itself."""
    answer = post(
        server,
        "/v1/chat/completions",
        max_tokens=128,
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
        chat_template_kwargs={"enable_thinking": False},
        **constraint,
    )
    assert obeys(answer["choices"][0]["message"]["content"]), answer


def test_aborted_requests_leave_the_others_right(server: Server) -> None:
    """Clients that hang up in the middle of an answer; one that stays gets the answer that it gets alone."""
    question = {"messages": [{"role": "user", "content": "What is 123 + 456?"}], "max_tokens": 64}
    alone = post(server, "/v1/chat/completions", **question)["choices"][0]["message"]

    def hang_up() -> None:
        body = {"model": MODEL, "prompt": "The", "max_tokens": 800, "ignore_eos": True, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=LIMIT_SECONDS) as answer:
            next(answer.iter_bytes())

    leavers = [threading.Thread(target=hang_up) for _ in range(6)]
    for leaver in leavers:
        leaver.start()
    for leaver in leavers:
        leaver.join()
    assert post(server, "/v1/chat/completions", **question)["choices"][0]["message"] == alone
    assert server.healthy()
    metrics = httpx.get(f"{server.url}/metrics", headers=HEADERS, timeout=LIMIT_SECONDS).text
    running = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running{")]
    assert running
    assert all(line.endswith(" 0.0") for line in running), "an aborted request is still running"


def test_every_route_but_health_asks_for_a_key(server: Server) -> None:
    """Those that vLLM tells of, those that it does not, and paths that are none."""
    told = httpx.get(f"{server.url}/openapi.json", headers=HEADERS, timeout=LIMIT_SECONDS).json()["paths"]
    assert {"/v1/chat/completions", "/invocations", "/tokenize", "/ping"} <= set(told)
    routes = {(method.upper(), path) for path, methods in told.items() for method in methods}
    odd = (
        "/metrics",
        "/metrics/",
        "/docs",
        "/redoc",
        "/openapi.json",
        "//v1/models",
        "/V1/models",
        "/health/",
        "/nowhere",
    )
    routes |= {(method, path) for path in odd for method in ("GET", "HEAD", "OPTIONS", "POST")}
    assert len(routes) > 50
    closed = {(method, path) for method, path in routes if path != "/health"}
    wrong: list[dict[str, str]] = [{}, {"Authorization": "Bearer none"}, {"x-api-key": f"{KEY}x"}]
    with httpx.Client(base_url=server.url, timeout=LIMIT_SECONDS) as client:
        for method, path in sorted(closed):
            for headers in wrong:
                assert client.request(method, path, headers=headers).status_code == 401, (method, path)
        assert client.get("/health").status_code == 200
        for headers in ({"x-api-key": OTHER_KEY}, {"Authorization": f"bearer {KEY}"}):
            assert client.get("/v1/models", headers=headers).status_code == 200
            assert "moetier_hit_rate" in client.get("/metrics", headers=headers).text


def test_no_process_and_no_log_shows_a_key(server: Server) -> None:
    """Neither in the command line nor in the environment; the launcher reads the file, and its children do not."""
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            seen = json.dumps([process.cmdline(), process.environ()])
            assert KEY not in seen, process
            assert OTHER_KEY not in seen, process
    told = server.stderr + server.log_tail(100_000)
    assert "Application startup complete" in told
    assert KEY not in told
    assert OTHER_KEY not in told


def test_the_printed_line_is_answered(server: Server) -> None:
    (line,) = (line for line in server.stderr.splitlines() if line.startswith("curl "))
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True)
    assert "42" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def drawn(server: Server, prompt: list[int], seed: int) -> list[int]:
    """Tokens of an answer that its seed decides."""
    body = {"prompt": prompt, "seed": seed, "temperature": 2.0, "max_tokens": 8, "ignore_eos": True}
    found: list[int] = post(server, "/v1/completions", return_token_ids=True, **body)["choices"][0]["token_ids"]
    return found


def test_a_seeded_prompt_of_several_steps_is_answered_as_its_seed_says(server: Server) -> None:
    """Alone and beside others, of which vLLM's CPU build by itself dies."""
    seeds = range(4)
    prompts = [[100 + (seed * 7 + at * 13) % 3000 for at in range(2 * CHUNK + 88)] for seed in seeds]
    assert drawn(server, prompts[0], 1) == drawn(server, prompts[0], 1) != drawn(server, prompts[0], 2)
    with ThreadPoolExecutor(len(prompts)) as clients:
        together = list(clients.map(lambda seed: drawn(server, prompts[seed], seed), seeds))
    assert [len(tokens) for tokens in together] == [8] * len(prompts)
    assert server.healthy()


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 1.5, "x"])
def test_an_odd_seed_is_answered_or_refused(seed: object, server: Server) -> None:
    answer = ask(server, "/v1/completions", prompt="1 2", seed=seed, max_tokens=2, temperature=1)
    possible = isinstance(seed, int) and -(2**63) <= seed < 2**63
    assert answer.status_code == (200 if possible else 400), answer.text
    assert server.healthy()


PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": what, "parameters": PLACE}}
    for name, what in (("get_weather", "Weather of a city"), ("get_time", "Time in a city"))
]
QUESTIONS = ("What is the weather in Paris?", "What is 17 + 25?", "Hello")


def chosen(choice: Any, question: str, stream: bool) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "tools": TOOLS,
        "tool_choice": choice,
        "stream": stream,
        "max_tokens": 200,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def called(server: Server, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and arguments of the calls in an answer, streamed or whole."""
    answer = ask(server, "/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        calls = answer.json()["choices"][0]["message"]["tool_calls"]
        return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    parts: dict[int, list[str]] = {}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                for call in choice["delta"].get("tool_calls") or []:
                    part = parts.setdefault(call["index"], ["", ""])
                    part[0] += call["function"].get("name") or ""
                    part[1] += call["function"].get("arguments") or ""
    return [(name, arguments) for name, arguments in parts.values()]


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("name", ["get_time", "get_weather", None])
def test_a_chosen_tool_is_called_as_its_schema_says(name: str | None, question: str, server: Server) -> None:
    """By name, or whichever (None: "required"), whatever was asked; the tests' servers free the model's own calls."""
    choice = "required" if name is None else {"type": "function", "function": {"name": name}}
    whole = called(server, chosen(choice, question, stream=False))
    assert whole
    for called_name, arguments in whole:
        assert called_name in (("get_time", "get_weather") if name is None else (name,))
        jsonschema.validate(json.loads(arguments), PLACE)
    assert called(server, chosen(choice, question, stream=True)) == whole


def test_a_tool_that_is_not_there_cannot_be_chosen(server: Server) -> None:
    body = chosen({"type": "function", "function": {"name": "nope"}}, QUESTIONS[0], stream=False)
    assert ask(server, "/v1/chat/completions", **body).status_code == 400


def test_a_tool_chosen_in_the_other_apis(server: Server) -> None:
    question = [{"role": "user", "content": QUESTIONS[0]}]
    tools = [{"name": tool["function"]["name"], "input_schema": PLACE} for tool in TOOLS]
    body = {"messages": question, "tools": tools, "tool_choice": {"type": "tool", "name": "get_time"}}
    (use,) = [p for p in post(server, "/v1/messages", max_tokens=400, **body)["content"] if p["type"] == "tool_use"]
    assert use["name"] == "get_time"
    jsonschema.validate(use["input"], PLACE)
    functions = [{"type": "function", "name": tool["name"], "parameters": PLACE} for tool in tools]
    body = {"input": QUESTIONS[0], "tools": functions, "tool_choice": {"type": "function", "name": "get_time"}}
    output = post(server, "/v1/responses", max_output_tokens=400, **body)["output"]
    (call,) = [part for part in output if part["type"] == "function_call"]
    assert call["name"] == "get_time"
    jsonschema.validate(json.loads(call["arguments"]), PLACE)
