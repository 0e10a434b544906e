"""A patched wheel from the pinned one: some files replaced, RECORD and version rewritten, byte for byte reproducible.

Files that stay are copied as they lie in the archive, compressed; replaced ones are stored uncompressed. So the bytes
depend on no version of zlib, and nothing but the inputs.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from moetier_stack.archive import LOCK_ANOTHER, Tree
from moetier_stack.errors import Problems, StackError

HEADER_LENGTH = 30
"""Bytes of a local file header before name and extra field."""


def wheel_metadata(path: Path) -> bytes:
    """METADATA of a wheel."""
    with zipfile.ZipFile(path) as archive:
        return archive.read(f"{dist_info(archive.namelist(), path)}/METADATA")


def dist_info(names: list[str], path: Path) -> str:
    """The one .dist-info folder of a wheel."""
    found = {name.partition("/")[0] for name in names if re.match(r"[^/]+\.dist-info/", name)}
    if len(found) != 1 or f"{min(found)}/RECORD" not in names or f"{min(found)}/METADATA" not in names:
        raise StackError(
            f"{path}: expected one .dist-info with METADATA and RECORD, found {sorted(found)}; {LOCK_ANOTHER}"
        )
    return min(found)


def check_wheel(path: Path, tree: Tree) -> None:
    """CollectedError unless a wheel is what its name says, and every file what its RECORD says."""
    problems = Problems()
    info = dist_info(list(tree.digests), path)
    name, version = named(path)
    metadata = tree.texts[f"{info}/METADATA"].decode(errors="replace")
    said = re.search(r"^Version: (\S+)", metadata, re.MULTILINE)
    if said is None or Version(said[1]) != version:
        problems.add(f"{path.name}: its METADATA says version {said[1] if said else 'none'}; {LOCK_ANOTHER}")
    distribution, _, number = info.removesuffix(".dist-info").partition("-")
    if canonicalize_name(distribution) != name or number != str(version):
        problems.add(f"{path.name}: its metadata lies in {info}; {LOCK_ANOTHER}")
    recorded = {row[0]: row[1] for row in _rows(tree.texts[f"{info}/RECORD"], path)}
    for file, digest in tree.digests.items():
        if file == f"{info}/RECORD" or file.endswith((".jws", ".p7s")):
            continue
        if recorded.get(file) != _record_hash(bytes.fromhex(digest)):
            problems.add(f"{path.name}: {file} is not what RECORD says; {LOCK_ANOTHER}")
    problems.raise_any()


def named(path: Path) -> tuple[str, Version]:
    """(distribution, version) that a wheel's name says."""
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise StackError(f"{path.name}: no name of a wheel ({error})") from None
    return name, version


def patched_name(path: Path, profile: str) -> str:
    """Name of the patched wheel: the pinned one's with a local version."""
    distribution, version, rest = path.name.split("-", 2)
    return f"{distribution}-{local_version(version, profile)}-{rest}"


def local_version(version: str, profile: str) -> str:
    """Such as 0.32.0+moetier.cpu; a local part that is there already stays in front."""
    return f"{version}{'.' if '+' in version else '+'}moetier.{profile.replace('-', '.')}"


def build_wheel(wheel: Path, changed: Mapping[str, bytes | None], profile: str, folder: Path) -> Path:
    """Write the patched wheel into `folder`, whole or not at all; returns its path."""
    target = folder / patched_name(wheel, profile)
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(aside, "w") as out:
            _write(source, out, changed, wheel, profile)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.rename(target)
    except OSError as error:
        raise StackError(
            f"{target}: cannot be written ({error.strerror or error}); make room there, or name another folder"
        ) from error
    finally:
        with suppress(OSError):  # the folder itself may be none
            aside.unlink(missing_ok=True)
    return target


def _write(
    source: zipfile.ZipFile, out: zipfile.ZipFile, changed: Mapping[str, bytes | None], wheel: Path, profile: str
) -> None:
    old = dist_info(source.namelist(), wheel)
    _, version = named(wheel)
    new = f"{old.partition('-')[0]}-{local_version(str(version), profile)}.dist-info"
    said = f"Version: {local_version(str(version), profile)}".encode()
    metadata = re.sub(rb"(?m)^Version: .*$", said, source.read(f"{old}/METADATA"), count=1)
    replaced = {**changed, f"{old}/METADATA": metadata}
    rows = {row[0]: row for row in _rows(source.read(f"{old}/RECORD"), wheel)}
    record: list[list[str]] = []
    for info in source.infolist():
        if (
            info.is_dir()
            or info.filename == f"{old}/RECORD"
            or (info.filename in changed and changed[info.filename] is None)
        ):
            continue
        name = new + info.filename.removeprefix(old) if info.filename.startswith(f"{old}/") else info.filename
        content = replaced.get(info.filename)
        if content is None:
            _copy(source, out, info, name)
            record.append([name, *rows[info.filename][1:]])
        else:
            _store(out, info, name, content)
            record.append(_row(name, content))
    stamp = source.getinfo(f"{old}/RECORD")
    for name, content in sorted(changed.items()):
        if content is not None and name not in source.NameToInfo:
            _store(out, stamp, name, content)
            record.append(_row(name, content))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*sorted(record), [f"{new}/RECORD", "", ""]])
    _store(out, stamp, f"{new}/RECORD", text.getvalue().encode())


def _copy(source: zipfile.ZipFile, out: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> None:
    """Copy a member's compressed bytes as they are (zipfile itself can only compress anew)."""
    assert source.fp is not None
    assert out.fp is not None
    source.fp.seek(info.header_offset)
    header = source.fp.read(HEADER_LENGTH)
    skip = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    source.fp.seek(info.header_offset + HEADER_LENGTH + skip)
    member = _member(info, name)
    member.CRC, member.compress_size, member.file_size = info.CRC, info.compress_size, info.file_size
    member.compress_type = info.compress_type
    member.header_offset = out.start_dir
    out.fp.seek(out.start_dir)
    out.fp.write(member.FileHeader(zip64=False))
    left = info.compress_size
    while left:
        chunk = source.fp.read(min(left, 1 << 20))
        if not chunk:
            raise StackError(f"{source.filename}: cut short at {info.filename}, while it was read")
        out.fp.write(chunk)
        left -= len(chunk)
    out.start_dir = out.fp.tell()
    out.filelist.append(member)
    out.NameToInfo[member.filename] = member
    out._didModify = True  # type: ignore[attr-defined]


def _store(out: zipfile.ZipFile, like: zipfile.ZipInfo, name: str, content: bytes) -> None:
    member = _member(like, name)
    member.compress_type = zipfile.ZIP_STORED
    with out.open(member, "w") as file:
        file.write(content)


def _member(like: zipfile.ZipInfo, name: str) -> zipfile.ZipInfo:
    """Time and mode of a member under another name."""
    member = zipfile.ZipInfo(name, like.date_time)
    member.external_attr, member.create_system = like.external_attr, 3
    return copy(member)


def _rows(record: bytes, path: Path) -> list[list[str]]:
    rows = list(csv.reader(io.StringIO(record.decode(errors="replace"))))
    if any(len(row) != 3 for row in rows):
        raise StackError(f"{path}: its RECORD is no list of path, hash and size; {LOCK_ANOTHER}")
    return rows


def _row(name: str, content: bytes) -> list[str]:
    return [name, _record_hash(hashlib.sha256(content).digest()), str(len(content))]


def _record_hash(digest: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def extract(path: Path, folder: Path) -> None:
    """Unpack a wheel whose names were checked (`read_tree`)."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            archive.extract(info, folder)
