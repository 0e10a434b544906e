"""Files that a user named: whole, or as they were."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moetier import files
from moetier.files import write_durably, write_output


@contextmanager
def no_room() -> Iterator[None]:
    """No file may grow: what a full disk does to a write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("before", ["precious", None], ids=["replaced", "new"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "out.svg"
    if before is not None:
        path.write_text(before)
    with no_room(), pytest.raises(OSError, match="large"):
        write_output(path, "new text")
    assert (path.read_text() if path.exists() else None) == before
    assert [one.name for one in tmp_path.iterdir()] == ([path.name] if before else [])


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_output(tmp_path / "link", "new")
    assert (tmp_path / "real").read_text() == "new"
    assert (tmp_path / "link").is_symlink()


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write_output(path, "text")
    reader.join()
    assert read == ["text"]
    assert path.is_fifo()


def test_many_writers_leave_one_whole_file(tmp_path: Path) -> None:
    path, texts = tmp_path / "state", [bytes([65 + n]) * 100_000 for n in range(4)]
    writers = [threading.Thread(target=lambda t=text: [write_durably(path, t) for _ in range(10)]) for text in texts]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            seen.add(path.read_bytes())
    for writer in writers:
        writer.join()
    assert seen | {path.read_bytes()} <= set(texts)
    assert [one.name for one in tmp_path.iterdir()] == ["state"]


def test_what_a_killed_writer_left_goes_once_it_is_old(tmp_path: Path) -> None:
    old, young, others = (tmp_path / name for name in (f"state.{'a' * 16}.tmp", f"state.{'b' * 16}.tmp", "state.tmp"))
    for path in (old, young, others):
        path.write_text("half")
    os.utime(old, (0, 0))
    os.utime(others, (0, 0))
    write_durably(tmp_path / "state", b"whole")
    assert {one.name for one in tmp_path.iterdir()} == {"state", young.name, others.name}
    files.sweep(tmp_path / "state")
    assert {one.name for one in tmp_path.iterdir()} == {"state", others.name}
