"""Heat survives restarts and crashes, and is never worth stopping a server for."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from moetier import files
from moetier.tiers.heat import Heat

IDENTITY = "a" * 64


def warm(layers: int = 2, experts: int = 4) -> Heat:
    heat = Heat(layers, experts, IDENTITY)
    heat.add(1, np.array([2, 3], np.int32), np.array([5, 9], np.int32))
    return heat


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "heat.json"
    warm().save(path)
    heat = Heat.load(path, 2, 4, IDENTITY)
    assert heat.counts.tolist() == [[0, 0, 0, 0], [0, 0, 5, 9]]
    assert heat.hottest(1, 3).tolist() == [3, 2, 0]
    assert heat.hottest(0, 2).tolist() == [0, 1], "cold experts go by id"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 1}',
        b'{"format": 1, "identity": "' + b"a" * 64 + b'", "counts": [[1, 2], [3]]}',
        b'{"format": 1, "identity": "' + b"a" * 64 + b'", "counts": [[-1, 0, 0, 0], [0, 0, 0, 0]]}',
        b'{"format": 1, "identity": "' + b"b" * 64 + b'", "counts": [[1, 0, 0, 0], [0, 0, 0, 0]]}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "list", "keys-missing", "ragged", "negative", "other-checkpoint", "not-text", "deep"],
)
def test_unusable_file_starts_cold_with_a_warning(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "heat.json"
    path.write_bytes(content)
    heat = Heat.load(path, 2, 4, IDENTITY)
    assert not heat.counts.any()
    assert str(path) in caplog.text
    heat.add(0, np.array([1], np.int32), np.array([1], np.int32))
    heat.save(path)
    assert Heat.load(path, 2, 4, IDENTITY).counts[0, 1] == 1


def test_missing_file_starts_cold_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not Heat.load(tmp_path / "heat.json", 2, 4, IDENTITY).counts.any()
    assert not caplog.text


SAVER = """
import sys, numpy as np
from pathlib import Path
from moetier.tiers.heat import Heat
heat = Heat(8, 4096, "a" * 64)
while True:
    heat.counts += np.uint64(1)
    heat.save(Path(sys.argv[1]))
    print(flush=True)
"""


def test_kill_during_save_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "heat.json"
    generator = np.random.default_rng(0)
    for _ in range(8):
        saver = subprocess.Popen([sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, env=os.environ)
        assert saver.stdout is not None
        saver.stdout.readline()
        time.sleep(float(generator.uniform(0, 0.05)))
        saver.kill()
        saver.wait()
        saver.stdout.close()
        counts = np.array(json.loads(path.read_text())["counts"])
        assert counts.shape == (8, 4096)
        assert (counts == counts[0, 0]).all()
        assert counts[0, 0] >= 1


def test_a_pipe_or_a_huge_file_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "heat.json"
    os.mkfifo(path)
    assert not Heat.load(path, 2, 4, IDENTITY).counts.any()
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert not Heat.load(path, 2, 4, IDENTITY).counts.any()
    assert caplog.text.count("expected a regular file") == 2


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    path, heat = tmp_path / "heat.json", Heat(2, 4, IDENTITY)
    heat.add(0, np.array([1], np.int32), np.array([3], np.int32), 1)
    os.mkfifo(path)
    heat.save(path)
    assert path.is_fifo()
    path.unlink()
    heat.save(path)
    assert Heat.load(path, 2, 4, IDENTITY).counts[0, 1]


def test_two_savers_of_one_file_leave_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "heat.json"
    command = [sys.executable, "-c", SAVER, str(path)]
    savers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    try:
        for saver in savers:
            assert saver.stdout is not None
            saver.stdout.readline()
        for _ in range(200):
            assert len(json.loads(path.read_text())["counts"]) == 8
        assert [saver.poll() for saver in savers] == [None, None], "a saver could not save"
    finally:
        for saver in savers:
            saver.kill()
            saver.communicate()


def test_a_call_of_each_of_several_layers_counts_as_they_do_one_by_one() -> None:
    layers, experts, pairs = np.array([0, 0, 2]), np.array([3, 1, 3]), np.array([5, 1, 2], np.int32)
    together, alone = Heat(3, 4, "x"), Heat(3, 4, "x")
    together.add(layers, experts, pairs, sequences=2)
    alone.add(0, experts[:2], pairs[:2], sequences=2)
    alone.add(2, experts[2:], pairs[2:], sequences=2)
    assert together.counts.tolist() == alone.counts.tolist() == [[0, 1, 0, 2], [0] * 4, [0, 0, 0, 2]]


def test_what_two_savers_counted_is_in_the_file(tmp_path: Path) -> None:
    """Two servers of one store, or the stages of a pipeline."""
    path, one = tmp_path / "heat.json", (np.arange(4), np.ones(4, np.int32))
    first, second = Heat.load(path, 2, 4, IDENTITY), Heat.load(path, 2, 4, IDENTITY)
    for _ in range(2):
        first.add(0, *one)
        second.add(1, *one)
        first.save(path)
        second.save(path)
        first.save(path)  # nothing new: nothing is added twice
    assert Heat.load(path, 2, 4, IDENTITY).counts.tolist() == [[2] * 4, [2] * 4]


def test_a_file_that_was_removed_comes_back_with_all_that_is_known(tmp_path: Path) -> None:
    path, one = tmp_path / "heat.json", (np.arange(4), np.ones(4, np.int32))
    heat = Heat.load(path, 2, 4, IDENTITY)
    heat.add(0, *one)
    heat.save(path)
    path.unlink()
    heat.save(path)
    assert Heat.load(path, 2, 4, IDENTITY).counts[0].tolist() == [1] * 4


def test_savers_with_one_process_id_do_not_tear_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in containers are all process 1: one writes while the other renames, and no lock helps."""
    path = tmp_path / "heat.json"
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    half, renamed, errors = threading.Event(), threading.Event(), []
    real = files.write_all

    def write_all(fd: int, data: memoryview, offset: int) -> None:
        if threading.current_thread() is slow:
            real(fd, data[:20], 0)
            half.set()
            renamed.wait(60)
            real(fd, data[20:], 20)
        else:
            slow.start()
            half.wait(60)
            real(fd, data, offset)

    monkeypatch.setattr(files, "write_all", write_all)

    def save() -> None:
        try:
            warm().save(path)
        except OSError as error:
            errors.append(error)

    slow = threading.Thread(target=save)
    warm().save(path)
    assert json.loads(path.read_text())["counts"], "whole after the first one's rename"
    renamed.set()
    slow.join()
    assert not errors
    assert Heat.load(path, 2, 4, IDENTITY).counts.any()
    assert [one.name for one in tmp_path.iterdir()] == ["heat.json"]


def test_a_saver_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, waits = tmp_path / "heat.json", []
    monkeypatch.setattr("time.sleep", waits.append)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        warm().save(path)
    finally:
        os.close(fd)
    assert 1 < sum(waits) < 3
    assert Heat.load(path, 2, 4, IDENTITY).counts.any()
