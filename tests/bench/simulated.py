"""A scripted server and its client on a clock of their own, which goes on only while both have nothing to do.

So whatever takes the machine long takes no time: every moment is exactly the script's, on any machine, however busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import aiohttp

from tests.bench.scripted import Script, answering

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Instead of waiting for a time, it is that time. What was sent over a Unix socket is there at once."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout is not None:
            self.now += max(0.0, timeout)
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def simulated(script: Script, use: Callable[[str], Coroutine[Any, Any, T]]) -> T:
    """What `use` returns, given the address of a server that follows `script`."""

    async def run() -> T:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("")  # to a name that nothing has
            listening.listen(128)
            connector = partial(aiohttp.UnixConnector, listening.getsockname().decode())
            serving = asyncio.create_task(answering(listening, script))
            try:
                with mock.patch.object(aiohttp, "TCPConnector", connector):
                    return await use("http://scripted")
            finally:
                serving.cancel()

    with asyncio.Runner(loop_factory=_Loop) as runner, contextlib.ExitStack() as clocks:
        loop = runner.get_loop()
        clock = SimpleNamespace(perf_counter=loop.time, monotonic=loop.time, time=time.time)
        for name, module in list(sys.modules.items()):
            if name.startswith(("moetier_bench.", "tests.bench.")) and getattr(module, "time", None) is time:
                clocks.enter_context(mock.patch.object(module, "time", clock))
        return runner.run(run())
