"""Verbs in a process that lacks what one has everywhere: streams, a home, a name, a place for temporary files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from moetier.store.build import build_store
from tests.serve.server import free_port

COMMAND = str(Path(sys.executable).with_name("moetier"))
READ_ONLY = """
mount --make-rprivate / && cd / || exit 99
for folder in /tmp /var/tmp {more}; do mount --bind $folder $folder && mount -o remount,bind,ro $folder || exit 99; done
exec "$@"
"""
"""A container that writes nowhere, by bind mounts: only /dev/shm takes files, or not even that."""


def run(
    arguments: Sequence[str | Path], before: Callable[[], object] | None = None, under: Sequence[str] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a verb in an environment of PATH and `more` alone."""
    command = [*under, COMMAND, *map(str, arguments)]
    environment = {"PATH": os.environ["PATH"], "COLUMNS": "200", **more}
    return subprocess.run(
        command, env=environment, preexec_fn=before, capture_output=True, text=True, check=False, timeout=240
    )


@pytest.mark.parametrize("number", [0, 2], ids=["stdin", "stderr"])
def test_a_closed_stream_stops_nothing(number: int, nano: Path) -> None:
    done = run(["plan", nano, "--json"], lambda: os.close(number), HOME="/tmp")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{")
    assert "Traceback" not in done.stderr


def test_a_closed_standard_output_is_told(nano: Path) -> None:
    done = run(["plan", nano], lambda: os.close(1), HOME="/tmp")
    assert done.returncode == 1
    assert done.stderr.startswith("moetier: error: standard output is closed")
    assert len(done.stderr.splitlines()) == 1


def test_an_error_where_standard_error_is_closed_keeps_its_code(tmp_path: Path) -> None:
    done = run(["store", "info", tmp_path / "none"], lambda: os.close(2), HOME="/tmp")
    assert done.returncode == 2
    assert done.stdout == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="wants root, to be another user")
@pytest.mark.parametrize("verb", ["version", "plan"])
def test_a_user_without_a_name_and_a_home(verb: str, nano: Path) -> None:
    """As in a container that runs as any user id; the capability lets it read this installation."""
    caps = [f"--{kind}-caps=+dac_read_search" for kind in ("inh", "ambient")]
    done = run(
        [verb, *([nano] if verb == "plan" else [])], under=["setpriv", "--reuid", "54321", *caps, "--clear-groups"]
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("verb", "home"),
    [
        ("version", "relative"),
        ("plan", "relative"),
        ("store info", "/nonexistent"),
        ("identity", "/nonexistent"),
        ("doctor", "/nonexistent"),
    ],
)
def test_a_home_that_is_none(verb: str, home: str, nano: Path, tmp_path: Path) -> None:
    arguments: dict[str, list[str | Path]] = {
        "plan": ["plan", nano],
        "store info": ["store", "info", tmp_path / "store"],
        "identity": ["identity", "--store", tmp_path / "store", "--calls", "1"],
    }
    if verb in ("store info", "identity"):
        build_store(nano, tmp_path / "store")
    done = run(arguments.get(verb, [verb]), HOME=home, TMPDIR="/nonexistent")
    assert "Traceback" not in done.stderr
    if verb != "doctor":  # whose exit code tells of this machine
        assert done.returncode == 0, done.stderr


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that another user can read, which pytest's are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="wants root, to mount")
@pytest.mark.parametrize("shared", [True, False], ids=["shm", "nothing"])
def test_a_read_only_container(shared: bool, nano: Path, readable: Path) -> None:
    store = readable / "store"
    build_store(nano, store)
    script = READ_ONLY.format(more="" if shared else "/dev/shm")
    under = ["unshare", "-m", "sh", "-c", script, "sh", "setpriv", "--reuid", "65534", "--clear-groups"]
    if run([], under=["unshare", "-m", "true"]).returncode:
        pytest.skip("no mount namespaces here")
    under += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    works = run(["version"], under=under)
    if works.returncode == 99 or "setpriv" in works.stderr:
        pytest.skip(f"cannot be set up here: {works.stderr[-200:]}")
    assert works.returncode == 0, "it needs no temporary folder"
    arguments = ["serve", nano, "--store", store, "--port", str(free_port()), "--verbose", "--dram-records", "1"]
    done = run([*arguments, "--kv-cache-gib", "1e6"], under=under)
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    if shared:
        assert "lower --kv-cache-gib" in done.stderr, done.stderr
    else:
        assert done.stderr.startswith("moetier: error: expected a folder for temporary files")
        assert "set TMPDIR to a folder" in done.stderr
