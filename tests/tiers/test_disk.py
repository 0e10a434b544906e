"""Reads of the store that go wrong: what is healed, what is only read elsewhere, and what is said of it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.errors import RecordReadError, StoreError
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.heal import Healer
from moetier.store.store import Store
from moetier.store.verify import verify_store
from moetier.tiers.arena import Arena
from moetier.tiers.disk import DiskReader
from tests.store.checkpoints import write_checkpoint


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    write_checkpoint(tmp_path / "c", hidden=96, intermediate=64)
    build_store(tmp_path / "c", tmp_path / "s")
    with Store.open(tmp_path / "s") as opened:
        yield opened


@pytest.fixture
def right(store: Store) -> np.ndarray:
    """The record that the tests read: expert 2 of the second layer."""
    record = np.empty(store.layout.stride, np.uint8)
    store.read_record(1, 2, record)
    return record


def spoil(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff\xee\xdd")


def read(reader: DiskReader, store: Store) -> np.ndarray:
    out = Arena(1, store.layout.stride).view(0)
    reader.read(1, 2, out)
    return out


def healer(store: Store) -> Healer:
    return Healer(store, Checkpoint.open(store.path.parent / "c"))


Preadv = Callable[[int, Any, int], int]


def refusing(monkeypatch: pytest.MonkeyPatch, why: Callable[[int, int, int], int]) -> None:
    """Reads of descriptor, size and offset fail with the errno that `why` gives, 0: none."""
    real: Preadv = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if number := why(fd, sum(len(buffer) for buffer in buffers), offset):
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_larger_blocks_of_the_disk_end_direct_reads_and_nothing_is_healed(
    store: Store, right: np.ndarray, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system that opens with O_DIRECT and refuses reads of less than 16 KiB."""
    heals = healer(store)
    reader = DiskReader(store, 1, heals)
    if not reader.direct:
        pytest.skip("the file system of the temporary folder refuses O_DIRECT at once")
    refusing(monkeypatch, lambda fd, size, at: errno.EINVAL if is_direct(fd) and (size % 16384 or at % 16384) else 0)
    for _ in range(3):
        assert np.array_equal(read(reader, store), right)
    reader.close()
    assert not reader.direct
    assert (heals.healed, reader.counters.retries) == (0, 0)
    assert caplog.text.count("through the page cache") == 1


def test_a_disk_that_gives_nothing_is_not_written_to(
    store: Store, right: np.ndarray, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heals = healer(store)
    reader = DiskReader(store, 1, heals)
    before = store.record_file(1).stat().st_mtime_ns
    at = store.offset(2)
    with monkeypatch.context() as patch:
        refusing(patch, lambda fd, size, offset: errno.EIO if fd in reader._files and offset == at else 0)
        for _ in range(3):
            assert np.array_equal(read(reader, store), right)
    reader.close()
    assert store.record_file(1).stat().st_mtime_ns == before
    assert heals.healed == 3
    assert caplog.text.count("its bytes come from the checkpoint, and the store stays as it is") == 1, "said once"


def test_without_a_checkpoint_it_is_an_error_whose_remedy_works(store: Store, right: np.ndarray) -> None:
    path = store.record_file(1)
    spoil(path, store.offset(2) + 100)
    reader = DiskReader(store, 1)
    with pytest.raises(RecordReadError, match="layer 2, expert 2") as raised:
        read(reader, store)
    reader.close()
    assert f"`moetier store build CHECKPOINT {store.path}`" in str(raised.value)
    path.unlink()
    build_store(store.path.parent / "c", store.path)
    with Store.open(store.path) as again:
        reader = DiskReader(again, 1)
        assert np.array_equal(read(reader, again), right)
        reader.close()


@pytest.mark.parametrize("replaced", ["folder", "file"])
def test_only_the_file_that_was_opened_is_healed(
    store: Store, right: np.ndarray, replaced: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The user builds another store under the name of the one that is served."""
    root, path = store.path.parent, store.record_file(1)
    reader = DiskReader(store, 1, healer(store))
    write_checkpoint(root / "c2", hidden=96, intermediate=64, seed=9)
    old = root / "old"
    if replaced == "folder":
        store.path.rename(old)
        build_store(root / "c2", store.path)
    else:
        old.mkdir()
        build_store(root / "c2", root / "s2")
        path.rename(old / path.name)
        shutil.rmtree(store.path)
        (root / "s2").rename(store.path)
    spoil(old / path.name, store.offset(2) + 100)
    new = path.read_bytes()
    for _ in range(2):
        assert np.array_equal(read(reader, store), right)
    reader.close()
    assert path.read_bytes() == new
    assert not verify_store(store.path).bad
    assert caplog.text.count("not written back: the file was replaced since it was opened") == 1


def test_a_store_that_is_replaced_while_it_is_opened_is_refused(store: Store, right: np.ndarray) -> None:
    root = store.path.parent
    store.path.rename(root / "old")
    shutil.copytree(root / "old", store.path)
    reader = DiskReader(store, 1)
    assert np.array_equal(read(reader, store), right), "a copy of it is as good"
    reader.close()
    shutil.rmtree(store.path)
    write_checkpoint(root / "c2", hidden=96, intermediate=64, seed=9)
    build_store(root / "c2", store.path)
    with pytest.raises(StoreError, match="found another store in its place; start again"):
        DiskReader(store, 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_a_disk_that_takes_nothing_costs_no_answer_and_one_line(
    store: Store, right: np.ndarray, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heals = healer(store)
    reader = DiskReader(store, 1, heals)
    spoil(store.record_file(1), store.offset(2) + 100)

    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        for _ in range(3):
            assert np.array_equal(read(reader, store), right)
    assert heals.healed == 3
    assert caplog.text.count(os.strerror(number)) == 1
    assert caplog.text.count("reading it again") == 1
    assert np.array_equal(read(reader, store), right), "there is room again"
    reader.close()
    assert "healed from the checkpoint and written back" in caplog.text
    assert not verify_store(store.path).bad
