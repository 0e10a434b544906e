"""The layer that asks for keys, around an application of mounted parts, redirects and websockets as vLLM's is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi import FastAPI, WebSocket
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Mount
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from moetier.launch.keys import HASHES, VARIABLE, hashes_of
from moetier.vllm.access import Access

KEYS = ("first", "second", "two words")
PATHS = (
    *("/", "/v1/models", "//v1/models", "/v1/../v1/models", "/v1/models/", "/V1/models", "/invocations", "/nowhere"),
    *("/metrics", "/metrics/x", "//metrics", "/docs", "/openapi.json", "/v1%2fmodels", "/%761/models"),
    *("/healthy", "/health/", "/health/x", "//health", "/HEALTH", "/x/health", "/health/../metrics", "/health%2f"),
)
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "BREW")


def application(root_path: str = "") -> FastAPI:
    app = FastAPI(root_path=root_path)
    app.add_api_route("/health", lambda: "well", methods=["GET"])
    for path in ("/v1/models", "/invocations"):
        app.add_api_route(path, lambda: "computed", methods=["GET", "POST"])

    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"counted"})

    app.routes.append(Mount("/metrics", mounted))

    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("heard")
        await socket.close()

    app.add_api_websocket_route("/v1/realtime", echo)
    app.add_middleware(CORSMiddleware, allow_origins=["http://page"], allow_methods=["*"])
    app.add_middleware(Access)  # as vLLM adds those of --middleware: last
    return app


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv(HASHES, hashes_of(KEYS))
    with TestClient(application(), follow_redirects=False) as client:
        yield client


WRONG: dict[str, dict[str, str]] = {
    "none": {},
    "wrong": {"Authorization": "Bearer third"},
    "empty": {"Authorization": "Bearer "},
    "bare": {"Authorization": "first"},
    "basic": {"Authorization": "Basic first"},
    "beginning": {"Authorization": "Bearer firs"},
    "longer": {"Authorization": "Bearer first second"},
    "hash": {"Authorization": f"Bearer {hashes_of(KEYS[:1])}"},
    "empty-x": {"x-api-key": ""},
    "wrong-x": {"x-api-key": "third"},
    "cookie": {"Cookie": "x-api-key=first"},
    "origin": {"Origin": "http://page"},
}
RIGHT: dict[str, dict[str, str]] = {
    "bearer": {"Authorization": "Bearer first"},
    "second": {"Authorization": "Bearer second"},
    "lower": {"authorization": "bearer first"},
    "upper": {"AUTHORIZATION": "BEARER first"},
    "spaces": {"Authorization": "Bearer   first "},
    "words": {"Authorization": "Bearer two words"},
    "x": {"x-api-key": "first"},
    "X": {"X-Api-Key": "second"},
    "either": {"Authorization": "Bearer none", "x-api-key": "first"},
}


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
def test_without_a_right_key_every_path_and_method_is_refused(headers: dict[str, str], client: TestClient) -> None:
    for path, method in itertools.product(PATHS, METHODS):
        answer = client.request(method, path, headers=headers)
        assert answer.status_code == 401, (method, path, answer.status_code)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert method == "HEAD" or answer.json()["error"]["code"] == 401


@pytest.mark.parametrize("headers", RIGHT.values(), ids=RIGHT)
def test_with_a_right_key_an_answer_is_the_applications(headers: dict[str, str], client: TestClient) -> None:
    assert client.get("/v1/models", headers=headers).json() == "computed"
    assert client.get("/metrics/", headers=headers).text == "counted"
    assert client.post("/invocations", headers=headers).json() == "computed"
    assert client.get("/nowhere", headers=headers).status_code == 404


@pytest.mark.parametrize("headers", [{}, WRONG["wrong"], RIGHT["x"]], ids=["none", "wrong", "right"])
def test_health_asks_for_no_key(headers: dict[str, str], client: TestClient) -> None:
    assert client.get("/health", headers=headers).json() == "well"
    assert client.get("/health?x=/metrics", headers=headers).json() == "well"


def test_behind_a_path_health_is_open_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HASHES, hashes_of(KEYS))
    with TestClient(application("/proxied"), root_path="") as client:
        assert client.get("/proxied/health").json() == "well"
        assert client.get("/health").json() == "well"
        for path in ("/proxied/v1/models", "/v1/models", "/proxied/metrics", "/proxied/proxied/health"):
            assert client.get(path).status_code == 401
        assert client.get("/proxied/v1/models", headers=RIGHT["x"]).json() == "computed"


def test_a_browsers_question_about_another_origin_is_answered_and_reaches_nothing_else(client: TestClient) -> None:
    question = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    answer = client.options("/v1/models", headers=question)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "http://page")
    assert client.options("/v1/models", headers={**question, "Origin": "http://other"}).status_code == 400
    assert client.post("/v1/models", headers=question).status_code == 401


def test_websockets_ask_for_a_key(client: TestClient) -> None:
    with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/v1/realtime"):
        pass
    assert refused.value.code == 1008
    with client.websocket_connect("/v1/realtime", headers=RIGHT["bearer"]) as socket:
        assert socket.receive_text() == "heard"


def test_without_keys_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HASHES, hashes_of(()))
    monkeypatch.setenv(VARIABLE, "not-looked-at")
    with TestClient(application()) as client:
        assert client.get("/v1/models").json() == "computed"
        with client.websocket_connect("/v1/realtime") as socket:
            assert socket.receive_text() == "heard"


def test_without_the_launcher_the_key_is_vllms_and_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HASHES, raising=False)
    monkeypatch.setenv(VARIABLE, "own")
    with TestClient(application()) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"x-api-key": "own"}).json() == "computed"
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ValueError, match="expected a key in VLLM_API_KEY"):
        Access(application())


def test_a_kind_of_connection_that_is_not_known_is_not_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HASHES, hashes_of(KEYS))
    reached, sent = [], []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message["type"])

    scope = {"type": "webtransport", "path": "/health", "headers": []}
    asyncio.run(Access(inner)(scope, inner, send))  # type: ignore[arg-type]
    assert (reached, sent) == ([], ["websocket.close"])
