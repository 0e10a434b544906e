"""Looks at the machine before a start: each odd one is cured, or told in one sentence whose remedy works."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moetier import folders
from moetier.errors import SettingsError
from moetier.folders import temporary_roots
from moetier.launch import surroundings
from moetier.launch.command import SOCKET_FOLDER_BYTES, ServeRequest
from moetier.launch.surroundings import Surroundings, look, socket_root
from moetier.settings import Settings
from tests.serve.denied import deny
from tests.serve.looking import child, looked

REQUEST = ServeRequest(Path("/m"), Settings.parse({"store": "/s"}))
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="wants root, to be another user or to mount")


def test_an_ordinary_machine_gets_our_temporary_folder_and_nothing_is_said(tmp_path: Path) -> None:
    found = looked(HOME=str(tmp_path))
    assert found == "{'TMPDIR': 'SCRATCH', 'VLLM_RPC_BASE_PATH': 'SCRATCH', 'MOETIER_SCRATCH': 'SCRATCH'}"


@pytest.mark.parametrize("kind", ["long", "missing", "file"])
def test_a_temporary_folder_that_does_not_do(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 80 if kind == "long" else "t")
    if kind == "long":
        folder.mkdir()
    if kind == "file":
        folder.write_text("")
    found = looked(HOME=str(tmp_path), TMPDIR=str(folder))
    assert f"TMPDIR={folder} {'is too long for sockets' if kind == 'long' else 'takes no files'}" in found
    assert "'TMPDIR': 'SCRATCH'" in found


def test_a_folder_for_sockets_is_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = tmp_path / ("x" * 80), Path("/tmp")
    long.mkdir()
    monkeypatch.setattr(surroundings, "temporary_roots", lambda: [long, tmp_path / "missing", short])
    assert socket_root() == short
    monkeypatch.setattr(surroundings, "temporary_roots", lambda: [long, tmp_path / "missing"])
    with pytest.raises(SettingsError, match="set TMPDIR to one"):
        socket_root()
    assert len(os.fsencode(short / "moetier-serve-12345678")) <= SOCKET_FOLDER_BYTES


@pytest.mark.parametrize("home", ["relative", "/nonexistent/home", "/proc"])
def test_a_home_that_takes_no_files(home: str) -> None:
    found = looked(HOME=home)
    assert "'HOME': 'SCRATCH/home'" in found
    assert "expected a home folder for caches, found " in found


def test_a_cache_folder_of_its_own_is_looked_at_too(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    assert "XDG_CACHE_HOME" not in looked(HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache" / "new"))
    found = looked(HOME=str(tmp_path), XDG_CACHE_HOME="/proc/cache")
    assert "'XDG_CACHE_HOME': 'SCRATCH/home/.cache'" in found
    assert "'HOME'" not in found
    found = looked(HOME="/proc", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "'HOME': 'SCRATCH/home'" in found
    assert "XDG_CACHE_HOME" not in found


@AS_ROOT
def test_a_user_without_a_name_and_a_home(tmp_path: Path) -> None:
    """As in a container that runs as any user id; the capability lets it read this installation."""
    caps = [f"--{kind}-caps=+dac_read_search" for kind in ("inh", "ambient")]
    found = looked("{}", "setpriv", "--reuid", "54321", "--clear-groups", *caps)
    assert "'LOGNAME': 'user54321', 'USER': 'user54321'" in found
    assert "'HOME': 'SCRATCH/home'" in found
    assert "expected a home folder for caches, found none" in found
    assert "LOGNAME" not in looked(HOME=str(tmp_path))


def test_pinning_that_is_refused_is_said_and_left_out(tmp_path: Path) -> None:
    refused = deny("sched_setaffinity")
    found = looked(before=refused, HOME=str(tmp_path))
    assert "'VLLM_CPU_OMP_THREADS_BIND': 'nobind', 'OMP_NUM_THREADS': " in found
    assert "this system forbids to choose CPUs (sched_setaffinity is refused): threads are not pinned" in found
    found = looked("{'cpus': (0, 99)}", before=refused, HOME=str(tmp_path))
    assert found.startswith("error: cpus: expected to pin threads to [0, 99]")
    assert "nobind" not in looked(HOME=str(tmp_path))


def test_threads_run_unpinned_where_pinning_is_refused() -> None:
    code = """
        from moetier.machine import limits as machine
        from moetier.errors import SettingsError
        from moetier.kernels.cpu import ThreadPool
        pool = ThreadPool()
        print(pool.threads, machine.may_pin())
        try:
            ThreadPool(1, [max(machine.allowed_cpus()) + 1])
        except SettingsError as error:
            print(error)
    """
    found = child(code, before=deny("sched_setaffinity")).splitlines()
    assert found[0].endswith(" False")
    assert "this process may not use" in found[1], "a CPU that is not ours is still refused"


def test_few_open_files_are_raised_as_far_as_allowed_or_told(tmp_path: Path) -> None:
    def limit(soft: int, hard: int) -> Callable[[], None]:
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert not looked(before=limit(64, 256), HOME=str(tmp_path)).startswith("error")
    found = looked(before=limit(64, 100), HOME=str(tmp_path))
    assert found.startswith("error: open files: expected a limit of 192 at least, found 100; raise it: ulimit -n 4096")
    (tmp_path / "store").mkdir()
    for layer in range(100):
        (tmp_path / "store" / f"layer-{layer:05}.records").touch()
    found = looked(f"{{'store': '{tmp_path}/store'}}", before=limit(64, 256), HOME=str(tmp_path))
    assert found.startswith("error: open files: expected a limit of 292 at least, found 256")


# -- /dev/shm --------------------------------------------------------------------------------------------------------


def shared(request: ServeRequest, free: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Surroundings:
    """The look at a /dev/shm with so many MiB free; None: there is none."""
    usage = surroundings.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(surroundings, "SHARED_MEMORY", tmp_path if free is not None else tmp_path / "none")
    monkeypatch.setattr(surroundings.shutil, "disk_usage", lambda _: usage._replace(free=(free or 0) << 20))
    (tmp_path / "scratch").mkdir()
    return look(request, tmp_path / "scratch", True)


@pytest.mark.parametrize(
    ("ranks", "free", "chunk"),
    [(1, 408, None), (1, 407, 15), (1, 64, 2), (1, 28, 1), (2, 648, None), (2, 64, 1)],
    ids=str,
)
def test_queues_are_made_as_small_as_shared_memory_is(
    ranks: int, free: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request = replace(REQUEST, extra=("--tensor-parallel-size", str(ranks)))
    found = shared(request, free, monkeypatch, tmp_path)
    said = [line for line in found.lines if f"has {free} MiB free" in line]
    assert found.environment.get("VLLM_MQ_MAX_CHUNK_BYTES_MB") == (None if chunk is None else str(chunk))
    assert len(said) == (chunk is not None)
    if chunk is not None:
        assert 10 * chunk * (1 + ranks) <= free


@pytest.mark.parametrize("free", [None, 27, 0], ids=str)
def test_too_little_shared_memory_is_told(free: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"expected 28 MiB free at least, found .*--shm-size=1g"):
        shared(REQUEST, free, monkeypatch, tmp_path)


def test_an_executor_of_the_users_own_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request = replace(REQUEST, extra=("--distributed-executor-backend", "uni"))
    assert "VLLM_MQ_MAX_CHUNK_BYTES_MB" not in shared(request, 1, monkeypatch, tmp_path).environment


def test_vllms_queues_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    code = """
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
        from moetier.vllm.queues import fit_queues
        fit_queues()
        queue = MessageQueue(1, 1)
        print(queue.buffer.max_chunk_bytes >> 20, queue.buffer.max_chunks)
    """
    chunk, chunks = map(int, child(code, VLLM_MQ_MAX_CHUNK_BYTES_MB="2", HOME="/tmp").splitlines()[-1].split())
    assert (chunk, chunks) == (2, surroundings.QUEUE_CHUNKS)
    default = int(child(code, HOME="/tmp").splitlines()[-1].split()[0])
    assert default * surroundings.QUEUE_CHUNKS == surroundings.ANSWERS_MIB


# -- folders ---------------------------------------------------------------------------------------------------------


def test_where_no_temporary_folder_takes_files_another_stands_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(folders.tempfile, "gettempdir", none)
    monkeypatch.setattr(folders.tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/proc")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folders.find_temporary_folder()
    assert folders.tempfile.tempdir == os.environ["TMPDIR"] == str(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc")
    monkeypatch.setattr(folders, "STAND_INS", ())
    folders.find_temporary_folder()
    with pytest.raises(SettingsError, match="set TMPDIR to a folder that can be written"):
        folders.temporary_folder()


def test_roots_have_no_doubles() -> None:
    assert len(set(temporary_roots())) == len(temporary_roots())


@pytest.mark.parametrize(
    ("variable", "function"), [("XDG_CACHE_HOME", folders.cache_home), ("XDG_STATE_HOME", folders.state_home)]
)
def test_the_convention_for_caches_and_state(
    variable: str, function: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv(variable, "relative")
    assert function().is_relative_to("/h")
    monkeypatch.setenv(variable, "/named")
    assert function() == Path("/named")
    monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(SettingsError, match=f"set {variable} to a folder"):
        function()
