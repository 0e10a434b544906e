"""A hub on this machine that stalls, cuts and lies as it is told: what huggingface_hub and our requests ask for."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

Server = TypeVar("Server", bound=ThreadingHTTPServer)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"


class Hub(ThreadingHTTPServer):
    """Serves one folder as the repository org/model. faults: what the next ranged answers do, one each."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.commit = COMMIT
        self.faults: list[str] = []
        self.seen: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.leaked = 0
        self.other: Hub | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fault(self) -> str:
        with contextlib.suppress(IndexError):  # answers are given by several threads at once
            return self.faults.pop(0)
        return ""


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        hub = self.server
        if self.path.startswith("/api/models/org/model"):
            self._json({"id": "org/model", "sha": hub.commit, "siblings": [_entry(hub, p) for p in _files(hub)]})
            return
        match = re.fullmatch(rf"/org/model/resolve/{hub.commit}/(.+)", self.path)
        if match is None or not (hub.folder / match[1]).is_file():
            self._json({"error": "not found"}, 404)
            return
        self._file(match[1])

    def _json(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, name: str) -> None:
        hub, fault = self.server, self.server.fault()
        hub.seen[fault or "good"] += 1
        data = (hub.folder / name).read_bytes()
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        body, status, span = data[first : last + 1], 206, f"bytes {first}-{last}/{len(data)}"
        if fault == "redirect":
            self.send_response(302)
            self.send_header("Location", f"{hub.other.endpoint}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if "Authorization" in self.headers and self.headers["Authorization"] != f"Bearer {TOKEN}":
            hub.leaked += 1
        hub.seen["with token"] += "Authorization" in self.headers
        if fault in ("500", "429", "403"):
            self._json({"error": fault}, int(fault))
            return
        if fault == "whole":
            body, status = data, 200
        elif fault == "other range":
            body, span = data[first + 1 : last + 2], f"bytes {first + 1}-{last + 1}/{len(data)}"
        elif fault == "other size":
            span = f"bytes {first}-{last}/{len(data) + 1}"
        elif fault == "flip":
            body = body[:-1] + bytes([body[-1] ^ 1])
        elif fault == "gzip":
            body = gzip.compress(body)
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", span)
        if fault == "gzip":
            self.send_header("Content-Encoding", "gzip")
        extra = b"more than was asked for" if fault == "extra" else b""
        self.send_header("Content-Length", str(len(body) + len(extra)))
        self.end_headers()
        hub.bytes[name] += len(body)
        if fault in ("cut", "stall"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if fault == "stall":
                self.connection.recv(1)  # until the client has enough of it
            self.close_connection = True
            return
        self.wfile.write(body + extra)


def _files(hub: Hub) -> list[Path]:
    return sorted(path for path in hub.folder.rglob("*") if path.is_file())


def _entry(hub: Hub, path: Path) -> dict[str, object]:
    entry: dict[str, object] = {"rfilename": str(path.relative_to(hub.folder)), "size": path.stat().st_size}
    if path.suffix == ".safetensors":
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        entry["lfs"] = {"size": path.stat().st_size, "sha256": digest, "pointerSize": 130}
    return entry


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Answer in threads of this process."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def serving(folder: Path) -> AbstractContextManager[Hub]:
    """Run a hub in threads of this process."""
    return running(Hub(folder))
