"""Files that survive a crash: written aside, fsynced, renamed; and the lock that keeps two builds apart."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moetier.errors import StoreError

ASIDE = ".tmp"
STALE_SECONDS = 3600.0
"""A temporary file that is older belongs to a writer that was killed: none takes so long."""

_REMEDIES = {
    errno.ENOSPC: "free some space and run the same command again, it resumes",
    errno.EDQUOT: "raise the quota or free some space and run the same command again, it resumes",
    errno.EFBIG: "raise the limit on the size of files and run the same command again, it resumes",
    errno.EROFS: "choose a folder on a file system that can be written",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EIO: "the disk reports an error: check it, then run the same command again, it resumes",
}


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turn an OSError into one StoreError: `what` could not be done, why, and the remedy."""
    try:
        yield
    except OSError as error:
        number = error.errno or errno.EIO
        remedy = _REMEDIES.get(number, "check the folder and run the same command again, it resumes")
        raise StoreError(f"{what}: {os.strerror(number)}; {remedy}") from error


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; a disk that fills up in between raises OSError."""
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def open_to_read(path: Path, flags: int = 0) -> int:
    """A file descriptor; StoreError where there is none to be had, OSError (EINVAL) where it is the flags' fault."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError as error:
        if flags and error.errno == errno.EINVAL:
            raise
        raise StoreError(
            f"{path} cannot be read: {error.strerror}; check its permissions, the disk and the limit on open files"
        ) from error


def read_small(path: Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most`; StoreError if it is another thing, OSError if it cannot be read.

    A pipe in its place is not waited for, and a huge file not taken into memory.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            found = f"{status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "something else"
            raise StoreError(f"{path}: expected a regular file of at most {most} bytes, found {found}")
        return file.read(most + 1)


def write_durably(path: Path, data: bytes) -> None:
    """Create or replace a file so that after a crash it is there whole or not at all.

    Each writer has a temporary file of its own, so that several at once (threads, or containers in which all have the
    same process id) disturb none: the last to rename is the one whose file stays.
    """
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}{ASIDE}")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            write_all(fd, memoryview(data), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    sweep(path, STALE_SECONDS)


def sweep(path: Path, seconds: float = 0.0) -> None:
    """Remove temporary files of writers of `path` that were killed: those at least `seconds` old."""
    left = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}" + re.escape(ASIDE))
    with contextlib.suppress(OSError):
        for other in path.parent.iterdir():
            if left.fullmatch(other.name) and time.time() - other.lstat().st_mtime >= seconds:
                other.unlink()


def write_output(path: Path, text: str) -> None:
    """Write a file that a user named: whole, or it stays as it was. What is no regular file is written to in place."""
    if path.exists() and not path.is_file():
        path.write_text(text)
    else:
        write_durably(path.resolve(), text.encode())


@contextmanager
def locked_folder(folder: Path, lock_name: str) -> Iterator[None]:
    """Create `folder` if need be and hold its lock file; StoreError where another process holds it.

    The folder may be renamed by the holder while we wait to open it: the lock counts only if the path still leads to
    the file that we locked.
    """
    while True:
        with store_errors(f"{folder} cannot be made"):
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / lock_name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue
        except OSError as error:
            with store_errors(f"{path} cannot be written"):
                raise error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreError(
                    f"{folder} is being built by another process; wait until it is done, then run the command again"
                ) from error
            if _same_file(fd, path):
                yield
                return
        finally:
            os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (held.st_dev, held.st_ino) == (found.st_dev, found.st_ino)
