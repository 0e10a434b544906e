"""A server's folder for what is gone after it, and what is swept once nobody is left to do it.

Sockets, counters and temporary files of vLLM's processes are in the folder; the names of the shared memory that they
map are noted in it. Its lock is held by launcher, guard and server: a folder whose lock is free belongs to a server of
which nothing lives, however it ended, and the next start removes it. Only the standard library, for the guard.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PREFIX = "moetier-serve-"
LOCK, NEW_LOCK, SHARED = "lock", "lock.new", "shared.json"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
OURS = re.compile(r"psm_|sem\.mp-|torch_|nccl-|vllm")
"""How the names of shared memory begin that vLLM, torch and Python's multiprocessing make."""
UNLOCKED_SECONDS = 60
"""A folder without a lock is one that a start has just made, or was killed over."""


@contextlib.contextmanager
def scratch(root: Path) -> Iterator[tuple[Path, int]]:
    """A new folder in `root` and the descriptor of its lock, for the processes that shall keep it."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    lock = os.open(folder / NEW_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / NEW_LOCK).rename(folder / LOCK)  # so that one that is there was locked from its first moment
        yield folder, lock
    finally:
        remove(folder)
        os.close(lock)


def sweep(roots: Iterable[Path]) -> list[Path]:
    """Remove the folders in `roots` of this user's servers of which nothing lives. Returns them."""
    swept = []
    for root in roots:
        with contextlib.suppress(OSError):
            for folder in root.glob(f"{PREFIX}*"):
                if _is_dead(folder):
                    remove(folder)
                    swept.append(folder)
    return swept


def _is_dead(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        state = folder.lstat()
        if state.st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink():
            return False
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return time.time() - state.st_mtime > UNLOCKED_SECONDS
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(lock)
    return False


def remove(folder: Path) -> None:
    """Remove a folder, and the shared memory noted in it that no process has mapped any more."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        noted: dict[str, int] = json.loads((folder / SHARED).read_text())
        left = [SHARED_MEMORY / Path(name).name for name, inode in noted.items() if _inode(Path(name).name) == inode]
        mapped = mapped_by(path.name for path in Path("/proc").glob("[0-9]*")) if left else {}
        for path in left:
            if path.name not in mapped:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _inode(name: str) -> int | None:
    with contextlib.suppress(OSError):
        return (SHARED_MEMORY / name).lstat().st_ino
    return None


def note_shared_memory(folder: Path, processes: Iterable[int]) -> None:
    """Note what these processes map now, beside what was noted before. A full disk costs the note, never the server."""
    path = folder / SHARED
    noted: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        noted = json.loads(path.read_text())
    now = noted | {name: inode for name, inode in mapped_by(map(str, processes)).items() if OURS.match(name)}
    if now != noted:
        with contextlib.suppress(OSError):
            aside = path.with_suffix(f".{os.getpid()}.tmp")
            aside.write_text(json.dumps(now))
            aside.replace(path)


def mapped_by(processes: Iterable[str]) -> dict[str, int]:
    """Name and inode of each file of shared memory that a process maps, as far as we may look."""
    found = {}
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path("/proc", process, "maps").read_text(errors="replace").splitlines():
                _, _, _, _, inode, *rest = line.split(maxsplit=5)
                path = "".join(rest)
                if path.startswith(f"{SHARED_MEMORY}/") and not path.endswith(" (deleted)"):
                    found[Path(path).name] = int(inode)
    return found
