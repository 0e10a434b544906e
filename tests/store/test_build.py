"""Building: what it reports, that it resumes, and that it refuses what it must not touch."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from moetier.errors import CheckpointError, StoreError
from moetier.store.build import build_store
from moetier.store.check import first_difference
from moetier.store.checkpoint import Checkpoint
from moetier.store.store import Store
from moetier.store.verify import verify_store
from tests.store.checkpoints import write_checkpoint


def same_files(a, b):
    names = sorted(path.name for path in a.iterdir())
    assert names == sorted(path.name for path in b.iterdir())
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def test_nano_builds_checks_and_verifies(nano, tmp_path):
    report = build_store(nano, tmp_path / "s", check=3)
    assert (report.layers, report.experts, report.layers_built, report.experts_checked) == (5, 32, 5, 15)
    assert report.bytes == sum(path.stat().st_size for path in (tmp_path / "s").glob("*.records"))
    assert not verify_store(tmp_path / "s").bad
    checkpoint = Checkpoint.open(nano)
    with Store.open(tmp_path / "s", checkpoint.identity()) as store:
        record = np.empty(store.manifest.record_stride, np.uint8)
        for layer, expert in ((0, 0), (2, 17), (4, 31)):
            store.read_record(layer, expert, record)
            assert first_difference(store.layout.unpack(record), checkpoint.read_expert(layer, expert)) is None


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_a_byte(tmp_path, slices, threads):
    made = write_checkpoint(tmp_path / "c", hidden=96, intermediate=128, experts=9)
    build_store(made.path, tmp_path / "one", slices=slices, threads=1)
    build_store(made.path, tmp_path / "many", slices=slices, threads=threads)
    assert same_files(tmp_path / "one", tmp_path / "many")


def test_a_complete_store_is_left_alone(tmp_path):
    made = write_checkpoint(tmp_path / "c")
    build_store(made.path, tmp_path / "s")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "s").iterdir()}
    report = build_store(made.path, tmp_path / "s")
    assert (report.already_complete, report.layers_built) == (True, 0)
    assert build_store(made.path, tmp_path / "s", check=3).experts_checked == 6
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "s").iterdir()}
    assert not (tmp_path / "s.partial").exists()


def test_an_existing_store_of_another_build_is_refused(tmp_path):
    made = write_checkpoint(tmp_path / "c", intermediate=64)
    other = write_checkpoint(tmp_path / "d", intermediate=64, top_k=1)
    build_store(made.path, tmp_path / "s")
    with pytest.raises(StoreError, match="expected slices 2, found 1; choose another OUT"):
        build_store(made.path, tmp_path / "s", slices=2)
    with pytest.raises(StoreError, match=r"expected checkpoint identity .*, found"):
        build_store(other.path, tmp_path / "s")
    assert not verify_store(tmp_path / "s").bad


def test_a_folder_that_is_no_store_is_not_touched(tmp_path):
    made = write_checkpoint(tmp_path / "c")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="exists and is no store"):
        build_store(made.path, tmp_path / "s")
    assert (tmp_path / "s" / "thesis.txt").read_text() == "years of work"


def test_an_empty_folder_is_taken(tmp_path):
    made = write_checkpoint(tmp_path / "c")
    (tmp_path / "s").mkdir()
    build_store(made.path, tmp_path / "s")
    assert not verify_store(tmp_path / "s").bad


def interrupted(made, out, layers_done):
    """A build that died after some layers: the next layer's records are half written, its checksums absent."""
    build_store(made.path, out)
    partial = out.with_name(out.name + ".partial")
    out.rename(partial)
    (partial / "store.json").unlink()
    plan = {
        "format": 1,
        "contract": "int8x",
        "layout": "tile16",
        "slices": 1,
        "record_stride": 4096,
        "identity": Checkpoint.open(made.path).identity(),
    }
    (partial / "build.json").write_text(json.dumps(plan))
    for number in made.layers[layers_done:]:
        (partial / f"layer-{number:05d}.sums").unlink()
        os.truncate(partial / f"layer-{number:05d}.records", 5000)
    return partial


