"""The server of a run is gone afterwards, however it ended."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import psutil
import pytest

from moetier_bench import server
from moetier_bench.documents import Library
from moetier_bench.server import Place, free_port, serving
from tests.serve.server import runs

ROOT = Path(__file__).resolve().parents[2]
FRONTEND = """
import http.server, os, sys, time
if os.fork() == 0:
    time.sleep(600)  # an engine, which does not look after the frontend
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "model"}]}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_an_engine_that_lost_its_frontend_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of stock vLLM: the frontend leads the session. And a proxy in the environment is not asked for it."""
    place = Place(tmp_path / "model", tmp_path / "store", tmp_path / "scratch", free_port())
    monkeypatch.setattr(server, "command", lambda *_: [sys.executable, "-c", FRONTEND, str(place.port)])
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    recipe = Library(ROOT).recipe("nano/stock")
    recipe = recipe.model_copy(update={"serve": recipe.serve.model_copy(update={"start_seconds": 30})})
    with serving(recipe, place) as served:
        (engine,) = served.process.children()
        served.process.kill()
    try:
        assert not runs(engine)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.kill()


SAID = """
import http.server, threading, time
http.server.BaseHTTPRequestHandler.log_message = lambda *_: None
def say():
    print('{"model": "m", "layers": 2, "experts": 4, "ti', end="", flush=True)
    time.sleep(1)
    print('ers": [{"tier": "DRAM", "records": 3}]}', flush=True)
threading.Timer(1, say).start()
"""


def test_a_server_is_ready_once_it_has_said_where_its_experts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path / "model", tmp_path / "store", tmp_path / "scratch", free_port())
    monkeypatch.setattr(server, "command", lambda *_: [sys.executable, "-c", SAID + FRONTEND, str(place.port)])
    with serving(Library(ROOT).recipe("nano/dram"), place):
        assert server.placed(place) == {"DRAM": 3, "all": 8}
