"""Files that a user named: whole, or as they were."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moetier.store.files import write_output


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
