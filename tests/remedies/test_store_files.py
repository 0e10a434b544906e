"""What is said of disks, files and records of a store, and of weights that are damaged; done as it says."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moetier.files import locked_folder
from moetier.store import trim
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.store import Store
from tests.remedies.commands import moetier
from tests.remedies.places import WEIGHT, Place, downloaded, elsewhere, remove, removed
from tests.remedies.trouble import Trouble
from tests.store.mutants import made

remedy = pytest.mark.remedy
Mend = Callable[[Place, str], object]


ERRORS: list[tuple[int, str, bool]] = [
    (errno.ENOSPC, "free some space and run the same command again, it resumes", True),
    (errno.EDQUOT, "raise the quota", True),
    (errno.EFBIG, "raise the limit on the size of files", True),
    (errno.EIO, "the disk reports an error", True),
    (errno.ENOTCONN, "check the folder and run the same command again", True),
    (errno.EROFS, "on a file system that can be written", False),
    (errno.EACCES, "choose a folder that you may write to", False),
    (errno.EPERM, "choose a folder that you may write to", False),
]


@pytest.mark.parametrize(
    ("number", "resumes"),
    [
        pytest.param(number, resumes, id=errno.errorcode[number], marks=remedy("files.py", part))
        for number, part, resumes in ERRORS
    ],
)
def test_a_disk_that_takes_nothing(
    trouble: Trouble, place: Place, number: int, resumes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel says it of the second layer; then the trouble is mended, or another folder chosen."""
    right, partial = os.pwrite, str(place / "s.partial" / "layer-00002.records")

    def write(fd: int, data: Any, offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").resolve() == Path(partial):
            raise OSError(number, os.strerror(number))
        return right(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    with trouble:
        place.build()
    if resumes:
        monkeypatch.undo()
        assert '"layers_resumed": 1' in moetier("store", "build", place / "c", place / "s", "--json")
    else:
        elsewhere(place, trouble.text)
        place.build()
    trouble.gone()


@pytest.mark.parametrize("freed", [True, False])
@remedy("store/build.py", "free some space or choose another OUT")
def test_a_full_file_system(trouble: Trouble, place: Place, freed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    right = os.statvfs
    full = SimpleNamespace(f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full if Path(path).name == "s.partial" else right(path))
    with trouble:
        place.build()
    if freed:
        monkeypatch.undo()
    else:
        elsewhere(place, "")
    place.build()
    trouble.gone()


@remedy("store/build.py", "was changed during the build")
def test_a_checkpoint_that_changes_while_it_is_read(trouble: Trouble, place: Place) -> None:
    with trouble:
        build_store(place / "c", place / "s", progress=lambda at: place.tune(at=0, data=bytes([at.done + 1])))
    removed(place, trouble.text)
    place.build()
    trouble.gone()


@remedy("files.py", "wait until it is done")
def test_two_builds(trouble: Trouble, place: Place) -> None:
    with locked_folder(place / "s.partial", "build.lock"), trouble:
        place.build()
    place.build()
    trouble.gone()


@remedy("store/finished.py", "found the root; choose another OUT")
def test_the_root_is_no_store(trouble: Trouble, place: Place) -> None:
    with trouble:
        moetier("store", "build", place / "c", "/")
    place.build()
    trouble.gone()


@remedy("files.py", "the limit on open files")
def test_the_limit_on_open_files(trouble: Trouble, place: Place) -> None:
    place.build()
    limits, record = resource.getrlimit(resource.RLIMIT_NOFILE), np.empty(4096, np.uint8)
    with Store.open(place / "s") as store:
        try:
            with trouble:
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
                store.read_record(0, 0, record)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        store.read_record(0, 0, record)
    trouble.gone()


def _sums_gone(place: Place) -> None:
    (place / "s" / "layer-00001.sums").unlink()


def _sums_others(place: Place) -> None:
    (place / "s" / "layer-00001.sums").write_bytes(bytes(32))


def _short(place: Place) -> None:
    os.truncate(place / "s" / "layer-00001.records", 4096)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(_sums_gone, marks=remedy("store/store.py", "{} cannot be read: {}; run `moetier store build")),
        pytest.param(_sums_others, marks=remedy("store/store.py", "bytes with sha256 {}, found {} with {}; run")),
        pytest.param(_short, marks=remedy("store/store.py", "bytes ({} records), found {}; run")),
        pytest.param(Place.spoil, marks=remedy("store/store.py", "the disk returned other bytes than were written")),
    ],
)
def test_a_layer_is_built_anew(trouble: Trouble, place: Place, damage: Callable[[Place], None]) -> None:
    def read() -> None:
        with Store.open(place / "s") as store:
            store.read_record(0, 1, np.empty(4096, np.uint8))

    place.build()
    damage(place)
    with trouble:
        read()
    if damage == Place.spoil:
        (place / "s" / "layer-00001.records").unlink()  # "that file", which the message names first
        assert "layer-00001.records" in trouble.text
    command = trouble.text.partition("`moetier ")[2].partition("`")[0].replace("CHECKPOINT", str(place / "c"))
    moetier(*command.split())
    read()
    trouble.gone()


@remedy("store/trim.py", "is not what was written; check the disk and try again")
def test_a_disk_that_keeps_other_bytes(trouble: Trouble, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    right = trim.write_all

    def write(fd: int, data: memoryview, offset: int) -> None:
        right(fd, data if offset == 0 else memoryview(bytes(len(data))), offset)

    monkeypatch.setattr(trim, "write_all", write)
    place.tune(place.dense(), 0, b"\x42")
    with trouble:
        place.trim()
    monkeypatch.undo()
    place.trim()
    trouble.gone()


def _hidden(place: Place) -> Any:
    """A shard goes away after the checkpoint was opened, as a disk that fails has it; gives what brings it back."""
    path = Checkpoint.open(place / "c").tensors[WEIGHT].file
    path.rename(path.with_suffix(".gone"))
    return lambda: path.with_suffix(".gone").rename(path)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda c: c.identity(deep=True), marks=remedy("store/identity.py", "check the disk"), id="all"),
        pytest.param(lambda c: c.identity(), marks=remedy("checkpoint/samples.py", "check the disk"), id="samples"),
        pytest.param(
            lambda c: c.read_expert(0, 2), marks=remedy("checkpoint/shards.py", "check the disk"), id="tensor"
        ),
    ],
)
def test_a_disk_that_fails(trouble: Trouble, place: Place, read: Callable[[Checkpoint], object]) -> None:
    checkpoint = Checkpoint.open(place / "c")
    back = _hidden(place)
    with trouble:
        read(checkpoint)
    back()
    read(Checkpoint.open(place / "c"))
    trouble.gone()


