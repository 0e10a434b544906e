"""A completion that is streamed in a thread of its own, to see how it ends when its server does."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import openai

from tests.serve.server import LIMIT_SECONDS, Server

LONG: dict[str, Any] = {"prompt": "The", "max_tokens": 700, "temperature": 0, "extra_body": {"ignore_eos": True}}
"""A request of some seconds."""


class Request:
    """error: what came instead of the end."""

    def __init__(self, server: Server, model: str = "nano-mxfp4") -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.began = threading.Event()
        self._server, self._model = server, model
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._server.client() as client:
                for chunk in client.completions.create(model=self._model, stream=True, **LONG):
                    self.text += chunk.choices[0].text
                    self.finish_reason = chunk.choices[0].finish_reason
                    self.began.set()
        except (openai.APIError, httpx.HTTPError) as error:
            self.error = error

    def join(self) -> Request:
        """Wait for its end; a request that hangs fails the test."""
        self._thread.join(LIMIT_SECONDS)
        assert not self._thread.is_alive(), "the request hangs"
        return self

    def whole(self) -> str:
        """The text of a request that came to its end."""
        self.join()
        assert self.error is None, self.error
        assert self.finish_reason == "length"
        return self.text

    def stalls(self, seconds: float) -> bool:
        """Whether nothing comes for so long and it does not end, once what was on its way has arrived."""
        before = None
        while before != self.text and self._thread.is_alive():
            before = self.text
            time.sleep(seconds)
        return self._thread.is_alive()
