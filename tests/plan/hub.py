"""A hub on this machine whose files may be holes of many gigabytes: it reads only what was asked for, and counts it."""

from __future__ import annotations

import json
import re
import threading
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.store.hub import running

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class SparseHub(ThreadingHTTPServer):
    """Serves one folder as org/model. sent: bytes of all answers, the list of files included."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.sent = 0
        self.lock = threading.Lock()
        self.sizes: dict[str, int] = {}
        """Sizes to state instead of the true ones."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def size(self, name: str) -> int:
        return self.sizes.get(name, (self.folder / name).stat().st_size)


class _Handler(BaseHTTPRequestHandler):
    server: SparseHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        hub = self.server
        if self.path.startswith("/api/models/org/model"):
            files = [{"rfilename": p.name, "size": hub.size(p.name)} for p in sorted(hub.folder.iterdir())]
            self._answer(200, json.dumps({"id": "org/model", "sha": COMMIT, "siblings": files}).encode())
            return
        match = re.fullmatch(rf"/org/model/resolve/{COMMIT}/([\w.-]+)", self.path)
        if match is None or not (hub.folder / match[1]).is_file():
            self._answer(404, b'{"error": "not found"}')
            return
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        with (hub.folder / match[1]).open("rb") as file:
            file.seek(first)
            body = file.read(last - first + 1)
        self._answer(206, body, f"bytes {first}-{last}/{hub.size(match[1])}")

    def _answer(self, status: int, body: bytes, span: str | None = None) -> None:
        with self.server.lock:
            self.server.sent += len(body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        self.wfile.write(body)


def serving(folder: Path) -> AbstractContextManager[SparseHub]:
    """Run a hub in threads of this process."""
    return running(SparseHub(folder))
