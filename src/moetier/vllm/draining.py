"""The frontend's part of a drain: new requests are refused, open ones end by themselves or with an error.

An ASGI layer around vLLM's application. A request that is cut off looks to vLLM as if its client had gone, so that the
engine drops it; the client reads an error, as an event of its stream or as status 503.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import math
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from moetier.launch import drain
from moetier.launch.drain import FOLDER_VARIABLE, LOOK_SECONDS, Report
from moetier.launch.failure import write_ended

logger = init_logger(f"vllm.{__name__}")

WIND_DOWN_SECONDS = 1.0
"""How long vLLM's handler may take to notice that its client has gone."""
SEND_SECONDS = 1.0
"""How long a client that does not read may keep the last words to it."""
RESTART_SECONDS = 60
"""When to try again at the earliest, if nothing better is known: a start takes about that."""
UNAVAILABLE = 503
NOT_REFUSED = ("/metrics", "/version")
"""Paths that a server which ends still answers; /health says that it does."""


class Draining:
    """The outermost layer, made by vLLM (`--middleware`). Does nothing without a launcher's scratch folder."""

    def __init__(self, app: Any) -> None:
        self.app = app
        folder = os.environ.get(FOLDER_VARIABLE)
        self.folder = Path(folder) if folder else None
        self.requests: set[_Request] = set()
        self.cut = 0
        self._watch: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, unless the server ends."""
        if self.folder is None or scope["type"] not in ("http", "websocket", "lifespan"):
            await self.app(scope, receive, send)
        elif scope["type"] == "lifespan":
            engines = multiprocessing.active_children()
            self._watch = asyncio.create_task(self._watch_for_drain(self.folder, engines))
            atexit.register(_tell_how_they_ended, engines, self.folder)
            await self.app(scope, receive, send)
        elif scope.get("path") not in NOT_REFUSED and drain.deadline(self.folder) is not None:
            await _Request(scope, receive, send).refuse(drain.deadline(self.folder) or 0.0)
        else:
            request = _Request(scope, receive, send)
            self.requests.add(request)
            try:
                await request.run(self.app)
            finally:
                self.requests.discard(request)

    async def _watch_for_drain(self, folder: Path, engines: list[Any]) -> None:
        """Announce this process; once a drain is asked for, report it, and cut off what is open at its deadline.

        An engine that has ended is told before its requests are reported as ended too: they were not drained.
        """
        state, said, dead = Report(os.getpid()), None, 0
        while True:
            until = drain.deadline(folder)
            if until is not None and dead != (dead := sum(engine.exitcode is not None for engine in engines)):
                _tell_how_they_ended(engines, folder)
            if until is not None and time.monotonic() >= until:
                open_requests = [request for request in self.requests if not request.cut.done()]
                self.cut += len(open_requests)
                for request in open_requests:
                    request.cut.set_result(None)
                if open_requests:
                    logger.warning("moetier: the time to end is over, %d requests cut off", len(open_requests))
            state = Report(os.getpid(), until is not None, len(self.requests), self.cut)
            if state != said and (said is None or until is not None):
                with contextlib.suppress(OSError):
                    drain.report(folder, state)
                    said = state
            await asyncio.sleep(LOOK_SECONDS)


def _tell_how_they_ended(processes: list[Any], folder: Path) -> None:
    """Tell the launcher how the engine's processes ended: their exit codes, which only a parent learns."""
    write_ended(folder, [(process.name, process.exitcode) for process in processes if process.exitcode is not None])


class _Request:
    """A request on its way through. cut: done when it is to be cut off."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started = self.streams = self.ended = False
        self.events = 0

    async def run(self, app: Any) -> None:
        task = asyncio.ensure_future(app(self.scope, self.receive, self.send))
        try:
            await asyncio.wait({task, self.cut}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._say_cut(), SEND_SECONDS)
                await asyncio.wait({task}, timeout=WIND_DOWN_SECONDS)
        finally:
            if not task.done():
                task.cancel()
        if self.cut.done():
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task  # what it says of a client that has gone is of no interest
            return
        await task

    async def receive(self) -> Any:
        """Pass on what the client sends; that it has gone, if the request is cut off."""
        message = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait({message, self.cut}, return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                return message.result()
        finally:
            message.cancel()
        return {
            "type": "websocket.disconnect" if self.scope["type"] == "websocket" else "http.disconnect",
            "code": 1012,
        }

    async def send(self, message: Any) -> None:
        """Pass on what vLLM answers; nothing more of it once the request is cut off."""
        if self.cut.done():
            return
        if message["type"] == "http.response.start":
            self.started = True
            kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            self.streams = any(value.startswith(b"text/event-stream") for value in kinds)
        elif message["type"] == "http.response.body":
            self.events += 1
            self.ended = not message.get("more_body", False)
        elif message["type"] == "websocket.accept":
            self.started = True
        await self._send(message)

    async def refuse(self, until: float) -> None:
        """Answer that the server ends."""
        wait = max(1, math.ceil(until - time.monotonic()))
        await self._unavailable("the server is ending and takes no new requests", wait)

    async def _say_cut(self) -> None:
        text = "the server is ending and its time to drain is over: this request was cut off"
        if not self.started or self.scope["type"] == "websocket":
            await self._unavailable(text, RESTART_SECONDS)
        elif self.streams and not self.ended:
            body = f"{_error_event(self.scope.get('path', ''), text, self.events)}\n\n".encode()
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        # Else the answer is under way or whole; one that lacks its end is broken off by the server when we return.

    async def _unavailable(self, text: str, retry_after: int) -> None:
        if self.scope["type"] == "websocket":
            await self._send({"type": "websocket.close", "code": 1012, "reason": text})
            return
        body = json.dumps(_error(self.scope.get("path", ""), text)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", str(retry_after).encode()),
            (b"connection", b"close"),
        ]
        await self._send({"type": "http.response.start", "status": UNAVAILABLE, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _error(path: str, text: str) -> dict[str, Any]:
    """An error body in the form of the API that was asked."""
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": "overloaded_error", "message": text}}
    return {"error": {"message": text, "type": "ServiceUnavailableError", "param": None, "code": UNAVAILABLE}}


def _error_event(path: str, text: str, events: int) -> str:
    """An error as an event of a stream, in the form of the API that was asked."""
    if path.startswith("/v1/messages"):
        return f"event: error\ndata: {json.dumps(_error(path, text))}"
    if path.startswith("/v1/responses"):
        event = {"type": "error", "code": "server_error", "message": text, "param": None, "sequence_number": events}
        return f"event: error\ndata: {json.dumps(event)}"
    return f"data: {json.dumps(_error(path, text))}"
