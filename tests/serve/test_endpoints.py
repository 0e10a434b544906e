"""vLLM's other endpoints and habits on a served model: messages, responses, structured output, aborted requests."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.server import LIMIT_SECONDS, Server, serving

MODEL = "nano-mxfp4"


@pytest.fixture(scope="module")
def server(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("endpoints")
    with serving(nano, folder / "store", folder / "server") as server:
        yield server


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json={"model": MODEL, "temperature": 0, **body}, timeout=LIMIT_SECONDS)
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
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LIMIT_SECONDS) as answer:
            next(answer.iter_bytes())

    leavers = [threading.Thread(target=hang_up) for _ in range(6)]
    for leaver in leavers:
        leaver.start()
    for leaver in leavers:
        leaver.join()
    assert post(server, "/v1/chat/completions", **question)["choices"][0]["message"] == alone
    assert server.healthy()
    metrics = httpx.get(f"{server.url}/metrics", timeout=LIMIT_SECONDS).text
    running = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running{")]
    assert running
    assert all(line.endswith(" 0.0") for line in running), "an aborted request is still running"
