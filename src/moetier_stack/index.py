"""Package indexes by the ordinary Simple API (PEP 503 and 691), and a cache of files by their sha256.

An index is believed in nothing but where a file can be had: a file is kept only when its bytes have the hash that
was asked for, whole, under a name that says what it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlparse

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from moetier_stack.errors import StackError

JSON_TYPE = "application/vnd.pypi.simple.v1+json"
LARGEST_PAGE = 128 << 20
CHUNK = 1 << 20
TIMEOUT_SECONDS = 60
WHERE = "correct the index: `index` in stack.toml, else PIP_INDEX_URL or pip's configuration"
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class File:
    """A file that an index offers."""

    filename: str
    project: str
    version: Version
    url: str
    sha256: str
    size: int | None
    requires_python: str
    yanked: bool
    tags: frozenset[Tag] | None
    """None: an sdist."""


class Index:
    """One index; `offline` asks it for nothing."""

    def __init__(self, address: str = "", offline: bool = False) -> None:
        self._address = address
        self.offline = offline
        self._pages: dict[str, list[File]] = {}

    @property
    def address(self) -> str:
        return (self._address or configured_index()).rstrip("/") + "/"

    def files(self, project: str) -> list[File]:
        """Wheels and sdists of a project; names that are neither are skipped, and so are those of another project."""
        if project not in self._pages:
            if self.offline:
                raise StackError(f"{project}: the index may not be asked offline; run again without --offline")
            address = urljoin(self.address, f"{project}/")
            body, kind, address = _get(address)
            try:
                entries = _json_entries(body) if "json" in kind else _html_entries(body)
                found = [_file(project, address, entry) for entry in entries]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise StackError(
                    f"{address}: expected a project page of the Simple API, found what is none ({error}); {WHERE}"
                ) from None
            self._pages[project] = [file for file in found if file is not None]
        return self._pages[project]

    def named(self, project: str, filename: str) -> File | None:
        """The file of this name; None if it is not offered any more."""
        return next((file for file in self.files(project) if file.filename == filename), None)


def configured_index() -> str:
    """The address of the index that pip asks: PIP_INDEX_URL, pip's configuration, else pip's own default."""
    given = os.environ.get("PIP_INDEX_URL")
    if given:
        return given
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and done.stdout.strip():
        return done.stdout.strip()
    return str(import_module("pip._internal.models.index").PyPI.simple_url)


def versions(files: Iterable[File], accept: Callable[[File], bool], wanted: SpecifierSet) -> list[Version]:
    """Released versions in the range `wanted` of the files that `accept` takes, oldest first; no yanked ones."""
    found = {file.version for file in files if accept(file) and not file.yanked}
    return sorted(wanted.filter(found))


def fetch(file: File, cache: Path) -> Path:
    """The file in the cache, downloaded if need be; StackError if its bytes are not what its hash says."""
    path = cache / file.sha256 / file.filename
    if path.is_file():
        return checked(path, file.sha256)
    body = _open(file.url)
    try:
        _keep(body, file, path)
    except (OSError, ValueError) as error:  # of closing too: what was buffered is written then
        raise StackError(
            f"{file.filename}: the download broke off ({error}); see that there is room in {cache}, then run the "
            "command again"
        ) from error
    return path


def _keep(body: Any, file: File, path: Path) -> None:
    """Read an answer to its end into `path`, if it has the file's hash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with body, tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".part", delete=False) as out:
        part = Path(out.name)
        try:
            while chunk := body.read(CHUNK):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
            if digest.hexdigest() != file.sha256:
                raise StackError(
                    f"{file.filename}: expected sha256 {file.sha256}, the index gave {digest.hexdigest()} "
                    f"({out.tell():,} bytes); nothing was kept; try again, and if it stays so do not trust that index"
                )
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)


def checked(path: Path, sha256: str) -> Path:
    """`path`, if its bytes have this hash."""
    found = sha256_of(path)
    if found != sha256:
        raise StackError(f"{path}: expected sha256 {sha256}, found {found}; delete it, it is fetched again")
    return path


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _get(address: str) -> tuple[bytes, str, str]:
    """(body, content type, address after redirections)."""
    with _open(address, {"Accept": f"{JSON_TYPE}, text/html;q=0.5"}) as answer:
        body = answer.read(LARGEST_PAGE + 1)
        if len(body) > LARGEST_PAGE:
            raise StackError(f"{address}: expected at most {LARGEST_PAGE:,} bytes of a page; {WHERE}")
        return body, answer.headers.get("Content-Type", ""), answer.url or address


def _open(address: str, headers: dict[str, str] | None = None) -> Any:
    """An open answer; StackError if there is none."""
    if urlparse(address).scheme not in {"https", "http", "file"}:
        raise StackError(f"{address}: expected an https, http or file address; {WHERE}")
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    try:
        request = urllib.request.Request(address, headers=headers or {})  # noqa: S310 (the scheme was checked)
        return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=context)  # noqa: S310
    except urllib.error.HTTPError as error:
        raise StackError(
            f"{address}: the index answers {error.code} {error.reason}; check the project, or {WHERE}"
        ) from None
    except (OSError, ValueError) as error:
        raise StackError(f"{address}: cannot be reached ({error}); check the network, or {WHERE}") from None


def _file(project: str, page: str, entry: dict[str, Any]) -> File | None:
    filename = entry["filename"]
    tags: frozenset[Tag] | None = None
    try:
        if filename.endswith(".whl"):
            name, version, _, tags = parse_wheel_filename(filename)
        elif filename.endswith(".tar.gz"):
            name, version = parse_sdist_filename(filename)
        else:
            return None
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None
    sha256 = str(entry["hashes"].get("sha256", "")).lower()
    if name != canonicalize_name(project) or not SHA256.fullmatch(sha256) or "/" in filename:
        return None
    size = entry.get("size")
    return File(
        filename=filename,
        project=project,
        version=version,
        url=urljoin(page, entry["url"]),
        sha256=sha256,
        size=size if isinstance(size, int) else None,
        requires_python=str(entry.get("requires-python") or ""),
        yanked=bool(entry.get("yanked")),
        tags=tags,
    )


def _json_entries(body: bytes) -> list[dict[str, Any]]:
    page = json.loads(body)
    major = str(page["meta"]["api-version"]).partition(".")[0]
    if major != "1":
        raise ValueError(f"version {major} of the API, 1 is known")
    return list(page["files"])


def _html_entries(body: bytes) -> list[dict[str, Any]]:
    parser = _Anchors()
    parser.feed(body.decode("utf-8", errors="replace"))
    return parser.entries


class _Anchors(HTMLParser):
    """The anchors of a page of PEP 503, as PEP 691 would give them."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, Any]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        url, fragment = urldefrag(given.get("href") or "")
        if tag != "a" or not url:
            return
        name, _, value = fragment.partition("=")
        self.entries.append(
            {
                "filename": unquote(urlparse(url).path).rsplit("/", 1)[-1],
                "url": url,
                "hashes": {name: value},
                "requires-python": given.get("data-requires-python"),
                "yanked": "data-yanked" in given,
            }
        )


def runs_on(file: File, python: str) -> bool:
    """Whether the index says that the file is for this Python, such as 3.11."""
    try:
        return SpecifierSet(file.requires_python).contains(f"{python}.0", prereleases=True)
    except InvalidSpecifier:
        return False
