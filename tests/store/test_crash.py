"""A build that is killed, cannot write, or is not alone: the store is there whole or not at all."""

import errno
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moetier.errors import RecordReadError, StoreError
from moetier.store import build
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.heal import Healer
from moetier.store.store import Store
from moetier.store.verify import verify_store
from moetier.tiers.heat import Heat
from tests.store.checkpoints import write_checkpoint

BUILD = """
import sys
from moetier.errors import MoetierError
from moetier.store.build import build_store
print("ready", flush=True)
sys.stdin.readline()
try:
    build_store(sys.argv[1], sys.argv[2], threads=2, check=1)
except MoetierError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def start_build(checkpoint, out, **more):
    """A process that has imported everything and waits for a line to start building."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(checkpoint), str(out)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    return process


def go(process):
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """8 layers of 8 experts, 13 MB: a build takes some tenths of a second."""
    path = tmp_path_factory.mktemp("crash") / "c"
    return write_checkpoint(path, layers=tuple(range(8)), experts=8, hidden=512, intermediate=256)


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    """The store of an undisturbed build."""
    out = tmp_path_factory.mktemp("whole") / "s"
    build_store(made.path, out)
    return out


def is_whole(out, whole):
    """The store opens, verifies, and has the bytes of an undisturbed build."""
    assert not verify_store(out).bad
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.iterdir())
    return all((out / path.name).read_bytes() == path.read_bytes() for path in whole.iterdir())


KILLS = int(os.environ.get("MOETIER_KILLS", "50"))
"""1,000 before a release."""


def forked(job):
    """Run `job` in a fork; its process id. Far quicker than a new interpreter for each kill."""
    pid = os.fork()
    if pid == 0:
        try:
            job()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def killed_after(seconds, job):
    """Kill a forked `job` after some time; whether it was still at work."""
    pid = forked(job)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def test_killed_at_random_moments_it_opens_whole_or_not_at_all_and_resumes(made, whole, tmp_path):
    """SIGKILL somewhere in a build, again and again over the same folder; each goes on from what is there."""
    rng, landed, finished = random.Random(7), 0, 0
    start = time.monotonic()
    assert os.waitpid(forked(lambda: build_store(made.path, tmp_path / "timed", threads=2, check=1)), 0)[1] == 0
    seconds = time.monotonic() - start
    out = tmp_path / "s"
    while landed < KILLS:
        landed += killed_after(rng.random() * seconds, lambda: build_store(made.path, out, threads=2, check=1))
        if not out.exists():
            with pytest.raises(StoreError, match="is no store"):
                Store.open(out)
            continue
        assert not verify_store(out).bad
        assert build_store(made.path, out).already_complete
        assert is_whole(out, whole)
        finished += 1
        shutil.rmtree(out)
    report = build_store(made.path, out, check=2)
    assert is_whole(out, whole)
    assert not (tmp_path / "s.partial").exists()
    assert finished > 0 or report.layers_resumed > 0


def test_killed_while_healing_a_record_is_bad_or_right(made, whole, tmp_path):
    """SIGKILL while bad records are rewritten: what reads without an error is always the record of the build."""
    shutil.copytree(whole, tmp_path / "s")
    rng = random.Random(8)
    checkpoint = Checkpoint.open(made.path)
    with Store.open(tmp_path / "s") as store:
        record = np.empty(store.manifest.record_stride, np.uint8)
        spoiled = [(layer, expert) for layer in range(8) for expert in rng.sample(range(8), 3)]

        def heal_all():
            healer = Healer(store, checkpoint)
            for layer, expert in spoiled:
                healer.heal(layer, expert, "bad", np.empty(store.manifest.record_stride, np.uint8))

        start = time.monotonic()
        heal_all()
        seconds, landed = time.monotonic() - start, 0
        while landed < KILLS // 5:
            for layer, expert in spoiled:
                with store.record_file(layer).open("r+b") as file:
                    file.seek(store.offset(expert) + rng.randrange(store.manifest.record_stride - 64))
                    file.write(rng.randbytes(64))
            landed += killed_after(rng.random() * seconds, heal_all)
            assert {(bad.layer, bad.expert) for bad in verify_store(store.path).bad} <= set(spoiled)
            for layer, expert in spoiled:
                right = (whole / store.record_file(layer).name).read_bytes()[store.offset(expert) :][: record.size]
                try:
                    store.read_record(layer, expert, record)
                except RecordReadError:
                    continue
                assert record.tobytes() == right
        heal_all()
    assert is_whole(tmp_path / "s", whole)


