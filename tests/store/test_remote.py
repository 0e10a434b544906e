"""Building from a hub: a few shards on disk at a time, and servers that stall, cut and lie."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from moetier.errors import CheckpointError, StoreError
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.remote.build import build_remote
from moetier.store.remote.cache import PART, ShardCache
from moetier.store.remote.fetch import Fetcher, Patience, RemoteFile
from moetier.store.store import Store
from moetier.store.trim import trim_checkpoint
from moetier.store.verify import verify_store
from tests.store.checkpoints import write_checkpoint
from tests.store.hub import TOKEN, serving
from tests.store.older import overwrite

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")

QUICK = Patience(stall=300, attempts=3, pause=0.01)
"""Of a client that gives up soon where it is answered, and waits for a hub that only has no CPU."""


@pytest.fixture
def made(tmp_path):
    """A checkpoint of 6 shards whose MoE layers cross their borders, as a repository has it."""
    made = write_checkpoint(tmp_path / "repository", layers=(1, 2, 3), shards=6)
    (made.path / "tokenizer.json").write_text('{"a": 1}')
    (made.path / "encoding").mkdir()
    (made.path / "encoding" / "chat.py").write_text("pass")
    (made.path / "pytorch_model.bin").write_bytes(b"a second copy of the weights")
    return made


@pytest.fixture
def hub(made, monkeypatch):
    with serving(made.path) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
        yield hub


def same_tree(a, b):
    files = {str(p.relative_to(a)): p.read_bytes() for p in a.rglob("*") if p.is_file()}
    return files == {str(p.relative_to(b)): p.read_bytes() for p in b.rglob("*") if p.is_file()}


def build(tmp_path, **more):
    settings = {"patience": QUICK, "threads": 2, **more}
    return build_remote("hf://org/model", tmp_path / "s", tmp_path / "t", **settings)


def check_result(made, tmp_path):
    """Store and trimmed checkpoint are those of a build from the whole folder, and nothing else is left."""
    (made.path / "pytorch_model.bin").unlink(missing_ok=True)
    build_store(made.path, tmp_path / "local")
    trim_checkpoint(Checkpoint.open(made.path), tmp_path / "local-t")
    assert same_tree(tmp_path / "s", tmp_path / "local")
    assert same_tree(tmp_path / "t", tmp_path / "local-t")
    left = {p.name for p in tmp_path.iterdir()} - {"repository", "local", "local-t"}
    assert left == {"s", "t"}


@pytest.mark.parametrize("keep", [1, 2, 6])
def test_the_result_is_that_of_a_local_build(made, hub, tmp_path, keep):
    report = build(tmp_path, keep=keep, check=2)
    assert report.build.experts_checked == 6
    assert not verify_store(tmp_path / "s").bad
    Store.open(tmp_path / "s", Checkpoint.open(tmp_path / "t").identity()).close()
    check_result(made, tmp_path)


def test_each_shard_comes_once_where_there_is_room(made, hub, tmp_path):
    report = build(tmp_path, keep=6)
    sizes = {p.name: p.stat().st_size for p in made.path.glob("*.safetensors")}
    assert report.fetched == sum(sizes.values())
    for name, size in sizes.items():
        assert hub.bytes[name] < 1.9 * size  # the header comes once more, by itself
    assert hub.bytes["pytorch_model.bin"] == 0


def test_never_more_than_keep_shards_are_on_disk(made, hub, tmp_path, monkeypatch):
    seen, fetch = [], ShardCache._fetch

    def fetch_and_look(cache, file):
        fetch(cache, file)
        seen.append(shards_of(cache))

    monkeypatch.setattr(ShardCache, "_fetch", fetch_and_look)
    build(tmp_path, keep=2)
    assert {name for shards in seen for name in shards} == {path.name for path in made.path.glob("*.safetensors")}
    assert {len(shards) for shards in seen} == {1, 2}


def shards_of(cache):
    """Whole or in part on disk, at one moment: none is removed by who does not have the lock."""
    with cache._change:
        return {path.name.removesuffix(PART) for path in cache.folder.iterdir()} & cache.files.keys()


@pytest.mark.parametrize("fault", ["stall", "cut", "500", "429", "other range", "other size", "gzip", "extra", "whole"])
def test_a_server_that_misbehaves_now_and_then(made, hub, tmp_path, fault):
    """Every third answer is bad; the result is right all the same."""
    hub.faults = (["", "", fault] * 100)[: 30 if fault == "stall" else 300]
    # Of two threads that ask, one may get the bad answers several times in a row.
    stall = 0.5 if fault == "stall" else 300
    build(tmp_path, patience=Patience(stall, attempts=50, pause=0.01, longest_pause=0.1))
    assert hub.seen[fault] >= 3
    hub.faults = []
    check_result(made, tmp_path)


def test_a_changed_byte_is_fetched_again_and_twice_is_an_error(made, hub, tmp_path):
    headers = 4 + 2 * 6  # small files, then length and header of each shard
    hub.faults = [""] * headers + ["flip"]
    build(tmp_path)
    assert hub.seen["flip"] == 1
    check_result(made, tmp_path)


def test_bytes_that_stay_wrong_are_an_error_and_the_next_build_goes_on(made, hub, tmp_path):
    hub.faults = [""] * (4 + 2 * 6) + ["flip"] * 200
    with pytest.raises(CheckpointError, match=r"resolve/.*safetensors: expected content with sha256 .*twice"):
        build(tmp_path)
    assert not (tmp_path / "s").exists()
    hub.faults = []
    build(tmp_path)
    check_result(made, tmp_path)


def test_a_server_that_stays_away_is_one_error(made, hub, tmp_path):
    hub.faults = ["500"] * 1000
    with pytest.raises(CheckpointError, match=r"HTTP 500 .* \(3 attempts\); check the network and run the same"):
        build(tmp_path)


def test_a_model_that_asks_for_a_login_is_said_at_once(made, hub, tmp_path):
    hub.faults = ["403"]
    with pytest.raises(CheckpointError, match=r"HTTP 403 .*hf auth login"):
        build(tmp_path)
    assert hub.seen["403"] == 1


def test_a_token_goes_to_the_hub_and_not_to_where_it_redirects(made, hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: TOKEN)
    with serving(made.path) as other:
        hub.other = other
        hub.faults = ["", "redirect"] * 100
        build(tmp_path)
        assert other.seen["good"] > 0
        assert other.seen["with token"] == 0
        assert hub.seen["with token"] > 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf://model", "expected hf://ORG/NAME"),
        ("hf://org/../model", "expected hf://ORG/NAME"),
        ("hf://org/absent", "cannot be opened"),
    ],
)
def test_a_source_that_is_not_there(hub, tmp_path, source, message):
    with pytest.raises(CheckpointError, match=message):
        build_remote(source, tmp_path / "s", tmp_path / "t", patience=QUICK)


def test_a_repository_without_safetensors_is_refused(hub, made, tmp_path):
    for path in made.path.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="expected safetensors files, found none"):
        build(tmp_path)


def test_another_commit_does_not_mix_with_the_rest_of_one(made, hub, tmp_path):
    hub.faults = [""] * 20 + ["500"] * 100
    with pytest.raises(CheckpointError):
        build(tmp_path)
    hub.faults, hub.commit = [], "f" * 40
    with pytest.raises(CheckpointError, match=r"rest of a download of commit 0123.*, expected ffff"):
        build(tmp_path)


def test_a_finished_build_fetches_no_shard_again(made, hub, tmp_path):
    build(tmp_path)
    before = dict(hub.bytes)
    report = build(tmp_path)
    assert report.build.already_complete
    assert report.fetched == 0
    shards = [name for name in before if name.endswith(".safetensors")]
    assert sum(hub.bytes[name] - before[name] for name in shards) < sum(before[name] for name in shards) / 2
    check_result(made, tmp_path)


COMMAND = "import sys; from moetier.cli import main; sys.exit(main())"


def test_killed_at_random_moments_it_resumes(made, hub, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
    arguments = ["store", "build", "hf://org/model", tmp_path / "s", "--trim", tmp_path / "t", "--keep-shards", "2"]
    rng = np.random.default_rng(0)
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *map(str, arguments)], env=environment, stderr=subprocess.DEVNULL
        )
        before = sum(hub.seen.values())
        until = before + int(rng.integers(1, 30))
        while process.poll() is None and sum(hub.seen.values()) < until:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (tmp_path / "s").exists():
            assert not verify_store(tmp_path / "s").bad
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments), "--json"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["experts"] == 4
    check_result(made, tmp_path)


def test_an_hf_source_needs_trim_and_is_never_deleted(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "store", "build", "hf://org/model", str(tmp_path / "s")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "expected --trim FOLDER" in done.stderr


class Slow:
    """A fetcher that takes a while."""

    def stream(self, file, start, stop, sink):
        time.sleep(0.002)
        sink(bytes(stop - start))


def test_readers_of_more_shards_than_there_is_room_for_all_end(tmp_path):
    files = {f"{n}.safetensors": RemoteFile(f"{n}.safetensors", 100, "http://x") for n in range(6)}
    cache = ShardCache(tmp_path, files, Slow(), 2)
    failures = []

    def reader(seed):
        rng = np.random.default_rng(seed)
        for n in rng.integers(0, 6, 40):
            with cache.hold(f"{n}.safetensors"):
                if not (tmp_path / f"{n}.safetensors").exists() or len(shards_of(cache)) > 2:
                    failures.append(n)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert not failures


def test_a_disk_that_is_full_is_not_taken_for_the_network(made, hub, tmp_path):
    def full(data):
        raise OSError(28, "No space left on device")

    file = RemoteFile("tokenizer.json", 8, f"{hub.endpoint}/org/model/resolve/{hub.commit}/tokenizer.json")
    with pytest.raises(OSError, match="No space left"):
        Fetcher(patience=QUICK).stream(file, 0, 8, full)
    assert hub.seen["good"] == 1
    (tmp_path / "cache").mkdir()
    cache = ShardCache(tmp_path / "cache", {"a": file}, Fetcher(patience=QUICK), 1)
    cache.fetcher.stream = lambda f, start, stop, sink: full(b"")
    with pytest.raises(StoreError, match="No space left on device; free some space"), cache.hold("a"):
        pass


@pytest.mark.parametrize("dense", [True, False], ids=["all", "experts"])
@pytest.mark.parametrize("there", ["both", "store", "trimmed"])
def test_what_is_there_of_another_commit_is_refused(made, hub, tmp_path, there, dense):
    """Weights that were replaced under the same names: headers do not tell."""
    build(tmp_path)
    write_checkpoint(made.path, layers=(1, 2, 3), shards=6, seed=7)
    if dense:
        overwrite(made.path, "model.layers.1.mlp.gate.weight", 300, b"\x42")
    hub.commit = "f" * 40
    for name in {"both": (), "store": ("t",), "trimmed": ("s",)}[there]:
        shutil.rmtree(tmp_path / name)
    with pytest.raises(StoreError, match=r"is of another commit than f{40}|are of different commits") as raised:
        build(tmp_path)
    assert f"remove {tmp_path / 's'} and {tmp_path / 't'} and run the command again" in str(raised.value)
    for name in ("s", "t"):
        shutil.rmtree(tmp_path / name)
    build(tmp_path)
    check_result(made, tmp_path)


def test_a_folder_of_the_users_is_not_taken_for_a_download(made, hub, tmp_path):
    (tmp_path / "s.download").mkdir()
    (tmp_path / "s.download" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="exists and is no rest of a download"):
        build(tmp_path)
    assert (tmp_path / "s.download" / "thesis.txt").read_text() == "years of work"
