"""Asking a server: a question as one greedy chat completion, scored exactly; a text for its tokens' likelihood."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetier_bench.eval import EvalError
from moetier_bench.eval.items import Item, Text
from moetier_bench.eval.report import Result

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletion

CLOSE_THINKING = "</think>"
TOO_LONG = "context length"
"""Words of vLLM's refusal of a prompt that does not fit the model's positions."""

NO_PARSER = "--tool-call-parser"
"""Words of vLLM's refusal of tools where it was started without a parser for them."""
PARSERS = (
    "; start the server with the model's parsers after --, for the bundled model -- --enable-auto-tool-choice "
    "--tool-call-parser glm45 --reasoning-parser glm45, or leave out sets with tools (--task names those to ask)"
)


@dataclass(frozen=True)
class Server:
    """Where to ask. model: its name in the API."""

    url: str
    model: str
    api_key: str | None = None
    max_tokens: int = 256
    timeout: float = 600.0
    """Seconds for one answer."""
    retries: int = 2
    """How often a request that failed is sent again; 0 where failures are what is measured."""


@contextmanager
def client(url: str, api_key: str | None, timeout: float, retries: int = 2) -> Iterator[OpenAI]:
    """A client of the `openai` package; whatever goes wrong with the server is an EvalError."""
    try:
        import openai
    except ImportError:
        raise EvalError("`moetier eval` asks with the openai package; pip install 'moetier[eval]'") from None
    try:
        key = api_key or "none"
        with openai.OpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=retries) as connected:
            yield connected
    except openai.APIStatusError as error:
        remedy = PARSERS if NO_PARSER in error.message else ""
        raise EvalError(f"{url} answered with status {error.status_code}: {error.message}{remedy}") from error
    except openai.APIError as error:
        raise EvalError(
            f"{url} does not answer ({error.message}); start the server, or give its address with --url"
        ) from error


def model_of(url: str, api_key: str | None) -> str:
    """Name of the one model that is served at `url`."""
    with client(url, api_key, 30) as connected:
        names = [model.id for model in connected.models.list()]
    if len(names) != 1:
        raise EvalError(f"{url} serves {', '.join(names) or 'no model'}; name one with --model")
    return names[0]


def evaluate(
    server: Server,
    items: Sequence[Item | Text],
    concurrency: int,
    progress: Callable[[Item | Text], None] = lambda _: None,
) -> list[Result]:
    """Ask every item, `concurrency` at a time. Results are in the order of the items."""
    with (
        client(server.url, server.api_key, server.timeout, server.retries) as connected,
        ThreadPoolExecutor(concurrency) as pool,
    ):

        def ask_one(item: Item | Text) -> Result:
            result = _unless_too_long(connected, server, item)
            progress(item)
            return result

        futures = [pool.submit(ask_one, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # one that fails is enough: ask no more
            raise


def _unless_too_long(connected: OpenAI, server: Server, item: Item | Text) -> Result:
    """A prompt that the model has no positions for is a skipped item, not a wrong one."""
    import openai

    try:
        return ask(connected, server, item) if isinstance(item, Item) else read(connected, server, item)
    except openai.BadRequestError as error:
        if TOO_LONG not in error.message:
            raise
        thinking, nats = (item.thinking, None) if isinstance(item, Item) else (False, 0.0)
        return Result(item.task, item.id, item.digest, thinking, skipped=True, nats=nats)


def ask(connected: OpenAI, server: Server, item: Item) -> Result:
    """A question, temperature 0."""
    options: dict[str, Any] = {"tools": list(item.tools)} if item.tools else {}
    start = time.monotonic()
    answer = connected.chat.completions.create(
        model=server.model,
        messages=list(item.messages),  # type: ignore[arg-type]  # they are the set's own, as the API takes them
        temperature=0,
        max_tokens=server.max_tokens,
        extra_body={"chat_template_kwargs": {"enable_thinking": item.thinking}},
        **options,
    )
    found = answer_of(answer, item)
    return Result(
        item.task,
        item.id,
        item.digest,
        item.thinking,
        correct=found == item.expected,
        answer=found,
        finish_reason=answer.choices[0].finish_reason,
        tokens=answer.usage.completion_tokens if answer.usage else 0,
        seconds=round(time.monotonic() - start, 4),
    )


def read(connected: OpenAI, server: Server, item: Text) -> Result:
    """A text: vLLM's `prompt_logprobs`, each token given those before it."""
    start = time.monotonic()
    answer = connected.completions.create(
        model=server.model, prompt=item.text, temperature=0, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    positions = getattr(answer.choices[0], "prompt_logprobs", None)
    if not positions:
        raise EvalError(f"{server.url} gives no prompt_logprobs, which texts need; only vLLM's servers do")
    logprobs = [entry["logprob"] for position in positions[1:] for entry in position.values()]
    if len(logprobs) != len(positions) - 1:
        raise EvalError(
            f"{server.url}: expected {len(positions) - 1} logprobs of {item.task} {item.id}, found {len(logprobs)}"
        )
    return Result(
        item.task,
        item.id,
        item.digest,
        thinking=False,
        tokens=len(logprobs),
        seconds=round(time.monotonic() - start, 4),
        nats=-math.fsum(logprobs),
        bytes=len(item.text.encode()),
    )


def answer_of(answer: ChatCompletion, item: Item) -> str | dict[str, Any] | list[dict[str, Any]]:
    """Return the answer to compare: the text after the thinking, stripped; or the call (a list if not one)."""
    message = answer.choices[0].message
    if isinstance(item.expected, str):
        return (message.content or "").rpartition(CLOSE_THINKING)[2].strip()
    functions = [call.function for call in message.tool_calls or () if call.type == "function"]
    calls = [{"name": function.name, "arguments": _json(function.arguments)} for function in functions]
    return calls[0] if len(calls) == 1 else calls


def _json(text: str) -> Any:
    """Arguments as values; text that is no JSON stays text, which equals no expected arguments."""
    try:
        return json.loads(text)
    except ValueError:
        return text
