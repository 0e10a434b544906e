"""A small project in two releases, an index that serves it over HTTP, and a stack on it."""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moetier_stack.git import git, init, write_files
from moetier_stack.relock import relock
from moetier_stack.workspace import Workspace

BASE = "python:3.11-slim-bookworm@sha256:" + "a" * 64
APP = """\
\"\"\"An application.\"\"\"

import os


def greet(name, polite=False):
    # Say hello.
    if polite:
        return "Dear " + name
    return "Hello " + name


def leave(name):
    return "Bye " + name


def count(items):
    total = 0
    for item in items:
        total += item
    return total
"""
FILES = {
    "demo/__init__.py": "",
    "demo/app.py": APP,
    "demo/data.txt": "one\ntwo\nthree\nfour\nfive\n",
    "demo/native.cpp": "int one() { return 1; }\n",
}
STACK = """\
format = 1

[sources.demo]
project = "demo"
package = "demo"
range = ">=1,<2"
index = "{index}"

[profiles.plain]
summary = "no carry"
source = "demo"
wheel = "demo"
carries = []
python = "3.11"
platform = "manylinux_2_36_x86_64"
base = "{base}"

[profiles.patched]
summary = "with carries"
source = "demo"
wheel = "demo"
carries = [{carries}]
python = "3.11"
platform = "manylinux_2_36_x86_64"
base = "{base}"
{more}
"""
CARRY = """
[[carries]]
id = "{id}"
target = "demo"
scope = "{scope}"
upstream = "https://example.org/demo/pull/1"
why = "a reason"
evidence = "seen"
drop_when = "it is gone"
"""
Files = dict[str, str]


def wheel_bytes(version: str, files: Files, project: str = "demo", requires: str = "") -> bytes:
    """A pure wheel."""
    info = f"{project}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    every = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},{_hash(text.encode())},{len(text.encode())}\n" for name, text in every.items())
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {**every, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6)), text)
    return out.getvalue()


def _hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def sdist_bytes(version: str, files: Files) -> bytes:
    every = {**files, "PKG-INFO": f"Metadata-Version: 2.1\nName: demo\nVersion: {version}\n"}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in every.items():
            member = tarfile.TarInfo(f"demo-{version}/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return out.getvalue()


@dataclass
class Release:
    """What an index offers: bytes by file name, and what it says of their hash if that is a lie."""

    files: dict[str, bytes] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    pages: dict[str, bytes] = field(default_factory=dict)
    """Further pages in HTML, by their path."""

    def add(self, version: str, files: Files, wheel_files: Files | None = None) -> None:
        self.files[f"demo-{version}.tar.gz"] = sdist_bytes(version, files)
        self.files[f"demo-{version}-py3-none-any.whl"] = wheel_bytes(version, wheel_files or files)


@contextmanager
def serving(release: Release, html: bool = False) -> Iterator[str]:
    """The address of an index of `release`, in JSON or HTML."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rsplit("/", 1)[-1]
            body, kind = release.files.get(name), "application/octet-stream"
            if self.path == "/simple/demo/":
                body, kind = page(), "text/html" if html else "application/vnd.pypi.simple.v1+json"
            if self.path in release.pages:
                body, kind = release.pages[self.path], "text/html"
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            pass

    def page() -> bytes:
        hashes = {n: release.said.get(n, hashlib.sha256(b).hexdigest()) for n, b in release.files.items()}
        if html:
            return "".join(f'<a href="../../files/{n}#sha256={h}">{n}</a>' for n, h in hashes.items()).encode()
        files = [{"filename": n, "url": f"../../files/{n}", "hashes": {"sha256": h}} for n, h in hashes.items()]
        return json.dumps({"meta": {"api-version": "1.1"}, "name": "demo", "files": files}).encode()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple/"
    finally:
        server.shutdown()
        server.server_close()


def patch_bytes(folder: Path, old: Files, new: Files, subject: str = "a change") -> bytes:
    """`git format-patch` of the change from `old` to `new`."""
    init(folder)
    write_files(folder, {name: text.encode() for name, text in old.items()})
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", "old")
    for name in old.keys() - new.keys():
        (folder / name).unlink()
    write_files(folder, {name: text.encode() for name, text in new.items()})
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "-m", subject)
    return git(folder, "format-patch", "-1", "--stdout", "--no-signature", "--no-renames").stdout


Edit = Callable[[Files], Files]


def replacing(path: str, old: str, new: str) -> Edit:
    """An edit of one file."""

    def edit(files: Files) -> Files:
        assert files[path].count(old) == 1, f"{old!r} is not once in {path}"
        return {**files, path: files[path].replace(old, new)}

    return edit


POLITE = replacing("demo/app.py", '"Dear " + name', '"Dearest " + name')


@dataclass
class Demo:
    """A stack on the demo project, to be damaged."""

    folder: Path
    release: Release
    index: str

    @property
    def space(self) -> Workspace:
        return Workspace(self.folder / "stack", self.folder / "cache")

    def write(self, *carries: tuple[str, bytes], scope: str = "runtime", more: str = "") -> None:
        """stack.toml with these carries (id, patch) in profile `patched`."""
        stack = self.folder / "stack"
        (stack / "carries" / "demo").mkdir(parents=True, exist_ok=True)
        for name, data in carries:
            (stack / "carries" / "demo" / f"{name}.patch").write_bytes(data)
        names = ", ".join(f'"{name}"' for name, _ in carries)
        text = STACK.format(index=self.index, base=BASE, carries=names, more=more)
        text += "".join(CARRY.format(id=name, scope=scope) for name, _ in carries)
        (stack / "stack.toml").write_text(text)

    def patch(self, edit: Edit, name: str = "p") -> bytes:
        return patch_bytes(self.folder / f"repo-{name}", FILES, edit(FILES))

    def lock(self) -> None:
        relock(self.space, (), lambda _: None)

    def edit_toml(self, old: str, new: str) -> None:
        path = self.folder / "stack" / "stack.toml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
