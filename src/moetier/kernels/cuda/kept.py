"""Compiled kernels kept between runs: an entry is what this user's own run compiled from the very same, or nothing."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from moetier.folders import cache_home

logger = logging.getLogger(__name__)

FORMAT = "moetier kernel 2\n"
"""First line of an entry; part of its key."""
LARGEST = 64 << 20


def folder() -> Path:
    """Where they are; it can be deleted at any time."""
    return cache_home() / "moetier" / "kernels"


def key_of(made_from: Any) -> str:
    """Hash of everything that decides an entry's bytes: JSON values."""
    return hashlib.sha256(json.dumps([FORMAT, made_from], sort_keys=True).encode()).hexdigest()


def kept(name: str, key: str, make: Callable[[], bytes]) -> bytes:
    """The entry of this key, else what `make` gives, kept for the next run where that is possible.

    name: the beginning of the file's, for people. What keeps it from being kept or read is one line in the log.
    """
    file = f"{name}-{key[:32]}.kernel"
    path = folder()
    try:
        with _opened(path) as here:
            found = _read(here, file, key, path)
            if found is not None:
                return found
            content = make()
            _write(here, file, key, content)
            return content
    except OSError as error:
        _say(f"{path}: compiled kernels are not kept there, every start compiles them ({error.strerror or error})")
    return make()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The folder, made if need be; OSError where somebody else could put code into it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    here = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        about = os.fstat(here)
        if about.st_uid == os.geteuid():
            if about.st_mode & 0o077:
                os.fchmod(here, 0o700)
        elif not _trusted(about):
            raise OSError(
                f"user {about.st_uid} or others can write into it; set XDG_CACHE_HOME to a folder of your own"
            )
        yield here
    finally:
        os.close(here)


def _trusted(about: os.stat_result) -> bool:
    """Whether nobody but this user and root can have written it."""
    return about.st_uid in (0, os.geteuid()) and not about.st_mode & 0o022


def _read(here: int, file: str, key: str, path: Path) -> bytes | None:
    try:
        entry = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=here)
    except FileNotFoundError:
        return None
    except OSError as error:  # a link, or something that cannot be opened
        _say(f"{path / file}: no entry of ours ({error.strerror}); compiled anew")
        return None
    with os.fdopen(entry, "rb") as opened:
        about = os.fstat(entry)
        if stat.S_ISREG(about.st_mode) and _trusted(about) and about.st_size <= LARGEST:
            head, content = opened.readline(200).decode(errors="replace"), opened.readline(200)
            if head == FORMAT and content.decode(errors="replace").split() == [key, _digest(body := opened.read())]:
                return body
    _say(f"{path / file}: damaged, or not written by this user; compiled anew")
    return None


def _write(here: int, file: str, key: str, content: bytes) -> None:
    """All of it under its name, on the disk, or nothing."""
    aside = f".{file}.{secrets.token_hex(8)}"
    data = f"{FORMAT}{key} {_digest(content)}\n".encode() + content
    try:
        with os.fdopen(
            os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=here), "wb"
        ) as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.rename(aside, file, src_dir_fd=here, dst_dir_fd=here)
        os.fsync(here)
    except OSError as error:
        with suppress(OSError):
            os.unlink(aside, dir_fd=here)
        _say(f"{folder() / file} cannot be written ({error.strerror or error}); every start compiles it")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@cache
def _say(text: str) -> None:
    """Warn, once in a process."""
    logger.warning("%s", text)
