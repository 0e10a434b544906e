"""Compiled kernels between runs: the same from the same, and nothing from anybody else or half written."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from moetier.kernels.cuda import kept as module
from moetier.kernels.cuda.kept import folder, kept, key_of

KEY = key_of("this")
CODE = b"machine code" * 100


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module._say.cache_clear()
    return tmp_path / "cache/moetier/kernels"


class Compiler:
    """Counts how often it is asked."""

    def __init__(self, code: bytes = CODE) -> None:
        self.code, self.times = code, 0

    def __call__(self) -> bytes:
        self.times += 1
        return self.code


def entry(cache: Path) -> Path:
    (found,) = cache.iterdir()
    return found


def test_a_second_run_reads_what_the_first_made(cache: Path) -> None:
    compiler = Compiler()
    assert [kept("decode-sm_90a", KEY, compiler) for _ in range(3)] == [CODE] * 3
    assert compiler.times == 1
    assert kept("decode-sm_90a", key_of("that"), Compiler(b"other")) == b"other"
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in cache.iterdir()} == {0o600}


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut short": lambda data: data[:-5],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"x",
    "another's code": lambda data: data[: -len(CODE)] + b"evil code!!!" * 100,
    "an older format": lambda data: CODE,
    "of another key": lambda data: data.replace(KEY.encode(), key_of("that").encode()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_compiled_anew_with_one_line(
    damage: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept("x", KEY, Compiler())
    path = entry(cache)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    compiler = Compiler()
    with caplog.at_level(logging.WARNING):
        assert kept("x", KEY, compiler) == CODE
        assert kept("x", KEY, compiler) == CODE
    assert compiler.times == 1, "and the new entry is whole"
    assert [record.message.rpartition("; ")[2] for record in caplog.records] == ["compiled anew"]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_an_entry_that_is_no_file_is_not_followed(kind: str, cache: Path, tmp_path: Path) -> None:
    kept("x", KEY, Compiler(b"of the link"))
    path = entry(cache)
    if kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        os.mkfifo(path) if kind == "fifo" else path.mkdir()
    assert kept("x", KEY, Compiler()) == CODE


def test_a_folder_of_somebody_else_is_neither_read_nor_written(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As if we were another user than the one who wrote it; and what the line says helps."""
    kept("x", KEY, Compiler(b"planted"))
    before = entry(cache).read_bytes()
    cache.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    compiler = Compiler()
    with caplog.at_level(logging.WARNING):
        assert [kept("x", KEY, compiler) for _ in range(2)] == [CODE] * 2
    assert compiler.times == 2
    assert entry(cache).read_bytes() == before
    (line,) = [record.message for record in caplog.records]
    assert "set XDG_CACHE_HOME to a folder of your own" in line
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert [kept("x", KEY, compiler) for _ in range(2)] == [CODE] * 2
    assert compiler.times == 3


def test_our_own_folder_is_closed_to_others(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    kept("x", KEY, Compiler())
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["file in its place", "nowhere"])
def test_where_nothing_can_be_kept_it_compiles_and_says_so_once(
    kind: str, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "nowhere":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    else:
        cache.parent.mkdir(parents=True)
        cache.write_text("")
    compiler = Compiler()
    with caplog.at_level(logging.WARNING):
        assert [kept("x", KEY, compiler) for _ in range(3)] == [CODE] * 3
    assert compiler.times == 3
    assert [record.message for record in caplog.records if "every start compiles them" in record.message]
    assert len(caplog.records) == 1


def test_a_full_disk_leaves_no_half_entry(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert kept("x", KEY, Compiler()) == CODE
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list(cache.iterdir()) == []
    assert os.strerror(errno.EFBIG) in caplog.text


def test_a_relative_cache_home_is_no_folder_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert folder() == Path.home() / ".cache/moetier/kernels"


def _many(number: int) -> None:
    for at in range(30):
        assert kept("x", key_of(at % 3), Compiler(CODE + bytes([at % 3]))) == CODE + bytes([at % 3])
        if at % 5 == number:
            for path in folder().glob("*.kernel"):
                path.unlink(missing_ok=True)


def test_processes_that_write_the_same_entries_never_read_half_of_one(cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(_many, range(4))
    assert not list(cache.glob(".*"))


def test_whatever_changes_the_code_changes_the_key(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="the device tier wants torch")
    pytest.importorskip("cuda.bindings.nvrtc", reason="the CUDA kernels want cuda-bindings and NVRTC")
    from moetier.kernels.cuda import nvrtc

    try:
        nvrtc.compile_source("one.cu", {}, "sm_00")
    except nvrtc.KernelBuildError:
        pass  # there is no such target; the library is here
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not found: {error}")
    sources = tmp_path / "cuda"
    sources.mkdir()
    (sources / "a.cu").write_text('#include "b.cuh"\nextern "C" __global__ void f(float *x) { x[0] = VALUE; }\n')
    (sources / "b.cuh").write_text("#define VALUE 1\n")
    monkeypatch.setattr(nvrtc, "SOURCES", sources)

    def made(macros: dict[str, str | int] | None = None, arch: str = "sm_90a") -> bytes:
        return nvrtc.cached_cubin("a.cu", macros or {}, arch)

    first = made()
    assert first[:4] == b"\x7fELF"
    assert made() == first
    assert len(list(cache.iterdir())) == 1
    (sources / "b.cuh").write_text("#define VALUE 2\n")
    assert made() != first
    assert len(list(cache.iterdir())) == 2
    changes: list[Callable[[], object]] = [
        lambda: made({"N": 2}),
        lambda: made(arch="sm_80"),
        lambda: (monkeypatch.setattr(nvrtc, "compiler_packages", lambda: ["nvidia-cuda-nvrtc==99"]), made()),
        lambda: (monkeypatch.setattr(module, "FORMAT", "moetier kernel 3\n"), made()),
        lambda: ((sources / "c.cuh").write_text(""), made()),
    ]
    for number, change in enumerate(changes, 3):
        change()
        assert len(list(cache.iterdir())) == number