def test_an_interrupted_build_resumes_at_the_last_whole_layer(tmp_path):
    made = write_checkpoint(tmp_path / "c", layers=(1, 2, 3, 4))
    partial = interrupted(made, tmp_path / "s", layers_done=2)
    kept = (partial / "layer-00001.records").stat().st_mtime_ns
    report = build_store(made.path, tmp_path / "s", check=4)
    assert (report.layers_resumed, report.layers_built, report.experts_checked) == (2, 2, 16)
    assert (tmp_path / "s" / "layer-00001.records").stat().st_mtime_ns == kept
    assert not partial.exists()
    build_store(made.path, tmp_path / "fresh")
    assert same_files(tmp_path / "s", tmp_path / "fresh")


def test_the_rest_of_another_build_is_refused(tmp_path):
    made = write_checkpoint(tmp_path / "c", layers=(1, 2))
    other = write_checkpoint(tmp_path / "d", layers=(1, 2), top_k=1)
    partial = interrupted(made, tmp_path / "s", layers_done=1)
    with pytest.raises(StoreError, match=r"is the rest of another build: expected .*; remove .*s\.partial and run"):
        build_store(other.path, tmp_path / "s")
    (partial / "build.json").write_text("")
    with pytest.raises(StoreError, match="is the rest of another build"):
        build_store(made.path, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_the_check_finds_a_record_that_is_not_the_checkpoints(tmp_path):
    """A resumed layer whose checksums fit its records, but whose records are wrong: only the comparison can tell."""
    made = write_checkpoint(tmp_path / "c", layers=(1, 2))
    partial = interrupted(made, tmp_path / "s", layers_done=2)
    records, sums = (partial / f"layer-00001.{kind}" for kind in ("records", "sums"))
    stride, raw, sum_bytes = 4096, records.read_bytes(), sums.read_bytes()
    records.write_bytes(raw[stride : 2 * stride] + raw[:stride] + raw[2 * stride :])
    sums.write_bytes(sum_bytes[8:16] + sum_bytes[:8] + sum_bytes[16:])
    with pytest.raises(StoreError, match=r"layer 1, expert [01]: the store's gate codes at \[0, .*differs"):
        build_store(made.path, tmp_path / "s", check=4)
    assert not (tmp_path / "s").exists()


def test_a_checkpoint_that_changes_during_the_build_makes_no_store(tmp_path):
    made = write_checkpoint(tmp_path / "c")

    def change(step):
        if step.done == 3:
            (made.path / "config.json").write_text((made.path / "config.json").read_text() + " ")

    with pytest.raises(CheckpointError, match="was changed during the build"):
        build_store(made.path, tmp_path / "s", progress=change)
    assert not (tmp_path / "s").exists()


def test_a_scale_of_nan_ends_the_build_and_leaves_no_store(tmp_path):
    made = write_checkpoint(tmp_path / "c", scales=(255, 256))
    with pytest.raises(CheckpointError, match="255"):
        build_store(made.path, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_progress_counts_every_record_once(tmp_path):
    made = write_checkpoint(tmp_path / "c")
    steps = []
    build_store(made.path, tmp_path / "s", check=1, progress=steps.append)
    assert [s.done for s in steps if s.stage == "build"] == [0, 0, *range(1, 9)]
    assert [(s.done, s.total) for s in steps if s.stage == "check"] == [(0, 2), (1, 2), (2, 2)]


def test_deep_records_the_hash_of_the_content(tmp_path):
    made = write_checkpoint(tmp_path / "c")
    build_store(made.path, tmp_path / "s", deep=True)
    with Store.open(tmp_path / "s") as store:
        assert store.manifest.checkpoint.content == Checkpoint.open(made.path).identity(deep=True)


PEAK = """
import re, sys
from pathlib import Path
from moetier.store.build import build_store
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before = peak()
report = build_store(sys.argv[1], sys.argv[2], threads=2, check=int(sys.argv[3]))
print(peak() - before, report.record_stride)
"""


@pytest.mark.parametrize(("check", "records"), [(0, 2), (2, 5)], ids=["build", "check"])
def test_peak_memory_is_a_few_records_a_thread_and_little_more(tmp_path, check, records):
    """12 experts of 5 MB in one shard of 60 MB: far less than the shard is held at any moment."""
    made = write_checkpoint(tmp_path / "c", layers=(0,), experts=12, hidden=2048, intermediate=1536)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, made.path, tmp_path / "s", str(check)], capture_output=True, text=True, check=True
    )
    grown, stride = map(int, done.stdout.split())
    assert 5_000_000 < stride < 6_000_000
    assert grown < 2 * records * stride + (4 << 20)