def test_killed_while_saving_heat_one_whole_state_is_kept(tmp_path, caplog):
    """SIGKILL among saves of ever larger counts: what loads is one of the states, never older than the last seen."""
    path, rng, landed, seen, longest = tmp_path / "heat.json", random.Random(9), 0, 0, 0.01
    Heat(8, 64, "a").save(path)

    def save_on():
        heat = Heat.load(path, 8, 64, "a")
        while True:
            heat.counts += np.uint64(1)
            heat.save(path)

    while landed < KILLS or not seen:
        if landed >= KILLS:
            longest *= 2  # on a slow disk no save has ended in time yet
            assert longest < 60, "nothing is ever saved"
        landed += killed_after(0.002 + longest * rng.random(), save_on)
        counts = Heat.load(path, 8, 64, "a").counts
        assert (counts == counts[0, 0]).all()
        assert counts[0, 0] >= seen
        seen = int(counts[0, 0])
    assert not caplog.records, "a heat file was not used"


STEPS = {
    "rename": (Path, "rename"),
    "write_durably": (build, "write_durably"),
    "fsync": (os, "fsync"),
    "unlink": (Path, "unlink"),
}


def killed_at(step, count, checkpoint, out):
    """Run a build in a fork that kills itself just before the count-th call of a step; whether it came that far."""

    def job():
        owner, name = STEPS[step]
        real, calls = getattr(owner, name), itertools.count()

        def fatal(*arguments, **named):
            if next(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        setattr(owner, name, fatal)
        build_store(checkpoint, out, threads=1)

    status = os.waitstatus_to_exitcode(os.waitpid(forked(job), 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("step", STEPS)
def test_killed_before_each_step_that_matters(tmp_path, step):
    """Random kills seldom hit the moments between two steps; these always do."""
    made = write_checkpoint(tmp_path / "c", layers=(0, 1))
    build_store(made.path, tmp_path / "whole")
    for count in range(20):
        out = tmp_path / f"s{count}"
        killed = killed_at(step, count, made.path, out)
        if out.exists():
            Store.open(out).close()
            assert not verify_store(out).bad
        report = build_store(made.path, out)
        assert not verify_store(out).bad
        for path in (tmp_path / "whole").iterdir():
            assert (out / path.name).read_bytes() == path.read_bytes()
        assert not (tmp_path / f"s{count}.partial").exists()
        if not killed:
            assert report.already_complete
            return
    pytest.fail(f"a build of two layers calls {step} more than 20 times")


def test_two_builds_of_the_same_store_do_not_mix(made, whole, tmp_path):
    out = tmp_path / "s"
    processes = [start_build(made.path, out) for _ in range(3)]
    for process in processes:
        go(process)
    outcomes = [(process.communicate()[1], process.returncode) for process in processes]
    assert is_whole(out, whole)
    assert sum(code == 0 for _, code in outcomes) >= 1
    for message, code in outcomes:
        assert code == 0 or "is being built by another process" in message, message


def test_the_lock_of_a_killed_build_does_not_stay(made, tmp_path):
    assert killed_at("write_durably", 3, made.path, tmp_path / "s")
    assert (tmp_path / "s.partial" / "build.lock").exists()
    build_store(made.path, tmp_path / "s")
    assert not verify_store(tmp_path / "s").bad


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB, mounted here."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]).returncode:
        pytest.skip("mounting a small file system needs root and the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_too_little_space_is_refused_before_the_start(made, small_disk):
    with pytest.raises(StoreError, match=r"needs 0.013 GB more, found 0.004 GB free.*free some space"):
        build_store(made.path, small_disk / "s")
    assert not list(small_disk.glob("*/*.records"))


def test_a_disk_that_fills_up_during_the_build_leaves_it_resumable(made, whole, small_disk, monkeypatch):
    """Somebody else fills the disk after the check of its space, which is what switching the check off amounts to."""
    monkeypatch.setattr("moetier.store.build._Build._check_space", lambda self, missing: None)
    with pytest.raises(StoreError, match=r"cannot be written: No space left on device; free some space and run"):
        build_store(made.path, small_disk / "s")
    assert not (small_disk / "s").exists()
    monkeypatch.undo()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    report = build_store(made.path, small_disk / "s")
    assert report.layers_resumed >= 1
    assert report.layers_resumed + report.layers_built == 8
    assert is_whole(small_disk / "s", whole)


def test_a_read_only_disk_is_one_error(made, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match=r"cannot be made: Read-only file system; choose a folder"):
        build_store(made.path, small_disk / "s")


def test_a_limit_on_file_sizes_is_one_error_and_resumable(made, whole, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    process = start_build(made.path, tmp_path / "s", preexec_fn=limit)
    go(process)
    message = process.communicate()[1]
    assert process.returncode == 1
    assert f"cannot be written: {os.strerror(errno.EFBIG)}; raise the limit" in message
    build_store(made.path, tmp_path / "s")
    assert is_whole(tmp_path / "s", whole)


def test_a_file_in_the_way_of_out_is_refused(made, tmp_path):
    (tmp_path / "s").write_text("a file")
    with pytest.raises(StoreError, match="exists and is no store"):
        build_store(made.path, tmp_path / "s")
    (tmp_path / "t.partial").write_text("a file")
    with pytest.raises(StoreError, match=r"t.partial cannot be made: File exists"):
        build_store(made.path, tmp_path / "t")
