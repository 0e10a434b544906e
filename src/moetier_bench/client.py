"""A thin asynchronous client that times one streamed answer of an OpenAI-compatible server.

It is ours because those at hand count otherwise: tests/bench/test_client_faults.py reproduces where, and
docs/measure.md says what vLLM's own client reports of a server whose timing is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from moetier_bench.samples import Stream

BROKEN = (aiohttp.ClientError, TimeoutError, OSError, ValueError, TypeError, AttributeError, RecursionError)
"""Exceptions of a server's failure or nonsense."""
USAGE = {"include_usage": True, "continuous_usage_stats": True}
"""So that every chunk says how many tokens there are by then."""


@dataclass
class Recorder:
    """Observation of one answer while it streams; `cut` may be set by another task to close it."""

    due: float
    sent: float = 0.0
    at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    counted: bool = True
    """Whether every chunk came with usage."""
    status: int | None = None
    error: str | None = None
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    text: list[str] = field(default_factory=list)

    def take(self, now: float, chunk: dict[str, Any]) -> None:
        """Note a chunk: whatever raises the usage, or carries text where there is no usage, is an arrival."""
        if "error" in chunk:
            self.error = f"error in the stream: {str(chunk['error'])[:200]}"
            return
        usage, choices = chunk.get("usage"), chunk.get("choices") or []
        text = "".join(_texts(choice) for choice in choices)
        if text:
            self.text.append(text)
        for choice in choices:
            self.finish = choice.get("finish_reason") or self.finish
        if usage is not None:
            new = int(usage.get("completion_tokens") or 0) - sum(self.tokens)
            self.usage = usage
            if new > 0 and choices and self.counted:
                self.at.append(now)
                self.tokens.append(new)
                return
        if text and (usage is None or not self.counted):
            self.counted = False
            self.at.append(now)

    def stream(self, start: float, end: float) -> Stream:
        """The record; times become relative to the trial's start."""
        details = self.usage.get("prompt_tokens_details") or {}
        marks = [self.sent, *self.at]
        micros = [round((mark - self.sent) * 1e6) for mark in marks]
        cut = self.cut.is_set() and self.finish is None and self.error is None
        return Stream(
            due=round(self.due - start, 6),
            sent=round(self.sent - start, 6),
            end=round(end - start, 6),
            status=self.status,
            error=self.error,
            prompt_tokens=self.usage.get("prompt_tokens"),
            completion_tokens=self.usage.get("completion_tokens"),
            cached_tokens=details.get("cached_tokens"),
            finish=self.finish,
            cut=cut,
            gaps_us=tuple(after - before for before, after in pairwise(micros)),
            tokens=tuple(self.tokens) if self.counted and self.at else None,
            digest=hashlib.sha256("".join(self.text).encode()).hexdigest()[:16],
        )


def _texts(choice: dict[str, Any]) -> str:
    """All that a choice of a chunk carries, of whatever kind."""
    delta = choice.get("delta") or {}
    calls = json.dumps(delta["tool_calls"], sort_keys=True) if delta.get("tool_calls") else ""
    parts = (choice.get("text"), delta.get("reasoning"), delta.get("reasoning_content"), delta.get("content"), calls)
    return "".join(part for part in parts if part)


async def stream(
    session: aiohttp.ClientSession, path: str, body: dict[str, Any], start: float, recorder: Recorder
) -> Stream:
    """Ask with `body` at once and read until the answer ends or is cut. What fails is in the record, not raised.

    start: the trial's start by `time.perf_counter`, as all times here.
    """
    asked = {**body, "stream": True, "stream_options": USAGE}
    recorder.sent = time.perf_counter()
    try:
        async with session.post(path, json=asked) as response:
            recorder.status = response.status
            if response.status == 200:
                await _read(response, recorder)
            else:
                recorder.error = f"HTTP status {response.status}: {(await response.text())[:200]}"
    except BROKEN as error:
        recorder.error = f"{type(error).__name__}: {str(error)[:200]}"
    return recorder.stream(start, time.perf_counter())


async def _read(response: aiohttp.ClientResponse, recorder: Recorder) -> None:
    reading = asyncio.ensure_future(_chunks(response, recorder))
    cutting = asyncio.ensure_future(recorder.cut.wait())
    try:
        await asyncio.wait({reading, cutting}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            await reading
    finally:
        for task in (reading, cutting):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, *BROKEN):
                await task
        if recorder.cut.is_set():
            response.close()


async def _chunks(response: aiohttp.ClientResponse, recorder: Recorder) -> None:
    async for line in _lines(response):
        now = time.perf_counter()
        if not line.startswith(b"data:"):
            continue  # comments keep a connection alive
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        recorder.take(now, json.loads(data))
        if recorder.error is not None:
            return
    if recorder.finish is None and recorder.error is None:
        recorder.error = "the stream broke off before its end"


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length, as soon as each is whole."""
    rest = b""
    async for block in response.content.iter_any():
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line.strip()
