"""What is said of repositories, networks and tokens; done as it says, and the same command builds the store."""

from __future__ import annotations

import builtins
import ssl
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from moetier.store.checkpoint import Checkpoint
from moetier.store.remote.build import build_remote
from moetier.store.remote.fetch import Fetcher, Patience, RemoteFile
from moetier.store.store import Store
from tests.remedies.places import Place, remove, removed
from tests.remedies.trouble import Trouble
from tests.store.hub import COMMIT, TOKEN, Hub, running, serving
from tests.store.test_redirects import certificate as certificate
from tests.store.test_redirects import redirecting

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")

remedy = pytest.mark.remedy
QUICK = Patience(stall=300, attempts=3, pause=0.01)
SMALL = 2 + 2 * 3
"""Answers before the first shard: config and index, then length and header of each shard."""


class Remote(Place):
    """A place whose checkpoint is a hub's repository."""

    hub: Hub
    source = "hf://org/model"

    def run(self) -> None:
        """`moetier store build hf://... s --trim t`; afterwards both open."""
        build_remote(self.source, self / self.out, self / self.trimmed, patience=QUICK, threads=1, check=1)
        Store.open(self / self.out, Checkpoint.open(self / self.trimmed).identity()).close()

    def move(self) -> None:
        """The repository's branch is at another commit, with other weights under the same headers."""
        remove(self / "c")
        self.make(seed=1)
        self.hub.commit = "f" * 40


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    place = Remote(tmp_path)
    place.make()
    with serving(place / "c") as place.hub:
        monkeypatch.setattr(constants, "ENDPOINT", place.hub.endpoint)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
        yield place


def _faults(*faults: str) -> Callable[[Remote], None]:
    def provoke(place: Remote) -> None:
        place.hub.faults = list(faults)

    return provoke


def _without_faults(place: Remote, _: str) -> None:
    place.hub.faults = []


def _mine(place: Remote) -> None:
    (place / "s.download").mkdir()
    (place / "s.download" / "letter").write_text("a user's")


def _elsewhere(place: Remote, _: str) -> None:
    place.out, place.trimmed = "elsewhere", "elsewhere-t"


def _interrupted(place: Remote) -> None:
    """A build of the branch stops, and the branch moves on."""
    place.hub.faults = [""] * (SMALL + 1) + ["500"] * 100
    with pytest.raises(Exception, match="HTTP 500"):
        place.run()
    place.hub.faults = []
    place.move()


def _by_commit(place: Remote, text: str) -> None:
    """The first commit, by its name: a hub has it as long as nobody rewrites its history."""
    place.source = text.partition("give the first as ")[2].partition(",")[0].replace("COMMIT", COMMIT)
    remove(place / "c")
    place.make()
    place.hub.commit = COMMIT


def _download_removed(place: Remote, _: str) -> None:
    remove(place / "s.download")


def _built_before(place: Remote) -> None:
    place.run()
    place.move()


def _store_before(place: Remote) -> None:
    """Only the store is there, of the commit before."""
    _built_before(place)
    remove(place / "t")


def _not_weights(place: Remote) -> None:
    (place / "c").rename(place / "weights")
    (place / "c").mkdir()
    (place / "c" / "config.json").write_text("{}")
    (place / "c" / "pytorch_model.bin").write_bytes(b"x")


def _whole_weights(place: Remote, _: str) -> None:
    remove(place / "c")
    remove(place / "s.download")
    (place / "weights").rename(place / "c")


def _wrong_name(place: Remote) -> None:
    place.source = "hf://org/modle"


def _right_name(place: Remote, _: str) -> None:
    place.source = "hf://org/model"


CASES: list[tuple[str, str, Callable[[Remote], None], Callable[[Remote, str], object]]] = [
    ("fetch.py", "check the network and run the same command again", _faults(*["500"] * 100), _without_faults),
    ("fetch.py", "log in with `hf auth login`, and accept", _faults("403"), _without_faults),
    ("cache.py", "try again, or from another network", _faults(*[""] * SMALL, *["flip"] * 200), _without_faults),
    ("build.py", "choose another OUT, or remove that folder yourself", _mine, _elsewhere),
    ("build.py", "choose another OUT, or remove that folder yourself", _mine, _download_removed),
    ("build.py", "give the first as hf://{}@COMMIT", _interrupted, _by_commit),
    ("build.py", "give the first as hf://{}@COMMIT", _interrupted, removed),
    ("build.py", "choose other names for both", _built_before, _elsewhere),
    ("build.py", "choose other names for both", _built_before, removed),
    ("build.py", "are of different commits", _store_before, removed),
    ("build.py", "give a repository of whole safetensors weights", _not_weights, _whole_weights),
    ("hub.py", "check the name and the network", _wrong_name, _right_name),
]


