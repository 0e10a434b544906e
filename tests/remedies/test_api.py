"""What the messages about keys, addresses and vLLM's options tell their reader to do, done."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetier.launch.command import ServeRequest, arguments, check_reachable_only_with_key
from moetier.launch.keys import VARIABLE, keys_of
from moetier.launch.tls import check_certificate
from moetier.settings import Settings
from tests.remedies.trouble import Trouble

remedy = pytest.mark.remedy


def request(*extra: str, **fields: Any) -> ServeRequest:
    return ServeRequest(Path("/m"), Settings(store=Path("/s")), extra=extra, **fields)


PASSED: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "quantization": ("moetier computes the experts", ("-q", "fp8", "--seed", "1"), ("--seed", "1")),
    "load-format": ("moetier loads the model", ("--load-format=auto",), ()),
    "worker": ("moetier's worker tells the tiers", ("--worker-cls", "x.Y"), ()),
    "servers": ("there is one API server", ("--api-server-count", "2"), ()),
    "grpc": ("the API is HTTP", ("--grpc",), ()),
    "second": ("found a second --", ("--seed", "1", "--"), ("--seed", "1")),
    "beginning": ("expected the whole name of an option", ("--hos", "::1"), ("--host", "::1")),
    "number": ("expected a number from", ("--port", "0"), ("--port", "8001")),
    "value": ("expected a value, found none", ("--host", "--seed", "1"), ("--host", "::1", "--seed", "1")),
}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        pytest.param(wrong, right, marks=remedy("launch/passed.py", part), id=name)
        for name, (part, wrong, right) in PASSED.items()
    ],
)
def test_an_option_is_put_right(trouble: Trouble, wrong: tuple[str, ...], right: tuple[str, ...]) -> None:
    with trouble:
        request(*wrong)
    arguments(request(*right), on_cpu=True)
    trouble.gone()


@pytest.mark.parametrize(
    ("wrong", "field", "value", "seen"),
    [
        pytest.param(
            ("--kv-cache-memory-bytes", "1G"),
            *("kv_cache_gib", 1.0, "1073741824"),
            marks=remedy("launch/passed.py", "use `--kv-cache-gib`"),
            id="kv-cache",
        ),
        pytest.param(
            ("--uds", "/tmp/socket"),
            *("host", "127.0.0.1", "127.0.0.1"),
            marks=remedy("launch/passed.py", "the server listens on an address"),
            id="socket",
        ),
        pytest.param(
            ("--additional-config.moetier.dram_records", "8"),
            *("settings", Settings.parse({"store": "/s", "dram_records": 8}), '"dram_records": 8'),
            marks=remedy("launch/passed.py", "it holds moetier's settings"),
            id="settings",
        ),
    ],
)
def test_our_own_option_does_it(trouble: Trouble, wrong: tuple[str, ...], field: str, value: Any, seen: str) -> None:
    with trouble:
        request(*wrong)
    assert any(seen in argument for argument in arguments(replace(request(), **{field: value}), on_cpu=True))
    trouble.gone()


FILES: dict[str, tuple[str, str]] = {
    "names": ("expected options by name", "- seed"),
    "another": ("found another", "config: other.yaml"),
    "yaml": ("name a YAML file", "a: ["),
}


@pytest.mark.parametrize(
    "content",
    [pytest.param(text, marks=remedy("launch/passed.py", part), id=name) for name, (part, text) in FILES.items()],
)
def test_a_file_of_options_is_put_right(trouble: Trouble, content: str, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(content)
    with trouble:
        request("--config", str(path))
    path.write_text("seed: 1")
    assert request("--config", str(path)).extra == ("--seed", "1")
    trouble.gone()


@remedy("launch/passed.py", "expected no API key in it")
def test_keys_go_into_a_file_of_their_own(trouble: Trouble, tmp_path: Path) -> None:
    options, keys = tmp_path / "options.yaml", tmp_path / "keys"
    options.write_text("api-key: k")
    with trouble:
        request("--config", str(options))
    keys.touch(0o600)
    keys.write_text("k\n")
    assert keys_of(None, keys) == (("k",), [])
    trouble.gone()


@pytest.mark.parametrize("way", ["file", "variable", "loopback"])
@remedy("launch/command.py", "can be reached from other machines")
def test_beyond_loopback_with_a_key(
    trouble: Trouble, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    beyond = request("--host", "0.0.0.0")
    with trouble:
        check_reachable_only_with_key(beyond)
    file = tmp_path / "keys"
    file.write_text("k")
    if way == "variable":
        monkeypatch.setenv(VARIABLE, "k")
    keys, _ = keys_of(None, file if way == "file" else None)
    check_reachable_only_with_key(
        replace(beyond, host="127.0.0.1") if way == "loopback" else replace(beyond, api_keys=keys)
    )
    trouble.gone()


@pytest.mark.parametrize("way", ["file", "variable"])
@remedy("launch/keys.py", "is in the process list")
def test_a_visible_key_is_given_in_another_way(
    trouble: Trouble, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    trouble.said(" ".join(keys_of("k", None)[1]))
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text("k")
    if way == "variable":
        monkeypatch.setenv(VARIABLE, "k")
    assert keys_of(None, file if way == "file" else None) == (("k",), [])
    trouble.gone()


KEYS: dict[str, tuple[str, bytes | None]] = {
    "more": ("found more than", b"x" * 2**21),
    "none": ("expected keys, one a line, found none", b"\n"),
    "characters": ("expected printable ASCII", "schl\u00fcssel".encode()),
    "missing": ("cannot read it", None),
}


@pytest.mark.parametrize(
    "content",
    [pytest.param(text, marks=remedy("launch/keys.py", part), id=name) for name, (part, text) in KEYS.items()],
)
def test_a_file_of_keys_is_put_right(trouble: Trouble, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with trouble:
        keys_of(None, path)
    path.touch(0o600)
    path.write_text("another\n")
    assert keys_of(None, path)[0] == ("another",)
    trouble.gone()


@remedy("launch/keys.py", "both give API keys")
def test_keys_are_given_in_one_way(trouble: Trouble, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("k")
    with trouble:
        keys_of("k", path)
    assert keys_of("k", None)[0] == keys_of(None, path)[0] == ("k",)
    trouble.gone()


@pytest.fixture
def tls(tmp_path: Path) -> tuple[str, str]:
    """Options with a certificate and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    key, made = str(tmp_path / "key"), str(tmp_path / "certificate")
    what = ("-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", made, "-days", "1", "-subj", "/CN=x")
    subprocess.run(["openssl", "req", "-x509", *what], check=True, capture_output=True)
    return f"--ssl-certfile={made}", f"--ssl-keyfile={key}"


@pytest.mark.parametrize(
    ("chosen", "more"),
    [
        pytest.param((1,), (), marks=remedy("launch/tls.py", "give it with --ssl-certfile"), id="no-certificate"),
        pytest.param((0,), (), marks=remedy("launch/tls.py", "name those that belong together"), id="no-key"),
        pytest.param((0,), ("--ssl-keyfile=/x",), marks=remedy("launch/tls.py", "expected a file"), id="no-file"),
        pytest.param(
            (0, 1), ("--ssl-ca-certs=/dev/null",), marks=remedy("launch/tls.py", "expected a file"), id="no-authorities"
        ),
        pytest.param(
            (0, 1),
            (f"--ssl-ca-certs={__file__}",),
            marks=remedy("launch/tls.py", "expected certificates in PEM, found none"),
            id="authorities",
        ),
    ],
)
def test_a_certificate_and_its_key(
    trouble: Trouble, tls: tuple[str, str], chosen: tuple[int, ...], more: tuple[str, ...]
) -> None:
    with trouble:
        check_certificate(request(*(tls[at] for at in chosen), *more))
    check_certificate(request(*tls))
    trouble.gone()
