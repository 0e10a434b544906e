"""The files in an sdist or a wheel, read straight from the archive: their hashes, and the content of the small ones."""

from __future__ import annotations

import gzip
import hashlib
import stat
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from moetier_stack.errors import StackError

TEXT_LIMIT = 4 << 20
"""Larger files are hashed and not held: no source that a person patches is that long."""
CHUNK = 1 << 20
LOCK_ANOTHER = "the index offers it so; choose another version: `moetier stack lock --update PROJECT=VERSION`"
"""Every archive was held against its hash before it is opened: fetching it again changes nothing."""
LARGEST_SDIST = 4 << 30
LARGEST_WHEEL = 32 << 30
"""Bytes unpacked, beyond which an archive is a bomb: the largest wheels have 5 GB."""


@dataclass(frozen=True)
class Tree:
    """Files by their path inside a source tree or a wheel.

    digests: path -> sha256. texts: path -> content, of files up to `TEXT_LIMIT`.
    """

    name: str
    digests: Mapping[str, str]
    texts: Mapping[str, bytes]

    def hash(self) -> str:
        """sha256 over every path and its content's sha256, in order of the paths."""
        lines = "".join(f"{digest}  {path}\n" for path, digest in sorted(self.digests.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def replaced(self, files: Mapping[str, bytes | None]) -> Tree:
        """The tree with other contents of some files; None removes one."""
        digests, texts = dict(self.digests), dict(self.texts)
        for path, content in files.items():
            if content is None:
                digests.pop(path, None)
                texts.pop(path, None)
            else:
                digests[path], texts[path] = hashlib.sha256(content).hexdigest(), content
        return Tree(self.name, digests, texts)


def read_tree(path: Path) -> Tree:
    """Tree of an sdist (without its top folder) or a wheel; StackError if the archive is damaged or unsafe."""
    digests: dict[str, str] = {}
    texts: dict[str, bytes] = {}
    try:
        for name, file in _files(path):
            check_name(path, name)
            if name in digests:
                raise StackError(f"{path}: {name} is in it twice; {LOCK_ANOTHER}")
            digests[name], content = _read(file)
            if content is not None:
                texts[name] = content
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise StackError(f"{path}: damaged or cut short ({error}); {LOCK_ANOTHER}") from None
    if not digests:
        raise StackError(f"{path}: there is no file in it; {LOCK_ANOTHER}")
    return Tree(path.name, digests, texts)


def _files(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if path.suffix == ".whl":
        yield from _wheel_members(path)
    else:
        yield from ((name, file) for name, file, _ in sdist_members(path))


def _read(file: IO[bytes]) -> tuple[str, bytes | None]:
    digest = hashlib.sha256()
    held: list[bytes] | None = []
    size = 0
    while chunk := file.read(CHUNK):
        digest.update(chunk)
        size += len(chunk)
        if held is not None:
            held.append(chunk)
            if size > TEXT_LIMIT:
                held = None
    return digest.hexdigest(), None if held is None else b"".join(held)


def _wheel_members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(path) as archive:
        _check_size(path, sum(info.file_size for info in archive.infolist()), LARGEST_WHEEL)
        for info in archive.infolist():
            if stat.S_ISLNK(info.external_attr >> 16):
                raise _irregular(path, info.filename)
            if not info.is_dir():
                with archive.open(info) as file:
                    yield info.filename, file


def sdist_members(path: Path) -> Iterator[tuple[str, IO[bytes], bool]]:
    """(name without the top folder, content, whether it is executable) of each file, to be read in this order.

    StackError for whatever is no regular file (a link, a device), for a name that leads elsewhere, and for more bytes
    than sources have. (tarfile's own filter is not in every Python 3.11.)
    """
    with gzip.open(path) as unpacked, tarfile.open(fileobj=_Limited(path, unpacked), mode="r|") as archive:  # type: ignore[call-overload]
        for member in archive:
            top, _, name = member.name.partition("/")
            if member.isdir():
                continue
            file = archive.extractfile(member) if member.isreg() else None
            if file is None or not name or top in {"", ".", ".."}:
                raise _irregular(path, member.name)
            check_name(path, name)
            yield name, file, bool(member.mode & 0o100)


class _Limited:
    """Unpacked bytes, up to as many as an sdist may have: neither a file nor a header can be larger."""

    def __init__(self, path: Path, file: IO[bytes] | gzip.GzipFile) -> None:
        self._path, self._file, self._read = path, file, 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._read += len(data)
        _check_size(self._path, self._read, LARGEST_SDIST)
        return data


def _check_size(path: Path, size: int, most: int) -> None:
    if size > most:
        raise StackError(f"{path}: expected at most {most >> 30} GiB unpacked, found more; do not use this file")


def _irregular(path: Path, name: str) -> StackError:
    return StackError(f"{path}: {name} is no regular file below the top folder; {LOCK_ANOTHER}")


def check_name(path: Path, name: str, remedy: str = LOCK_ANOTHER) -> None:
    """StackError if a member's name in `path` is no plain path below its root, or lies where git keeps what it runs."""
    parts = PurePosixPath(name).parts
    if not name or name.startswith("/") or "\\" in name or "\0" in name or ".." in parts or "." in name.split("/"):
        raise StackError(f"{path}: the path {name!r} leads out of the tree or is odd; {remedy}")
    if any(_is_git(part) for part in parts):
        raise StackError(
            f"{path}: the path {name!r} is part of a git repository, whose hooks and settings git would run; {remedy}"
        )


def _is_git(part: str) -> bool:
    """Whether some file system takes this name for .git: without regard to case, ignored characters, what follows."""
    plain = "".join(letter for letter in part if unicodedata.category(letter) not in ("Cf", "Cc")).casefold()
    return plain.partition(":")[0].rstrip(". ") in {".git", "git~1"}