@pytest.mark.parametrize(
    ("wrong", "mend"),
    [
        pytest.param(wrong, mend, id=f"{part[:24]}-{mend.__name__}", marks=remedy(f"store/remote/{path}", part))
        for path, part, wrong, mend in CASES
    ],
)
def test_a_build_from_a_repository(trouble: Trouble, place: Remote, wrong: Any, mend: Any) -> None:
    wrong(place)
    with trouble:
        place.run()
    mend(place, trouble.text)
    place.run()
    trouble.gone()


def _read(url: str, token: str = "") -> bytes:
    return Fetcher({"Authorization": f"Bearer {token}"} if token else {}, QUICK).read(RemoteFile("f", 4, url), 0, 4)


@remedy("store/remote/fetch.py", "check the repository's name and revision")
def test_a_file_that_is_not_there(trouble: Trouble, place: Remote) -> None:
    (place / "c" / "f").write_bytes(b"data")
    with trouble:
        _read(f"{place.hub.endpoint}/org/modle/resolve/{COMMIT}/f")
    assert _read(f"{place.hub.endpoint}/org/model/resolve/{COMMIT}/f") == b"data"
    trouble.gone()


@remedy("store/remote/fetch.py", "ask who runs that server")
def test_a_redirect_to_http(trouble: Trouble, certificate: Path) -> None:
    """Who runs the server lets it redirect to https."""
    with redirecting("") as (plain, _), redirecting(f"{plain}/end", certificate) as (safe, _), trouble:
        _read(f"{safe}/start")
    with redirecting("", certificate) as (end, _), redirecting(f"{end}/end", certificate) as (safe, _):
        assert _read(f"{safe}/start") == b"data"
    trouble.gone()


class _Gate(BaseHTTPRequestHandler):
    """Gives four bytes to who has the token."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.send_response(206 if known else 401)
        self.send_header("Content-Range", "bytes 0-3/4")
        self.send_header("Content-Length", "4" if known else "0")
        self.end_headers()
        self.wfile.write(b"data" if known else b"")


@remedy("store/remote/fetch.py", "name it by https (HF_ENDPOINT)")
def test_a_token_wants_https(trouble: Trouble, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By http the request would go through others, here a proxy."""
    with running(ThreadingHTTPServer(("127.0.0.1", 0), _Gate)) as plain:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{plain.server_port}")
        monkeypatch.setenv("no_proxy", "")
        with trouble:
            _read("http://hub.test/f", TOKEN)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with running(server):
        assert _read(f"https://localhost:{server.server_port}/f", TOKEN) == b"data"
    trouble.gone()


@remedy("store/remote/hub.py", "pip install huggingface_hub")
def test_the_package_of_the_hub(trouble: Trouble, place: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    right = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name == "huggingface_hub":
            raise ImportError(name)
        return right(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with trouble:
        place.run()
    monkeypatch.setattr(builtins, "__import__", right)
    place.run()
    trouble.gone()


@pytest.mark.parametrize("token", [TOKEN, None], ids=["set", "unset"])
@remedy("store/remote/hub.py", "set or unset HF_TOKEN")
def test_a_token_that_is_none(
    trouble: Trouble, place: Remote, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "schl\u00fcssel")
    with trouble:
        place.run()
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    place.run()
    trouble.gone()


@remedy("store/remote/hub.py", "expected a commit, found none")
def test_a_repository_without_a_commit(trouble: Trouble, place: Remote) -> None:
    """A hub that does not say which commit a branch is at, and does of a commit that is named."""
    place.hub.commit = None  # type: ignore[assignment]
    with trouble:
        place.run()
    place.source = trouble.text.partition("give one as ")[2].replace("COMMIT", COMMIT)
    place.hub.commit = COMMIT
    place.run()
    trouble.gone()
