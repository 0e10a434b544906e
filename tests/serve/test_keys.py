"""API keys: from an option, a file or the environment; never shown again."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from moetier.errors import SettingsError
from moetier.launch.keys import VARIABLE, digest, hashes_of, keys_of, matches


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_no_key() -> None:
    assert keys_of(None, None) == ((), [])


def test_an_empty_variable_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert keys_of(None, None) == ((), [])


def test_the_environment_is_quiet_and_an_option_is_loud_and_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "from-the-environment")
    assert keys_of(None, None) == (("from-the-environment",), [])
    keys, (warning,) = keys_of("on-the-line", None)
    assert keys == ("on-the-line",)
    assert "--api-key-file" in warning
    assert "on-the-line" not in warning
    assert keys_of(None, None, ("a", "b"))[0] == ("a", "b")


@pytest.mark.parametrize("content", [b"one\ntwo\n", b"one\r\n\r\n  two  ", b"\xef\xbb\xbfone\n\n\ntwo"])
def test_a_file_has_a_key_a_line(content: bytes, tmp_path: Path) -> None:
    assert keys_of(None, written(tmp_path / "keys", content)) == (("one", "two"), [])


def test_a_pipe_is_a_file_of_keys(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o644)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"key\n",))
    writer.start()
    assert keys_of(None, pipe) == (("key",), [])
    writer.join()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_that_others_can_read_is_said_and_its_remedy_helps(mode: int, tmp_path: Path) -> None:
    path = written(tmp_path / "keys", b"key", mode)
    _, (warning,) = keys_of(None, path)
    remedy = warning.partition("; ")[2]
    assert remedy == f"chmod 600 {path}"
    path.chmod(int(remedy.split()[1], 8))
    assert keys_of(None, path) == (("key",), [])


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "found none"),
        (b"\n \n", "found none"),
        ("schl\u00fcssel-geheim".encode(), "other characters"),
        (b"\xff\xfe-geheim", "other characters"),
        (b"x" * (1 << 21), "more than"),
    ],
    ids=["empty", "blank", "umlaut", "bytes", "huge"],
)
def test_a_file_without_usable_keys_is_refused_and_not_shown(content: bytes, found: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=found) as error:
        keys_of(None, written(tmp_path / "keys", content))
    assert "geheim" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        keys_of(None, tmp_path / "keys")
    with pytest.raises(SettingsError, match="Is a directory"):
        keys_of(None, tmp_path)


@pytest.mark.parametrize("key", ["", " ", " a", "a ", "a\tb", "schl\u00fcssel", "a\nb"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    with pytest.raises(SettingsError, match="the API key of --api-key: expected printable ASCII"):
        keys_of(key, None)


def test_keys_are_given_in_one_way(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", b"key")
    with pytest.raises(SettingsError, match="--api-key and --api-key-file both"):
        keys_of("key", path)
    with pytest.raises(SettingsError, match="--api-key-file and -- --api-key both"):
        keys_of(None, path, ("key",))
    with pytest.raises(SettingsError, match="--api-key and -- --api-key both"):
        keys_of("key", None, ("key",))


def test_only_a_right_key_matches() -> None:
    right = [bytes.fromhex(value) for value in hashes_of(("one", "two")).split()]
    assert right == [digest(b"one"), digest(b"two")]
    assert matches(b"one", right)
    assert matches(b"two", right)
    for wrong in (b"", b"on", b"one ", b"ONE", b"onetwo", digest(b"one"), digest(b"one").hex().encode()):
        assert not matches(wrong, right)