def test_out_may_be_a_relative_path_and_in_a_folder_yet_to_be_made(tmp_path, monkeypatch):
    made = write_checkpoint(tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    build_store(made.path, "deep/er/s")
    assert not verify_store(tmp_path / "deep" / "er" / "s").bad


def command(*arguments, cwd=None):
    """Run the command line as a user does, without the console script."""
    code = "import sys; from moetier.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd=cwd)


def test_the_command_line_builds_says_and_verifies(tmp_path):
    made = write_checkpoint(tmp_path / "c")
    built = command("store", "build", made.path, tmp_path / "s", "--check", 2, "--json")
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout)["experts_checked"] == 4
    again = command("store", "build", made.path, tmp_path / "s")
    assert "nothing rebuilt" in again.stdout
    info = json.loads(command("store", "info", tmp_path / "s", "--json").stdout)
    assert (info["records"], info["geometry"]["hidden"]) == (8, 64)
    assert info["checkpoint"]["identity"] in re.sub(r"\s", "", command("store", "info", tmp_path / "s").stdout)
    assert json.loads(command("store", "verify", tmp_path / "s", "--json").stdout)["bad"] == []


def test_the_command_line_ends_with_1_on_a_bad_record_and_2_on_a_users_error(tmp_path):
    made = write_checkpoint(tmp_path / "c")
    build_store(made.path, tmp_path / "s")
    raw = bytearray((tmp_path / "s" / "layer-00002.records").read_bytes())
    raw[4096] ^= 4
    (tmp_path / "s" / "layer-00002.records").write_bytes(raw)
    bad = command("store", "verify", tmp_path / "s", "--json")
    assert bad.returncode == 1
    assert [(b["layer"], b["expert"]) for b in json.loads(bad.stdout)["bad"]] == [(2, 1)]
    assert "checksum" in command("store", "verify", tmp_path / "s").stderr
    absent = command("store", "build", tmp_path / "absent", tmp_path / "t")
    assert absent.returncode == 2
    assert "expected a checkpoint folder, found nothing" in absent.stderr
    assert "Traceback" not in absent.stderr


def test_no_temporary_file_is_left_behind(tmp_path):
    made = write_checkpoint(tmp_path / "c")
    build_store(made.path, tmp_path / "s")
    shutil.rmtree(made.path)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.name != "s") == [
        f"layer-0000{n}.{kind}" for n in (1, 2) for kind in ("records", "sums")
    ] + ["store.json"]


@pytest.mark.parametrize("target", ["nowhere", "empty"])
def test_a_link_in_the_place_of_the_store_is_refused_before_anything_is_built(tmp_path, target):
    """A folder cannot be renamed to a link: that must not come out after hours of building."""
    made = write_checkpoint(tmp_path / "c")
    (tmp_path / "empty").mkdir()
    (tmp_path / "s").symlink_to(tmp_path / target)
    with pytest.raises(StoreError, match="is a link that leads to no store"):
        build_store(made.path, tmp_path / "s")
    assert not (tmp_path / "s.partial").exists()


def test_the_root_is_no_name_for_a_store(tmp_path):
    with pytest.raises(StoreError, match="found the root"):
        build_store(write_checkpoint(tmp_path / "c").path, "/")
