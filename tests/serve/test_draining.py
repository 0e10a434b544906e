"""The drain between launcher and frontend: the layer before vLLM's application, and the files they share."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from moetier.launch import drain
from moetier.launch.drain import FOLDER_VARIABLE, Report
from moetier.launch.failure import read_ended
from moetier.vllm.draining import Draining

Message = dict[str, Any]
START = {"type": "http.response.start", "status": 200}
STREAM = {**START, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
LIMIT_SECONDS = 60


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answer in the way that the path names; what is not short never ends by itself."""
    if scope["type"] == "lifespan":
        await asyncio.sleep(LIMIT_SECONDS)
    path = scope["path"].rpartition("/")[2]
    if path == "deaf":
        while True:
            await asyncio.sleep(1)
    if path == "short":
        await send({**START, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        return
    if path != "silent":
        await send(STREAM)
        await send({"type": "http.response.body", "body": b'data: {"token": 1}\n\n', "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass
    await send({"type": "http.response.body", "body": b"too late", "more_body": False})


class Client:
    """A request to the layer, as an HTTP server hands it on."""

    def __init__(self, layer: Draining, path: str) -> None:
        self.sent: list[Message] = []
        self.task = asyncio.ensure_future(layer({"type": "http", "path": path}, self._receive, self._send))

    async def _receive(self) -> Message:
        await asyncio.sleep(LIMIT_SECONDS)
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


@pytest.fixture
def layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Draining:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    drain.prepare(tmp_path)
    return Draining(application)


def run(layer: Draining, job: Callable[[], Awaitable[None]]) -> None:
    """Run a job beside the layer's own watch."""

    async def beside() -> None:
        watch = asyncio.ensure_future(layer({"type": "lifespan"}, None, None))
        await asyncio.sleep(0)
        await asyncio.wait_for(job(), LIMIT_SECONDS)
        watch.cancel()

    asyncio.run(beside())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_what_is_open_at_the_deadline_ends_with_an_error_and_what_is_new_is_refused(
    layer: Draining, tmp_path: Path
) -> None:
    async def job() -> None:
        assert layer.folder is not None
        short = Client(layer, "/v1/short")
        await short.task
        assert short.body == "{}"
        chat, message, response = (
            Client(layer, f"/v1/{api}/s") for api in ("chat/completions", "messages", "responses")
        )
        silent, deaf = Client(layer, "/v1/silent"), Client(layer, "/v1/deaf")
        streams = [chat, message, response]
        await until(lambda: all(len(client.sent) == 2 for client in streams))
        assert drain.reports(tmp_path) == [Report(os.getpid())]

        drain.ask(tmp_path, time.monotonic() + LIMIT_SECONDS)
        new = Client(layer, "/v1/short")
        await new.task
        assert new.sent[0]["status"] == 503
        assert 0 < int(dict(new.sent[0]["headers"])[b"retry-after"]) <= LIMIT_SECONDS
        assert "takes no new requests" in json.loads(new.body)["error"]["message"]
        health, metrics = Client(layer, "/health"), Client(layer, "/metrics")
        await health.task
        assert health.sent[0]["status"] == 503
        await until(lambda: bool(metrics.sent))
        assert metrics.sent[0]["status"] == 200
        metrics.task.cancel()
        await until(lambda: drain.reports(tmp_path) == [Report(os.getpid(), True, 5, 0)])

        drain.ask(tmp_path, time.monotonic())
        await asyncio.gather(*(client.task for client in (*streams, silent, deaf)))
        assert silent.sent[0]["status"] == deaf.sent[0]["status"] == 503
        assert "cut off" in json.loads(silent.body)["error"]["message"]
        for client in streams:
            assert "too late" not in client.body
            assert client.sent[-1]["more_body"] is False
        event = json.loads(chat.body.split("\n\n")[1].removeprefix("data: "))
        assert event["error"]["code"] == 503
        assert "[DONE]" not in chat.body
        for client, kind in ((message, "error"), (response, "error")):
            name, data = client.body.split("\n\n")[1].split("\n")
            assert name == "event: error"
            assert json.loads(data.removeprefix("data: "))["type"] == kind
        await until(lambda: drain.reports(tmp_path) == [Report(os.getpid(), True, 0, 5)])

    run(layer, job)


def test_the_launcher_waits_for_the_last_request_and_no_longer(layer: Draining, tmp_path: Path) -> None:
    async def job() -> None:
        client = Client(layer, "/v1/silent")
        await until(lambda: drain.reports(tmp_path) == [Report(os.getpid())] and bool(layer.requests))
        waiting = asyncio.create_task(
            asyncio.to_thread(drain.drain, tmp_path, time.monotonic() + LIMIT_SECONDS, lambda: True, lambda: False)
        )
        await until(lambda: drain.reports(tmp_path) == [Report(os.getpid(), True, 1, 0)])
        assert not waiting.done()
        client.task.cancel()
        assert await waiting == drain.Drained(cut=0, reported=True)

    run(layer, job)


def test_an_engine_that_dies_is_told_before_its_requests_are_over(layer: Draining, tmp_path: Path) -> None:
    engine = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(LIMIT_SECONDS,), name="EngineCore")
    engine.start()

    async def job() -> None:
        client = Client(layer, "/v1/silent")
        await until(lambda: drain.reports(tmp_path) == [Report(os.getpid())] and bool(layer.requests))
        drain.ask(tmp_path, time.monotonic() + LIMIT_SECONDS)
        await until(lambda: drain.reports(tmp_path) == [Report(os.getpid(), True, 1, 0)])
        assert read_ended(tmp_path) == []
        engine.kill()
        await asyncio.to_thread(engine.join)
        client.task.cancel()  # as its client reads vLLM's error
        await until(lambda: drain.reports(tmp_path) == [Report(os.getpid(), True, 0, 0)])
        assert read_ended(tmp_path) == [("EngineCore", -signal.SIGKILL)]

    run(layer, job)


def test_a_second_signal_cuts_off_at_once(layer: Draining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "REPORT_SECONDS", LIMIT_SECONDS)  # on a loaded machine

    async def job() -> None:
        client = Client(layer, "/v1/silent")
        await until(lambda: drain.reports(tmp_path) == [Report(os.getpid())] and bool(layer.requests))
        far = time.monotonic() + 10 * LIMIT_SECONDS
        drained = await asyncio.to_thread(drain.drain, tmp_path, far, lambda: True, lambda: True)
        assert drained == drain.Drained(cut=1, reported=True)
        await client.task

    run(layer, job)


def test_without_a_frontend_that_reports_nobody_waits(tmp_path: Path) -> None:
    drain.prepare(tmp_path)
    far = time.monotonic() + 10 * LIMIT_SECONDS
    assert drain.drain(tmp_path, far, lambda: True, lambda: False) == drain.Drained(cut=0, reported=False)
    drain.report(tmp_path, Report(2**22 + 1, True, 3))  # of a process that there is none of
    assert not drain.reports(tmp_path)


def test_a_frontend_that_does_not_answer_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "REPORT_SECONDS", 0)
    drain.prepare(tmp_path)
    drain.report(tmp_path, Report(os.getpid()))
    found = drain.drain(tmp_path, time.monotonic(), lambda: True, lambda: False)
    assert found == drain.Drained(cut=0, reported=False), "what it cut is unknown"


def test_a_drain_takes_no_space(tmp_path: Path) -> None:
    """So it is asked for and reported on a full disk."""
    drain.prepare(tmp_path)
    drain.report(tmp_path, Report(os.getpid()))
    sizes = {path: path.stat().st_blocks for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (drain.FILE_BYTES, limits[1]))
    try:
        drain.ask(tmp_path, 1e12)
        drain.report(tmp_path, Report(os.getpid(), True, 99999, 99999))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert drain.deadline(tmp_path) == 1e12
    assert drain.reports(tmp_path) == [Report(os.getpid(), True, 99999, 99999)]
    assert sizes == {path: path.stat().st_blocks for path in tmp_path.iterdir()}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"until": "x"}', b"\xff"])
def test_a_file_that_is_not_written_whole_asks_for_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / drain.ASKED).write_bytes(content)
    (tmp_path / "requests-1.json").write_bytes(content)
    assert drain.deadline(tmp_path) is None
    assert drain.reports(tmp_path) == []


def test_vllms_end_has_its_part_of_the_time() -> None:
    assert [drain.time_for_requests(seconds) for seconds in (0, 4, 30)] == [0, 2, 25]


def test_without_a_launcher_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)

    async def job() -> None:
        client = Client(Draining(application), "/v1/short")
        await client.task
        assert client.body == "{}"

    asyncio.run(job())
