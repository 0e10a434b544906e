"""The outermost ASGI layer of the server: with an API key, every route but /health asks for it.

vLLM's own check covers the paths below /v1 and a few others, and leaves open what was mounted or added beside them.
Here nothing is open unless it is named. `moetier serve` puts the layer outermost with --middleware.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from moetier.launch.keys import HASHES, VARIABLE, digest, matches
from moetier.vllm.compat import honour_chosen_tools

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = "/health"
"""The one path that asks for no key: it says whether the server lives, and nothing else."""
POLICY_VIOLATION = 1008
"""Why a websocket is closed."""
REFUSAL = {
    "error": {
        "message": "expected an API key of this server; send `Authorization: Bearer KEY` or `x-api-key: KEY`",
        "type": "AuthenticationError",
        "param": None,
        "code": 401,
    }
}


class Access:
    """Lets a request with a right key through, and refuses every other one before anything else has seen it."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.digests = _digests()
        honour_chosen_tools()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan" or not self.digests or _needs_none(scope) or self._has_key(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(scope, send)
        else:
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "an API key is missing"})

    def _has_key(self, scope: Scope) -> bool:
        return any(matches(key, self.digests) for key in _keys(scope))


def _digests() -> tuple[bytes, ...]:
    """Digests of the right keys; () where the launcher says that none is asked for."""
    told = os.environ.get(HASHES)
    if told is not None:
        return tuple(bytes.fromhex(value) for value in told.split())
    key = os.environ.get(VARIABLE)
    if not key:
        raise ValueError(f"{__name__}: expected a key in {VARIABLE}, found none; set it, or leave --middleware out")
    return (digest(key.encode()),)


def _needs_none(scope: Scope) -> bool:
    """Whether it is /health, or the question of a browser before a request to another origin (CORS).

    vLLM's CORS layer answers that question itself, from what --allowed-origins says.
    """
    if scope["type"] != "http":
        return False
    if scope["path"] in (OPEN, f"{scope.get('root_path', '')}{OPEN}"):
        return True
    names = {name for name, _ in scope["headers"]}
    return scope["method"] == "OPTIONS" and {b"origin", b"access-control-request-method"} <= names


def _keys(scope: Scope) -> Iterator[bytes]:
    """Keys that a request gives, as OpenAI's clients do or as Anthropic's."""
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()


async def _refuse(scope: Scope, send: Send) -> None:
    body = json.dumps(REFUSAL).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
