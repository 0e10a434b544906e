"""What a server that is not started, or that ends, advises."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moetier import folders
from moetier.launch import process as launcher
from moetier.launch import surroundings
from tests.remedies.trouble import Trouble
from tests.serve.denied import deny
from tests.serve.looking import LOOK, looked
from tests.serve.server import free_port

remedy = pytest.mark.remedy


@remedy("folders.py", "expected a folder for temporary files")
def test_temporary_files(trouble: Trouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As tempfile finds it where nothing takes a file; then TMPDIR is set."""
    monkeypatch.setattr(folders.tempfile, "tempdir", None)
    monkeypatch.setattr(folders.tempfile, "_candidate_tempdir_list", lambda: [os.environ.get("TMPDIR", "/proc")])
    monkeypatch.setenv("TMPDIR", "/proc")
    with trouble:
        folders.temporary_folder()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert folders.temporary_folder() == tmp_path
    trouble.gone()


@remedy("folders.py", "expected a home folder")
def test_caches(trouble: Trouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "relative")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with trouble:
        folders.cache_home()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folders.cache_home() == tmp_path
    trouble.gone()


@remedy("launch/surroundings.py", "expected a folder for sockets")
def test_sockets(trouble: Trouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(surroundings, "temporary_roots", lambda: [Path(os.environ["TMPDIR"])])
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/{'x' * 80}")
    with trouble:
        surroundings.socket_root()
    monkeypatch.setenv("TMPDIR", "/tmp")
    assert surroundings.socket_root() == Path("/tmp")
    trouble.gone()


@remedy("launch/surroundings.py", "expected a limit of")
def test_open_files(trouble: Trouble, tmp_path: Path) -> None:
    """Raising a hard limit wants root; a shell that had not lowered it is the same."""
    trouble.said(looked(before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)), HOME=str(tmp_path)))
    most = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    found = looked("{}", "sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", HOME=str(tmp_path))
    assert not found.startswith("error")
    trouble.gone()


@remedy("launch/surroundings.py", "expected to pin threads")
def test_pinning(trouble: Trouble, tmp_path: Path) -> None:
    refused = deny("sched_setaffinity")
    trouble.said(looked("{'cpus': (0, 99)}", before=refused, HOME=str(tmp_path)))
    assert not looked(before=refused, HOME=str(tmp_path)).startswith("error")
    assert not looked("{'cpus': (0, 99)}", HOME=str(tmp_path)).startswith("error")
    trouble.gone()


@remedy("launch/surroundings.py", "MiB free at least")
@remedy("launch/surroundings.py", "`docker run --shm-size=1g`, or as root")
def test_shared_memory(trouble: Trouble) -> None:
    """In a mount namespace of its own: too small, then mounted as the message says."""
    mount = "mount -t tmpfs -o size={},mode=1777 tmpfs /dev/shm"
    apart = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    script = f'{mount.format("16m")} && "$@"; {mount.format("1g")} && "$@"'
    command = [*apart, "sh", "-c", script, "sh", sys.executable, "-c", LOOK % "{}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        trouble.solved = True
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()[-100:]}")
    before, _, after = done.stdout.partition("\n")
    trouble.said(before)
    assert mount.format("1g") in before
    assert "error" not in after
    assert "VLLM_MQ_MAX_CHUNK_BYTES_MB" not in after
    trouble.gone()


@remedy("launch/process.py", "cannot listen on")
def test_port(trouble: Trouble) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with trouble:
            launcher.check_port("127.0.0.1", other.getsockname()[1])
        launcher.check_port("127.0.0.1", free_port())
    trouble.gone()


@remedy("launch/process.py", "a server that starts or runs writes the log")
def test_log_of_another(trouble: Trouble, tmp_path: Path) -> None:
    with launcher._output(tmp_path / "log"):
        with trouble, launcher._output(tmp_path / "log"):
            pass
        with launcher._output(tmp_path / "other"):
            pass
    with launcher._output(tmp_path / "log"):  # that server has ended
        pass
    trouble.gone()


@remedy("launch/process.py", "cannot write the log")
def test_log(trouble: Trouble, tmp_path: Path) -> None:
    with trouble, launcher._output(tmp_path):
        pass
    with launcher._output(tmp_path / "log"):
        pass
    trouble.gone()