@remedy("checkpoint/samples.py", "found {}; download it again")
def test_a_shard_that_was_cut_since(trouble: Trouble, place: Place) -> None:
    checkpoint = Checkpoint.open(place / "c")
    os.truncate(checkpoint.tensors[WEIGHT].file, 4096)
    with trouble:
        checkpoint.identity()
    downloaded(place, "")
    Checkpoint.open(place / "c").identity()
    trouble.gone()


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        pytest.param(
            *("fp32", "weight", ("F32", (32, 64), b"\0\0\xc0\x7f" * 2048)),
            marks=remedy("checkpoint/sources/base.py", "the weights are damaged: download them again"),
            id="weights",
        ),
        pytest.param(
            *("mxfp4", "scale", ("F8_E8M0", (32, 2), b"\xff" * 64)),
            marks=remedy("checkpoint/sources/base.py", "the weights are damaged: download the file again"),
            id="scales",
        ),
    ],
)
@remedy("store/build.py", "which was begun from them")
def test_damaged_weights(trouble: Trouble, tmp_path: Path, kind: str, name: str, value: Any) -> None:
    place, name = Place(tmp_path), f"model.layers.1.mlp.experts.0.up_proj.{name}"
    wrong, right = (made(np.random.default_rng(0), kind) for _ in range(2))
    for mutant in (wrong, right):
        mutant.spread(2, True)
    wrong.edit(name, value=value)
    wrong.write(place / "c")
    with trouble:
        place.build()
    remove(place / "c")
    right.write(place / "c")
    remove(Path(trouble.text.partition("then remove ")[2].partition(",")[0]))
    place.build()
    trouble.gone()
