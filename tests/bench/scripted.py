"""A server whose timing is known: OpenAI's streams, sent at scripted moments.

Every request follows one `Script`. The moments are absolute, from the request's arrival, so that a late one does not
move those after it. On a busy machine they are late all the same: what is to be exact runs in simulated.py.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

POSITIONS = 1 << 16


@dataclass(frozen=True)
class Script:
    """How a request is answered.

    first: seconds to the first token. gap: between chunks. per_chunk: tokens that each chunk brings. reasoning: so many
    chunks are reasoning before content begins. role_at: when the empty chunk with the role is sent, None: not at all.
    burst: chunks come in pairs, the second at once after the first. stall_after: chunks after which nothing comes.
    """

    first: float = 0.1
    gap: float = 0.05
    per_chunk: int = 1
    reasoning: int = 0
    role_at: float | None = None
    running_usage: bool = True
    final_usage: bool = True
    stop_after: int | None = None
    """Tokens after which the answer ends by itself."""
    stall_after: int | None = None
    break_after: int | None = None
    """Chunks after which the connection is closed without an end."""
    error_after: int | None = None
    """Chunks after which the stream carries an error, with status 200."""
    fail_every: int | None = None
    """Every n-th request is answered with status 500."""
    serial: bool = False
    """One request at a time, the others wait: a server that cannot keep up."""
    cached: int = 0
    """Prompt tokens of each request that the prefix cache gives."""
    extra_prompt_tokens: int = 0
    """How many more prompt tokens are counted than were sent, as by a template."""
    metrics: bool = True
    end_anyway: bytes | None = None
    """What ends the answer instead of a finish reason and [DONE]."""


class _Server:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests = 0
        self.counted = {"prompt": 0, "hits": 0, "generated": 0}
        self.running = 0
        self.turn = asyncio.Lock()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        size = next((int(x.split(":")[1]) for x in head.splitlines() if x.lower().startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(size)) if size else {}
        arrived = time.perf_counter()
        if path == "/v1/models":
            return _answer(writer, json.dumps({"data": [{"id": "scripted", "max_model_len": POSITIONS}]}))
        if path == "/tokenize":
            return _answer(writer, json.dumps({"tokens": [ord(x) for x in body["prompt"]]}))
        if path == "/detokenize":
            return _answer(writer, json.dumps({"prompt": "".join(map(chr, body["tokens"]))}))
        if path == "/metrics":
            return _answer(writer, self._metrics(), 200 if self.script.metrics else 404)
        self.requests += 1
        if self.script.fail_every and self.requests % self.script.fail_every == 0:
            return _answer(writer, "out of order", 500)
        prompt = len(body["prompt"]) if "prompt" in body else sum(len(m["content"]) for m in body["messages"])
        prompt += self.script.extra_prompt_tokens
        self.counted["prompt"] += prompt
        self.counted["hits"] += self.script.cached
        if not body.get("stream"):
            return _answer(writer, json.dumps(_whole(prompt)))
        self.running += 1
        try:
            if self.script.serial:
                async with self.turn:
                    return await self._stream(writer, body, prompt, time.perf_counter(), "messages" in body)
            return await self._stream(writer, body, prompt, arrived, "messages" in body)
        finally:
            self.running -= 1

    def _metrics(self) -> str:
        return (
            f'vllm:prompt_tokens_total{{engine="0",model_name="scripted"}} {self.counted["prompt"]}\n'
            f'vllm:prefix_cache_hits_total{{engine="0",model_name="scripted"}} {self.counted["hits"]}\n'
            f'vllm:generation_tokens_total{{engine="0",model_name="scripted"}} {self.counted["generated"]}\n'
            f'vllm:num_requests_running{{engine="0",model_name="scripted"}} {self.running}\n'
        )

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], prompt: int, began: float, chat: bool
    ) -> bool:
        script = self.script
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        most = body.get("max_tokens") or body["max_completion_tokens"]
        total = most if script.stop_after is None else min(script.stop_after, most)
        if script.role_at is not None:
            await _sleep_until(began + script.role_at)
            _event(writer, _chunk(chat, {"role": "assistant", "content": ""}, None, prompt, 0, script))
        sent = number = 0
        while sent < total:
            if script.stall_after == number:
                await asyncio.sleep(3600)
            if script.break_after == number or script.error_after == number:
                if script.error_after == number:
                    _event(writer, {"error": {"message": "engine died", "code": 500}})
                await writer.drain()
                return False
            await _sleep_until(began + script.first + number * script.gap)
            new = min(script.per_chunk, total - sent)
            sent, number = sent + new, number + 1
            self.counted["generated"] += new
            kind = "reasoning" if number <= script.reasoning else "content"
            finish = None if sent < total or script.end_anyway is not None else ("stop" if total < most else "length")
            _event(writer, _chunk(chat, {kind: "x" * new}, finish, prompt, sent, script))
            await writer.drain()
        if script.end_anyway is not None:
            writer.write(script.end_anyway + b"0\r\n\r\n")  # the answer is whole as HTTP sees it
            await writer.drain()
            return True
        if script.final_usage:
            _event(writer, {"choices": [], "usage": _usage(prompt, sent)})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        return True


def _usage(prompt: int, sent: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": sent, "total_tokens": prompt + sent}


def _whole(prompt: int) -> dict[str, Any]:
    """An answer that is not streamed."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "scripted", "choices": [choice]} | {
        "usage": _usage(prompt, 1)
    }


def _chunk(
    chat: bool, delta: dict[str, str], finish: str | None, prompt: int, sent: int, script: Script
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": delta} if chat else {"text": delta.get("content", "") + delta.get("reasoning", "")}
    return {"choices": [choice]} | ({"usage": _usage(prompt, sent)} if script.running_usage else {})


def _event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    data = f"data: {json.dumps(value)}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.perf_counter()))


def _answer(writer: asyncio.StreamWriter, text: str, status: int = 200) -> bool:
    data = text.encode()
    kind = "application/json" if text.startswith("{") else "text/plain"
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return True


async def answering(listening: socket.socket, script: Script) -> None:
    """Answer on this socket for ever."""
    server = await asyncio.start_server(_Server(script).connected, sock=listening)
    await server.serve_forever()


def _run(listening: socket.socket, script: Script) -> None:
    asyncio.run(answering(listening, script))


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    """A server in a process of its own; yields its address."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_run, args=(listening, script), daemon=True)
        process.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            process.kill()
            process.join()
