"""A token reaches the server that it is meant for, by a way that nobody else reads, and no other."""

from __future__ import annotations

import logging
import shutil
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from moetier.errors import CheckpointError
from moetier.store.remote.fetch import Fetcher, Patience, RemoteFile, _Redirects, may_carry_credentials
from moetier.store.remote.hub import open_repository
from tests.store.hub import TOKEN, serving

QUICK = Patience(stall=300, attempts=2, pause=0.01)
FROM = "https://hub.test/a/resolve/x/f"


@pytest.mark.parametrize(
    ("to", "kept"),
    [
        ("https://hub.test/b", True),
        ("https://hub.test:443/b", True),
        ("https://HUB.test/b", True),
        ("http://hub.test/b", False),
        ("http://hub.test:443/b", False),
        ("https://hub.test:8443/b", False),
        ("https://cdn.test/b", False),
        ("https://hub.test.evil.test/b", False),
        ("https://hub.test@evil.test/b", False),
    ],
)
@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_keeps_the_token_on_one_server_only(to: str, kept: bool, code: int) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Cookie": "a=b", "Proxy-Authorization": "c", "Range": "bytes=0-1"}
    found = _Redirects().redirect_request(urllib.request.Request(FROM, headers=headers), None, code, "", {}, to)
    assert found is not None
    assert {name for name, _ in found.header_items()} >= {"Range"}
    here = dict(found.header_items())
    assert [name in here for name in ("Authorization", "Cookie", "Proxy-authorization")] == [kept] * 3


@pytest.mark.parametrize(
    ("url", "may"),
    [
        ("https://hub.test", True),
        ("http://hub.test", False),
        ("http://127.0.0.1:8000/x", True),
        ("http://localhost/x", True),
        ("http://[::1]:8000/x", True),
        ("http://127.0.0.1.evil.test", False),
        ("http://localhost.evil.test", False),
        ("http://10.0.0.1", False),
        ("ftp://localhost", False),
    ],
)
def test_where_a_token_may_go(url: str, may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert may_carry_credentials(url) == may
    monkeypatch.setenv("http_proxy", "http://proxy.test:3128")
    monkeypatch.setenv("no_proxy", "")
    assert may_carry_credentials(url) == url.startswith("https"), "a proxy reads what is asked for by http"


class _To(BaseHTTPRequestHandler):
    """Redirects to `target` what has no /end, and notes what came with it."""

    target = ""
    came: list[str | None]

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self.came.append(self.headers.get("Authorization"))
        end = self.path.startswith("/end")
        self.send_response(206 if end else 302)
        if end:
            self.send_header("Content-Range", "bytes 0-3/4")
        else:
            self.send_header("Location", self.target)
        self.send_header("Content-Length", "4" if end else "0")
        self.end_headers()
        self.wfile.write(b"data" if end else b"")


@contextmanager
def redirecting(target: str, certificate: Path | None = None) -> Iterator[tuple[str, list[str | None]]]:
    """(address, what came as Authorization) of a server that redirects to `target`."""
    came: list[str | None] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("To", (_To,), {"target": target, "came": came}))
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http{'s' if certificate else ''}://localhost:{server.server_port}", came
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Key and certificate of localhost, which this process trusts."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, path = tmp_path / "key.pem", tmp_path / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", path],
        check=True, capture_output=True,
    )  # fmt: skip
    path.write_bytes(path.read_bytes() + key.read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    return path


def test_a_redirect_to_http_brings_neither_token_nor_bytes(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = Fetcher({"Authorization": f"Bearer {TOKEN}"}, QUICK)
    taken: list[bytes] = []
    with redirecting("") as (plain, came_plain), redirecting(f"{plain}/end", certificate) as (safe, came_safe):
        file = RemoteFile("f", 4, f"{safe}/start")
        with pytest.raises(CheckpointError, match="every redirect to lead to https, found one to http") as caught:
            fetcher.stream(file, 0, 4, taken.append)
    assert came_safe == [f"Bearer {TOKEN}"]
    assert came_plain == [None]
    assert not taken
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/x", "data:,data"])
def test_a_redirect_to_what_is_no_server_is_refused(target: str) -> None:
    with redirecting(target) as (address, _), pytest.raises(CheckpointError):
        Fetcher({}, QUICK).read(RemoteFile("f", 4, f"{address}/start"), 0, 4)


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    (tmp_path / "config.json").write_text("{}")
    from huggingface_hub import close_session

    close_session()  # it read the proxies of its first request's time
    with serving(tmp_path) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.get_token", lambda: TOKEN)
        yield hub
    close_session()


def test_a_token_is_not_sent_through_a_proxy_by_http(
    endpoint: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The proxy is another server of ours; what it is asked with is looked at."""
    with redirecting("") as (proxy, came):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://hub.test")
        with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match="cannot be opened"):
            open_repository("hf://org/model")
    assert came
    assert set(came) == {None}
    assert [record.message for record in caplog.records if "token" in record.message]
    assert TOKEN not in caplog.text


def test_a_token_with_odd_characters_is_refused_and_not_shown(
    endpoint: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: f"{TOKEN}\nX: y")
    with pytest.raises(CheckpointError, match="printable ASCII") as caught:
        open_repository("hf://org/model")
    assert TOKEN not in str(caught.value)


def test_whoever_wants_to_send_no_token_sends_none(endpoint: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    assert open_repository("hf://org/model").headers == {}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    assert open_repository("hf://org/model").headers == {"Authorization": f"Bearer {TOKEN}"}
