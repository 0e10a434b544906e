"""The files in an sdist or a wheel, read straight from the archive: their hashes, and the content of the small ones."""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from moetier.stack.errors import StackError

TEXT_LIMIT = 4 << 20
"""Larger files are hashed and not held: no source that a person patches is that long."""
CHUNK = 1 << 20
LOCK_ANOTHER = "the index offers it so; choose another version: `moetier stack lock --update PROJECT=VERSION`"
"""Every archive was held against its hash before it is opened: fetching it again changes nothing."""


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
        for name, file in _wheel_members(path) if path.suffix == ".whl" else _sdist_members(path):
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
        for info in archive.infolist():
            if not info.is_dir():
                with archive.open(info) as file:
                    yield info.filename, file


def _sdist_members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            top, _, name = member.name.partition("/")
            if member.isdir():
                continue
            file = archive.extractfile(member) if member.isreg() else None
            if file is None or not name or top in {"", ".", ".."}:
                raise StackError(f"{path}: {member.name} is no regular file below the top folder; {LOCK_ANOTHER}")
            yield name, file


def check_name(path: Path, name: str) -> None:
    """StackError if a member's name in the archive `path` is no plain path below its root."""
    parts = PurePosixPath(name).parts
    if not name or name.startswith("/") or "\\" in name or "\0" in name or ".." in parts or "." in name.split("/"):
        raise StackError(f"{path}: the path {name!r} leads out of the tree or is odd; {LOCK_ANOTHER}")
