"""The command `moetier serve` when things go wrong, and when it is told to end."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from moetier.launch.scratch import PREFIX, SHARED, SHARED_MEMORY, mapped_by
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.trim import trim_checkpoint
from tests.serve.damage import flip_a_bit_of_every_record, zero_the_weights
from tests.serve.server import LIMIT_SECONDS, Server, environment, free_port, refused, serving
from tests.serve.sparse import huge
from tests.serve.streaming import LONG, Request
from tests.store.checkpoints import base_config, common_tensors, write_checkpoint, write_shards

TOP_K = 4
HEAT = "heat.json"
STARTING = 5
"""Processes while vLLM's server waits for its engine: launcher, guard, server, its resource tracker, engine."""


@pytest.fixture(scope="module")
def built(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of nano; whoever damages it copies it first."""
    path = tmp_path_factory.mktemp("built") / "store"
    build_store(nano, path)
    return path


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    """A copy of nano's store."""
    return Path(shutil.copytree(built, tmp_path / "store"))


@pytest.fixture
def model(nano: Path, tmp_path: Path) -> Path:
    """A copy of nano."""
    return Path(shutil.copytree(nano, tmp_path / "nano-mxfp4"))


def content(folder: Path) -> dict[str, str]:
    """Hash of every file of a folder, heat left out; empty where there is none."""
    files = sorted(path for path in folder.glob("**/*") if path.is_file() and path.name != HEAT)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# -- refused before anything starts: exit code 2, one error, nothing written, nothing left --------------------------


def test_store_of_another_checkpoint(nano: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other")
    build_store(other.path, tmp_path / "store")
    before = content(tmp_path / "store")
    error = refused(nano, "--store", tmp_path / "store", "--build-store")
    assert "was built from another checkpoint" in error
    assert "moetier store build" in error
    assert content(tmp_path / "store") == before


@pytest.mark.parametrize("build", ["--build-store", None], ids=["to-build", "built-before"])
def test_truncated_shard(model: Path, store: Path, tmp_path: Path, build: str | None) -> None:
    shard = model / "model-00001-of-00001.safetensors"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1000)
    to = tmp_path / "new" if build else store
    before = content(to)
    error = refused(model, "--store", to, *([build] if build else []))
    assert str(shard) in error
    assert content(to) == before
    assert to.exists() == bool(before)


def test_unknown_setting(nano: Path, store: Path) -> None:
    error = refused(nano, "--store", store, "--set", "disk_thread=4")
    assert "unknown setting 'disk_thread', did you mean 'disk_threads'?" in error


def test_every_wrong_setting_is_named(nano: Path, store: Path) -> None:
    error = refused(nano, "--store", store, "--set", "disk_threads=0", "--dram-records", "101%")
    assert "'disk_threads'" in error
    assert "'dram_records'" in error


def test_model_without_experts(tmp_path: Path) -> None:
    model = tmp_path / "dense"
    write_shards(model, common_tensors("model.layers.0.mlp", 64, 4))
    config = base_config(layers=(0,), experts=4, hidden=64, intermediate=32, top_k=2, model_type="qwen3")
    (model / "config.json").write_text(json.dumps(config))
    error = refused(model, "--store", tmp_path / "store", "--build-store")
    assert "qwen3" in error
    assert "whose experts' names moetier does not know yet" in error, "config.json says experts"
    config = {key: value for key, value in config.items() if "expert" not in key}
    (model / "config.json").write_text(json.dumps(config))
    error = refused(model, "--store", tmp_path / "store", "--build-store")
    assert "is a dense model (model type qwen3)" in error
    assert "has no routed experts" not in error.partition("dense model")[0]
    assert not (tmp_path / "store").exists()


def test_missing_model(tmp_path: Path) -> None:
    error = refused(tmp_path / "nothing", "--store", tmp_path / "store", "--build-store")
    assert f"{tmp_path / 'nothing'}: expected a checkpoint folder, found nothing" in error
    assert not (tmp_path / "store").exists()


def test_missing_store(nano: Path, tmp_path: Path) -> None:
    error = refused(nano, "--store", tmp_path / "store")
    assert f"there is no store at {tmp_path / 'store'}" in error
    assert "--build-store" in error
    assert not (tmp_path / "store").exists()


def test_too_little_memory_for_the_cache(nano: Path, store: Path) -> None:
    error = refused(nano, "--store", store, "--kv-cache-gib", "1e6")
    assert "too little memory" in error
    assert "lower --kv-cache-gib" in error


def test_too_little_memory_for_the_records(tmp_path: Path) -> None:
    model, store = huge(tmp_path, layers=60, experts=16, hidden=65536, intermediate=16384)
    options = ("--kv-cache-gib", "0.25", "--set", "staging_records=1", "--dram-records", "100%")
    error = refused(model, "--store", store, *options)
    assert "too little memory for 16 of 16 records of each of 60 layers" in error
    assert "what fits is --dram-records" in error


def test_port_in_use(nano: Path, store: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        error = refused(nano, "--store", store, "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert "--port" in error


def test_beyond_loopback_without_a_key(nano: Path, store: Path) -> None:
    error = refused(nano, "--store", store, "--host", "0.0.0.0", "--port", str(free_port()))
    assert "no API key is set" in error
    assert "--api-key" in error


# -- running servers -------------------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each file of a store, heat left out: what is written again differs."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir() if path.name != HEAT}


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM], ids=lambda number: number.name
)
def test_signal_drains_saves_heat_exits_0(number: signal.Signals, nano: Path, store: Path, tmp_path: Path) -> None:
    """And a start with a store that is there builds nothing."""
    before = files(store)
    with serving(nano, store, tmp_path / "out") as server:
        running = Request(server)
        assert running.began.wait(LIMIT_SECONDS)
        assert server.stop(number) == 0
        assert running.whole()
    assert "heat saved" in server.stderr
    counts = np.array(json.loads((store / HEAT).read_text())["counts"])
    assert counts[:4].sum(1).min() >= TOP_K * (LONG["max_tokens"] - 1)
    assert "built" not in server.stderr
    assert files(store) == before


@pytest.fixture
def temporary() -> Iterator[Path]:
    """An empty folder for temporary files, with a name short enough for sockets, which pytest's are not."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_drain_that_runs_out_says_what_it_cut_and_leaves_nothing(
    nano: Path, store: Path, temporary: Path, tmp_path: Path
) -> None:
    options = ("--drain-seconds", "4", "--identity-check", "1")
    variables = {**environment(), "TMPDIR": str(temporary)}
    with Server(nano, store, tmp_path / "out", options=options, variables=variables) as server:
        server.wait_ready()
        memory = mapped_by(str(process.pid) for process in server.processes())
        assert memory
        assert [path.name for path in temporary.glob(f"{PREFIX}*/{SHARED}")] == [SHARED]
        body = {"model": "nano-mxfp4", "prompt": "The", "max_tokens": 900, "n": 8, "ignore_eos": True}
        streaming = Request(server)
        assert streaming.began.wait(LIMIT_SECONDS)
        with ThreadPoolExecutor() as pool:
            url = f"{server.url}/v1/completions"
            whole = [pool.submit(httpx.post, url, json=body, timeout=LIMIT_SECONDS) for _ in range(4)]
            server.wait_for_requests(1 + 4 * 8)  # one that comes later is refused, not cut off
            server.send(signal.SIGTERM)
            deadline = time.monotonic() + LIMIT_SECONDS
            while server.healthy() and time.monotonic() < deadline:
                time.sleep(0.05)
            new = httpx.post(url, json=body, timeout=LIMIT_SECONDS)
            answers = [answer.result() for answer in whole]
        assert new.status_code == 503
        assert int(new.headers["retry-after"]) >= 1
        assert server.wait_exit() == 1
        streamed = streaming.join()
        assert streamed.error is None or "cut off" in str(streamed.error)
        assert [answer.status_code for answer in answers] == [503] * 4
        assert all("cut off" in answer.json()["error"]["message"] for answer in answers)
        cut = 4 + (streamed.error is not None)
        assert server.error.startswith(f"cut off {cut} requests in flight, for --drain-seconds 4 were over")
        assert "give more --drain-seconds" in server.error
    assert list(temporary.iterdir()) == []
    assert not [name for name in memory if (SHARED_MEMORY / name).exists()]


@pytest.mark.long
def test_signal_while_it_starts_ends_it(nano: Path, store: Path, tmp_path: Path) -> None:
    before = files(store)
    with Server(nano, store, tmp_path / "out") as server:
        server.wait_for_processes(STARTING)  # vLLM's server is deaf to SIGTERM now
        assert server.stop(signal.SIGINT) == 0
    assert "ended before it was ready" in server.stderr
    assert files(store) == before


@pytest.mark.long
def test_port_that_was_taken_before_the_server_had_it(nano: Path, store: Path, tmp_path: Path) -> None:
    with Server(nano, store, tmp_path / "out") as server, socket.socket() as other:
        server.wait_for_processes(3)  # launcher, guard, and the server, which imports for seconds
        other.bind(("127.0.0.1", server.port))
        assert server.wait_exit() == 2
        assert f"cannot listen on 127.0.0.1:{server.port}" in server.error


@pytest.mark.parametrize("when", [pytest.param("starting", marks=pytest.mark.long), "ready"])
def test_killed_launcher_leaves_nothing(when: str, nano: Path, store: Path, temporary: Path, tmp_path: Path) -> None:
    with Server(nano, store, tmp_path / "out", variables={**environment(), "TMPDIR": str(temporary)}) as server:
        if when == "ready":
            server.wait_ready()
        else:
            server.wait_for_processes(STARTING)
        memory = mapped_by(str(process.pid) for process in server.processes())
        assert memory or when == "starting"
        server.send(signal.SIGKILL)
        server.wait_gone()  # the guard, too, which is the last
        assert server.wait_exit() == -signal.SIGKILL
    assert list(temporary.iterdir()) == []
    assert not [name for name in memory if (SHARED_MEMORY / name).exists()]


def test_killed_engine_ends_everything(nano: Path, store: Path, tmp_path: Path) -> None:
    with serving(nano, store, tmp_path / "out") as server:
        running = Request(server)
        assert running.began.wait(LIMIT_SECONDS)
        server.engine().kill()
        assert server.wait_exit() == 1
        assert running.join().error is not None
        assert "ended by itself" in server.error
        assert "its log is" in server.error
        assert server.error.splitlines()[-1].startswith("EngineCore was killed by SIGKILL, ")


def test_flipped_bytes_are_healed_else_the_engine_stops(model: Path, store: Path, tmp_path: Path) -> None:
    """Without the checkpoint's bytes: a request that streams and one that waits for its turn get an error."""
    one_at_a_time = ("--max-num-seqs", "1")  # so that texts can be compared
    with serving(model, store, tmp_path / "out", dram_records="0", vllm=one_at_a_time) as server:
        right = Request(server).whole()
        flip_a_bit_of_every_record(store, layer=1)
        assert Request(server).whole() == right  # and every record that this text needs is healed

        zero_the_weights(model)
        streaming = Request(server)
        assert streaming.began.wait(LIMIT_SECONDS)
        waiting = Request(server)
        flip_a_bit_of_every_record(store, layer=2)
        assert server.wait_exit() == 1
        assert streaming.join().error is not None
        assert right.startswith(streaming.text)
        assert len(streaming.text) < len(right)
        assert waiting.join().error is not None
        assert waiting.text == ""
        check_names_the_record(server.error, store, layer=2)
        assert "Restore the checkpoint or build the store again" in server.error


@pytest.mark.long
def test_flipped_bytes_that_cannot_be_healed_stop_the_start(model: Path, store: Path, tmp_path: Path) -> None:
    """A trimmed checkpoint has no experts to heal from."""
    trim_checkpoint(Checkpoint.open(model), tmp_path / "trimmed")
    flip_a_bit_of_every_record(store, layer=1)
    before = content(store)
    with Server(tmp_path / "trimmed", store, tmp_path / "out") as server:
        assert server.wait_exit() == 2
        check_names_the_record(server.error, store, layer=1)
        assert "was trimmed and has no experts" in server.error
    assert content(store) == before


def test_a_checkpoint_whose_weights_changed_is_refused_at_the_start(model: Path, store: Path, tmp_path: Path) -> None:
    zero_the_weights(model)
    with Server(model, store, tmp_path / "out") as server:
        assert server.wait_exit() == 2
        assert "was built from another checkpoint: expected identity" in server.error


def check_names_the_record(error: str, store: Path, layer: int) -> None:
    """One line with layer, expert, file and remedy; layer is the index in the store."""
    number = layer + 1
    assert len(error.splitlines()) == 1
    assert re.search(rf"layer {number}, expert \d+ in {store}/layer-0000{number}.records", error)
    assert "cannot be healed" in error
