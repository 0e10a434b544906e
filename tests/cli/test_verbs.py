"""Every verb through the installed command: what it prints, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moetier.launch.process import runs_on_cpu
from moetier.store.build import build_store
from moetier.store.store import Store
from tests.store.checkpoints import write_checkpoint

COMMAND = str(Path(sys.executable).with_name("moetier"))


def run(*arguments: str | Path, code: int = 0) -> str:
    """Run `moetier` with `arguments`; returns standard output, or standard error where `code` is not 0."""
    done = subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr if code else done.stdout


def run_json(*arguments: str | Path) -> Any:
    return json.loads(run(*arguments, "--json"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verbs")
    made = write_checkpoint(folder / "model", experts=8, hidden=64, intermediate=64, top_k=3)
    build_store(made.path, folder / "store", slices=2)
    return folder / "store"


def test_version() -> None:
    report = run_json("version")
    assert report["contract"] == "int8x"
    assert report["isas"][-1] == "portable"
    assert "int8x" in run("version")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("verb", [("version",), ("plan", "--models"), ("bench", "list"), ("plan", "--help")])
def test_output_that_has_no_room_is_one_error(verb: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [COMMAND, *verb], stdout=full, stderr=subprocess.PIPE, text=True, timeout=600, check=False
        )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "moetier: error: cannot write: No space left on device; make room where the output goes"
    ]


@pytest.mark.parametrize("verb", [("version",), ("plan", "--models"), ("bench", "list")])
def test_a_reader_that_has_enough_is_no_error(verb: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([COMMAND, *verb], stdout=write, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_identity_of_every_path(store: Path) -> None:
    report = run_json("identity", "--store", store, "--calls", "60")
    assert (report["calls"], report["differ"], report["first"]) == (60, 0, None)
    assert report["oracle_calls"] >= 2
    tiers = {path.split("/")[0] for path in report["paths"]}
    assert tiers == {"all-DRAM", "quarter-DRAM", "disk-only"}
    assert len(report["paths"]) == 3 * 2 * len(run_json("version")["isas"])
    assert "values that differ: 0" in run("identity", "--store", store, "--calls", "10")


def test_identity_names_the_paths_that_differ(store: Path, tmp_path: Path) -> None:
    """Recorded calls with one bit of one output changed: exit code 1, and the pair is named."""
    import numpy as np

    from moetier.engine.recording import Call, Recorder
    from moetier.identity.long import Paths, random_calls

    with Store.open(store) as opened:
        paths = Paths(opened, (1,), ("portable",), 64)
        layer = next(iter(paths.of_layer(0).values()))
        calls = random_calls(opened, 0, np.random.default_rng(3))
        recorder = Recorder(tmp_path / "calls")
        for number in range(4):
            call = next(calls)
            out = np.empty(call.x.shape, np.uint16)
            layer.forward(call.x, call.ids, call.weights, out)
            if number == 2:
                out[0, 5] ^= 1
            recorder.add(Call(0, call.x, call.ids, call.weights, out))
        recorder.close()
        paths.close()
    done = subprocess.run(
        [COMMAND, "identity", "--store", str(store), "--replay", str(tmp_path / "calls"), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert (report["calls"], report["differ"]) == (4, 1)
    assert report["first"] == {"paths": ["as served", "all-DRAM"], "layer": 0, "values": 1}


def test_replay_of_nothing(store: Path, tmp_path: Path) -> None:
    error = run("identity", "--store", store, "--replay", tmp_path, code=2)
    assert "expected *.calls files of a recording, found none" in error


def _zeros(layer: int, tokens: int, hidden: int, top_k: int) -> tuple[Any, ...]:
    import numpy as np

    routed = (np.zeros((tokens, top_k), np.int32), np.zeros((tokens, top_k), np.float32))
    return np.int64(layer), np.zeros((tokens, hidden), np.uint16), *routed, np.zeros((tokens, hidden), np.uint16)


@pytest.mark.parametrize(
    ("arrays", "tail", "message"),
    [
        ((), b"garbage, not an array", "to the end of the file"),
        ((), b"", "expected at least one whole recorded call"),
        (_zeros(0, 2, 64, 3)[:4], b"", "expected at least one whole recorded call"),
        (_zeros(0, 2, 64, 3), b"garbage, not an array", "to the end of the file"),
        (_zeros(7, 2, 64, 3), b"", "does not fit"),
        (_zeros(-1, 2, 64, 3), b"", "does not fit"),
        (_zeros(0, 2, 96, 3), b"", "does not fit"),
        (_zeros(0, 2, 64, 2), b"", "does not fit"),
    ],
    ids=["garbage", "empty", "cut", "garbage-after", "layer", "layer-negative", "hidden", "top-k"],
)
def test_replay_of_what_is_no_recording_of_the_store(
    store: Path, tmp_path: Path, arrays: tuple[Any, ...], tail: bytes, message: str
) -> None:
    """A check that compared nothing must not pass."""
    import numpy as np

    with (tmp_path / "1.calls").open("wb") as file:
        for array in arrays:
            np.save(file, array)
        file.write(tail)
    assert message in run("identity", "--store", store, "--replay", tmp_path, code=2)


def test_bench_kernel() -> None:
    report = run_json("bench", "kernel", "--shape", "256,64,8,2", "--threads", "1", "-M", "1", "-M", "4")
    assert [row["M"] for row in report["rows"]] == [1, 4]
    assert report["shape"] == {"hidden": 256, "intermediate": 64, "experts": 8, "top_k": 2, "slices": 1}
    assert all(row["us"] > 0 < row["read_gbps"] for row in report["rows"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "kernel", "--shape", "v5"), "expected one of v4-flash"),
        (("bench", "kernel", "--isa", "sse2"), "sse2"),
        (("identity", "--store", "/nowhere"), "/nowhere"),
        (("store", "info", "/nowhere"), "/nowhere"),
        (("serve", "x" * 300, "--store", "s"), "File name too long"),
        (("bench", "kernel", "--shape", "32,32,1,1", "-M", "1", "--threads", "100000"), "expected 1 to 4096"),
        (("serve", "/nowhere", "--store", "s", "--set", "cpus=" + "[" * 50_000), "cpus"),
        (("serve", "/nowhere", "--store", "s", "--set", "heat_save_seconds=Infinity"), "heat_save_seconds"),
        (("serve", "/nowhere", "--store", "s", "--set", "isa=sse2"), "isa='sse2'"),
        (("serve", "/nowhere", "--store", "s", "--set", "cpus=[999999]"), "may not use [999999]"),
        (("serve", "/nowhere", "--store", "s", "--api-key", "schlüssel"), "expected printable ASCII"),
        (("serve", "/nowhere", "--store", "s", "--port", "8001", "--", "--port=8002"), "give one of them"),
        (("serve", "/nowhere", "--store", "s", "--", "--hos", "0.0.0.0"), "write it out"),
        (("serve", "/nowhere", "--store", "s", "--api-key", "a", "--", "--api-key", "b"), "give one of them"),
    ],
    ids=[
        *("shape", "isa", "identity", "info", "long-name", "threads", "deep-setting", "endless-setting"),
        *("serve-isa", "serve-cpus", "serve-key", "serve-two-ports", "serve-beginning", "serve-two-keys"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    error = run(*arguments, code=2)
    assert error.startswith("moetier: error: ")
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_a_name_that_the_locale_cannot_write_stops_no_command(store: Path, tmp_path: Path) -> None:
    named = tmp_path / "stör"
    named.symlink_to(store)
    done = subprocess.run(
        [COMMAND, "store", "verify", str(named)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "st\\xf6r" in done.stdout


def test_a_host_that_is_no_name_is_a_clear_error(store: Path) -> None:
    model, port = store.with_name("model"), "--port=1"
    error = run("serve", model, "--store", store, "--host", "ü..x", "--api-key", "k", port, code=2)
    assert "cannot listen on ü..x:1" in error
    assert "less than or equal" in run("serve", model, "--store", store, "--kv-cache-gib", "inf", port, code=2)


@pytest.mark.skipif(not runs_on_cpu(), reason="vLLM computes on a GPU here")
@pytest.mark.parametrize("slots", ["2", "auto"])
def test_slots_without_a_gpu_are_refused_before_anything_starts(store: Path, slots: str) -> None:
    error = run("serve", store.with_name("model"), "--store", store, "--slots", slots, "--port=1", code=2)
    assert f"slots: found {slots}" in error
    assert "leave --slots out" in error
