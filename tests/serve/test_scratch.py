"""A server's folder: nothing of it stays, and nothing of anybody else's goes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from moetier.launch import scratch
from moetier.launch.guard import end_group
from moetier.launch.scratch import SHARED, SHARED_MEMORY, note_shared_memory, remove, sweep

OWNER = """
import os, sys, time
from pathlib import Path
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from moetier.launch.scratch import note_shared_memory, scratch
with scratch(Path(sys.argv[1])) as (folder, lock):
    memory = SharedMemory(create=True, size=4096)
    resource_tracker.unregister(memory._name, "shared_memory")  # as if that process were killed, too
    note_shared_memory(folder, [os.getpid()])
    os.set_inheritable(lock, True)
    if sys.argv[2] == "with-child" and os.fork() == 0:
        time.sleep(600)
    print(folder, memory.name, flush=True)
    time.sleep(600)
"""


def owner(root: Path, *more: str) -> tuple[subprocess.Popen[str], Path, Path]:
    """A process that has a folder in `root` and shared memory of its own."""
    command = [sys.executable, "-c", OWNER, str(root), *(more or ("alone",))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    folder, memory = process.stdout.readline().split()
    return process, Path(folder), SHARED_MEMORY / memory


def kill(process: subprocess.Popen[str], all_of_it: bool = True) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL) if all_of_it else process.kill()
    process.wait()
    if all_of_it:
        end_group(process.pid)  # which waits for what is not our child
    if process.stdout and all_of_it:
        process.stdout.close()


def test_a_folder_is_gone_after_its_block(tmp_path: Path) -> None:
    with scratch.scratch(tmp_path) as (folder, _):
        (folder / "socket").write_text("")
        assert sweep([tmp_path]) == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_goes_with_its_shared_memory(tmp_path: Path) -> None:
    process, folder, memory = owner(tmp_path)
    try:
        assert sweep([tmp_path]) == []
        assert memory.exists()
    finally:
        kill(process)
    assert folder.exists()
    assert memory.exists()
    assert sweep([tmp_path]) == [folder]
    assert not folder.exists()
    assert not memory.exists()


def test_a_server_whose_launcher_alone_was_killed_keeps_its_folder(tmp_path: Path) -> None:
    process, folder, memory = owner(tmp_path, "with-child")
    try:
        kill(process, all_of_it=False)
        assert sweep([tmp_path]) == []
        assert folder.exists()
        assert memory.exists()
    finally:
        kill(process)
    assert sweep([tmp_path]) == [folder]
    assert not memory.exists()


def test_shared_memory_that_is_not_the_servers_stays(tmp_path: Path) -> None:
    """That of another inode has its name from somebody else; what a process still maps is in use."""
    with_same_name, in_use = (SharedMemory(create=True, size=4096) for _ in range(2))
    try:
        names = {with_same_name.name: 1, in_use.name: (SHARED_MEMORY / in_use.name).stat().st_ino}
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / SHARED).write_text(json.dumps(names))
        remove(tmp_path / "folder")
        assert (SHARED_MEMORY / with_same_name.name).exists()
        assert (SHARED_MEMORY / in_use.name).exists()
        assert not (tmp_path / "folder").exists()
    finally:
        for memory in (with_same_name, in_use):
            memory.close()
            memory.unlink()


@pytest.mark.parametrize("noted", ["[]", "{", '{"../../etc/passwd": 1}', '{"x": "y"}', "null"])
def test_a_damaged_note_does_no_harm(noted: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / SHARED).write_text(noted)
    remove(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_only_kinds_of_memory_that_a_server_makes_are_noted(tmp_path: Path) -> None:
    ours, other = SharedMemory(create=True, size=64), SharedMemory(f"moetier-test-{os.getpid()}", create=True, size=64)
    try:
        note_shared_memory(tmp_path, [os.getpid()])
        noted = json.loads((tmp_path / SHARED).read_text())
        assert ours.name in noted
        assert other.name not in noted
    finally:
        for memory in (ours, other):
            memory.close()
            memory.unlink()


def test_what_others_named_alike_stays(tmp_path: Path) -> None:
    link, new, file = (tmp_path / f"{scratch.PREFIX}{name}" for name in ("link", "new", "file"))
    new.mkdir()  # made a moment ago, not yet locked
    file.write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / scratch.LOCK).write_text("")
    link.symlink_to(tmp_path / "elsewhere")
    assert sweep([tmp_path, tmp_path / "nothing"]) == []
    os.utime(new, (0, 0))
    assert sweep([tmp_path]) == [new]
    assert (tmp_path / "elsewhere" / scratch.LOCK).exists()
