"""An OpenAI-compatible server as probes see it: streamed answers, tokens of a text, its own counters."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from moetier_bench import BenchError
from moetier_bench.client import Recorder, stream
from moetier_bench.samples import Stream

PATIENCE = 2.0
"""Seconds in which the counters of an answer that has ended must show it."""
PROMPT_TOKENS = "vllm:prompt_tokens_total"
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_EVERYWHERE = {"engine", "model_name"}
_SUMMED = {"layer", "rank"}
"""Labels of ours over which counters are added up."""


@dataclass(frozen=True)
class Ask:
    """A request. path: of the API, such as v1/completions."""

    path: str
    body: dict[str, Any]


@dataclass
class Endpoint:
    """A connected server. positions: the most tokens of prompt and answer together."""

    session: aiohttp.ClientSession
    model: str
    positions: int

    def completion(self, prompt: Sequence[int] | str, max_tokens: int, **more: Any) -> Ask:
        """Greedy completion of tokens or of a text."""
        asked = prompt if isinstance(prompt, str) else list(prompt)
        body = {"model": self.model, "prompt": asked, "max_tokens": max_tokens, "temperature": 0, **more}
        return Ask("v1/completions", body)

    def chat(self, asked: str | Sequence[dict[str, str]], max_tokens: int, **more: Any) -> Ask:
        """Greedy answer to a user's text, or to the last message of a conversation."""
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, **more}
        return Ask("v1/chat/completions", body)

    async def stream(self, ask: Ask, start: float, recorder: Recorder) -> Stream:
        """Stream one answer."""
        return await stream(self.session, f"/{ask.path}", ask.body, start, recorder)

    async def tokens(self, text: str) -> list[int]:
        """Tokens of a text, without any that the tokenizer would add."""
        asked = {"model": self.model, "prompt": text, "add_special_tokens": False}
        async with self.session.post("/tokenize", json=asked) as answer:
            if answer.status != 200:
                raise BenchError(f"the server does not tokenize (status {answer.status}); exact prompts need /tokenize")
            return [int(token) for token in (await answer.json())["tokens"]]

    async def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens; as a part of a conversation it may be a few tokens more or fewer."""
        async with self.session.post("/detokenize", json={"model": self.model, "tokens": list(tokens)}) as answer:
            if answer.status != 200:
                raise BenchError(f"the server gives no text of tokens (status {answer.status}); it needs /detokenize")
            return str((await answer.json())["prompt"])

    async def counters(self) -> dict[str, float]:
        """Counters and gauges of /metrics, without histograms' buckets; empty where the server has none."""
        async with self.session.get("/metrics") as answer:
            return parse_metrics(await answer.text()) if answer.status == 200 else {}

    async def counters_after(self, before: dict[str, float], prompt_tokens: int) -> dict[str, float]:
        """Return what counters grew by since `before`, once they show that many prompt tokens (or time is over)."""
        deadline = time.monotonic() + PATIENCE
        while True:
            grown = growth(before, await self.counters())
            if grown.get(PROMPT_TOKENS, 0) >= prompt_tokens or time.monotonic() > deadline:
                return grown
            await asyncio.sleep(0.02)

    async def idle(self, seconds: float = 60) -> None:
        """Wait until no request runs or waits, as far as the server says."""
        deadline = time.monotonic() + seconds
        while await self._busy():
            if time.monotonic() > deadline:
                raise BenchError(f"requests still run on the server after {seconds:.0f} s; is someone else using it?")
            await asyncio.sleep(0.05)

    async def _busy(self) -> bool:
        counters = await self.counters()
        return any(counters.get(name, 0) > 0 for name in RUNNING)


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """By how much counters grew; gauges and what stayed are left out."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items() if "_total" in name}
    return {name: value for name, value in grown.items() if value != 0}


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text as name{labels} to value; layers and ranks are added up."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None or match[1].endswith(("_bucket", "_created")) or match[1].startswith(("python_", "process_")):
            continue
        labels = [(name, value) for name, value in _LABEL.findall(match[2] or "") if name not in _EVERYWHERE]
        if any(name in _SUMMED for name, _ in labels):
            if not match[1].endswith("_total"):
                continue  # a sum of shares says nothing
            labels = [(name, value) for name, value in labels if name not in _SUMMED]
        key = match[1] + ("{" + ",".join(f"{name}={value}" for name, value in sorted(labels)) + "}" if labels else "")
        value = float(match[3])
        if value == value and abs(value) != float("inf"):
            found[key] = found.get(key, 0.0) + value
    return found


@asynccontextmanager
async def connect(url: str, api_key: str | None, model: str | None, timeout: float = 3600) -> AsyncIterator[Endpoint]:
    """Connect to a server that serves `model` (None: the only one); BenchError if it does not."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limit = aiohttp.ClientTimeout(total=timeout, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, headers=headers, timeout=limit, connector=connector) as session:
        try:
            async with session.get("/v1/models") as answer:
                answer.raise_for_status()
                served = (await answer.json())["data"]
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            raise BenchError(f"{url} does not answer as a server does ({error}); is it running there?") from error
        chosen = [entry for entry in served if model is None or entry["id"] == model]
        if len(chosen) != 1:
            names = ", ".join(entry["id"] for entry in served) or "nothing"
            raise BenchError(f"{url}: expected the model {model or 'to be one'}, found {names}")
        yield Endpoint(session, chosen[0]["id"], int(chosen[0].get("max_model_len") or 1 << 20))
