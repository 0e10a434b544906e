"""A carry's patch: read strictly, and applied where it says, without fuzz and without searching.

Every carry is cut against the pinned source itself. So a hunk belongs at exactly the lines that it names, and carries
of one profile are independent: two that touch the same lines are an error, not a matter of order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as UnifiedHunk
from unidiff.patch import PatchedFile, PatchSet

from moetier_stack.errors import Problems, StackError

NATIVE = frozenset(
    {".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hpp", ".inc", ".pyx", ".pxd", ".rs", ".s", ".asm", ".proto"}
    | {".cmake", ".toml", ".cfg", ".in", ".lock", ".so", ".a", ".o"}
)
"""Files that compiled parts are built from, or that say how: replacing them in a wheel changes nothing."""
BUILD_FILES = frozenset({"setup.py", "CMakeLists.txt"})
REGULAR = {None, "100644", "100755"}


@dataclass(frozen=True)
class Hunk:
    """Lines (with their line ends) that stand in the source from `start` (1-based; of an insertion into nothing: 0)."""

    start: int
    source: tuple[str, ...]
    target: tuple[str, ...]
    groups: tuple[tuple[int, int, int, int], ...]
    """Each run of changed lines: (from, to) in `source`, (from, to) in `target`."""
    label: str


@dataclass(frozen=True)
class FilePatch:
    path: str
    kind: str
    """modify, create or delete."""
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    id: str
    subject: str
    files: tuple[FilePatch, ...]


def read_patch(name: str, data: bytes) -> Patch:
    """The patch `name` from the bytes of a `git format-patch` file; CollectedError with all that is wrong in it."""
    problems = Problems()
    text = _text(name, data, problems)
    problems.raise_any()
    try:
        parsed = PatchSet(text)
    except (UnidiffParseError, ValueError, IndexError) as error:
        raise StackError(f"carry {name}: expected a patch of git format-patch, found a fault: {error}") from None
    files = []
    for part in parsed:
        with problems.collecting():
            files.append(_file(name, part))
    paths = [file.path for file in files]
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        problems.add(f"carry {name}: {path} is in it twice; make one commit of it, then git format-patch -1")
    if not files and not problems.found:
        problems.add(f"carry {name}: it changes nothing; remove it from stack.toml and from carries/")
    problems.raise_any()
    subject = re.search(r"^Subject: (?:\[[^\]]*\] )?(.*(?:\n .*)*)", text, re.MULTILINE)
    return Patch(name, " ".join(subject[1].split()) if subject else "", tuple(files))


def _text(name: str, data: bytes, problems: Problems) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        problems.add(f"carry {name}: expected UTF-8, found byte {data[error.start]:#04x} at {error.start}")
        return ""
    if "\r" in text:
        problems.add(f"carry {name}: it has carriage returns (CRLF); write it anew with git format-patch, as bytes")
    if not re.match(r"From [0-9a-f]{40,64} ", text) or not re.search(r"^Subject: ", text, re.MULTILINE):
        problems.add(
            f"carry {name}: not of git format-patch (no From and Subject); commit the change, "
            "then run git format-patch -1"
        )
    if re.search(r"^(GIT binary patch|Binary files )", text, re.MULTILINE):
        problems.add(f"carry {name}: it changes a binary file; carries change text only")
    return text


def _file(name: str, part: PatchedFile) -> FilePatch:
    info = str(part.patch_info or "")
    source, target = part.source_file, part.target_file
    for path in (source, target):
        bare = path if path == "/dev/null" else re.sub(r"^[ab]/", "", path)
        if path != "/dev/null" and (not re.match(r"[ab]/", path) or not _inside(bare)):
            raise StackError(
                f"carry {name}: the path {path!r} leads out of the tree; make the patch in the root of the tree"
            )
    if re.search(r"^(rename|copy) (from|to) ", info, re.MULTILINE) or (
        "/dev/null" not in (source, target) and source[2:] != target[2:]
    ):
        raise StackError(
            f"carry {name}: it renames {source[2:]} to {target[2:]}; git format-patch --no-renames deletes and creates"
        )
    modes = {part.source_mode, part.target_mode}
    if not modes <= REGULAR or (len(modes - {None}) > 1):
        raise StackError(f"carry {name}: {part.path} gets another mode ({part.source_mode} -> {part.target_mode})")
    kind = "create" if source == "/dev/null" else "delete" if target == "/dev/null" else "modify"
    path = (target if kind == "create" else source)[2:]
    hunks = tuple(_hunk(name, path, hunk, number + 1) for number, hunk in enumerate(part))
    if kind == "modify" and not hunks:
        raise StackError(f"carry {name}: {path} has no hunk; write the patch anew with git format-patch")
    return FilePatch(path, kind, hunks)


def _inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    odd = path.startswith("/") or "\\" in path or '"' in path or "//" in path
    return bool(parts) and not odd and not {"..", ".", ".git"} & set(path.split("/"))


def _hunk(name: str, path: str, hunk: UnifiedHunk, number: int) -> Hunk:
    label = f"{path} hunk {number} (line {hunk.source_start})"
    source: list[str] = []
    target: list[str] = []
    groups: list[tuple[int, int, int, int]] = []
    last: tuple[list[str], ...] = ()
    changing = False
    for line in hunk:
        kind = line.line_type
        if kind == "\\":
            for side in last:
                side[-1] = side[-1].removesuffix("\n")
            continue
        if kind == " " or (kind == "" and line.value == "\n"):
            last, changing = (source, target), False
        else:
            if not changing:
                groups.append((len(source), len(source), len(target), len(target)))
            last, changing = (source,) if kind == "-" else (target,), True
        for side in last:
            side.append(line.value)
        if changing:
            groups[-1] = (groups[-1][0], len(source), groups[-1][2], len(target))
    if not groups:
        raise StackError(f"carry {name}: {label} changes nothing; write the patch anew with git format-patch")
    return Hunk(hunk.source_start, tuple(source), tuple(target), tuple(groups), label)


def lines_of(content: bytes, where: str) -> list[str]:
    """Lines with their ends; only a line feed ends a line, as for git."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise StackError(f"{where}: expected UTF-8, found a file that is none; it cannot be patched") from None
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def apply_patches(patches: Sequence[Patch], texts: Mapping[str, bytes], tree: str) -> dict[str, bytes | None]:
    """Changed files of applying independent patches to a tree: path -> content, None where it is deleted.

    CollectedError names every hunk that does not stand exactly where it says, and all carries that touch each other.
    """
    problems = Problems()
    changed: dict[str, bytes | None] = {}
    touching: dict[str, list[tuple[Patch, FilePatch]]] = {}
    for patch in patches:
        for file in patch.files:
            touching.setdefault(file.path, []).append((patch, file))
    for path, parts in touching.items():
        with problems.collecting():
            changed[path] = _apply_to_file(path, parts, texts.get(path), tree)
    problems.raise_any()
    return changed


def _apply_to_file(
    path: str, parts: Sequence[tuple[Patch, FilePatch]], content: bytes | None, tree: str
) -> bytes | None:
    for patch, file in parts:
        if file.kind == "create" and content is not None:
            raise StackError(
                f"carry {patch.id}: it creates {path}, which is in {tree} already; see `moetier stack status`, "
                "and drop what landed"
            )
        if file.kind != "create" and content is None:
            raise StackError(
                f"carry {patch.id}: {path} is not in {tree}; see `moetier stack status`, "
                f"then run `moetier stack rebase {patch.id} --onto VERSION`"
            )
    if len(parts) > 1 and any(file.kind != "modify" for _, file in parts):
        raise StackError(f"carries {' and '.join(p.id for p, _ in parts)} create or delete {path}; make them one carry")
    lines = lines_of(content or b"", f"{tree}: {path}")
    edits = _edits(path, parts, lines, tree)
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        lines[edit.start : edit.end] = edit.lines
    if parts[0][1].kind == "delete":
        if lines:
            raise StackError(f"carry {parts[0][0].id}: it deletes {path}, of which lines would be left in {tree}")
        return None
    return "".join(lines).encode()


@dataclass(frozen=True)
class _Edit:
    """Lines from `start` up to `end` (0-based) become `lines`; its hunk, with context, is from `low` up to `high`."""

    carry: str
    start: int
    end: int
    lines: tuple[str, ...]
    low: int
    high: int

    def disturbs(self, other: _Edit) -> bool:
        """Whether it changes lines that the other one's hunk stands on, or inserts where the other one does."""
        if self.start == self.end:
            same = other.start == other.end == self.start
            return same or other.low < self.start < other.high
        return self.start < other.high and self.end > other.low


def _edits(path: str, parts: Sequence[tuple[Patch, FilePatch]], lines: Sequence[str], tree: str) -> list[_Edit]:
    """Changed runs of a file's hunks; CollectedError if one does not stand there, or two are in each other's way."""
    problems = Problems()
    edits: list[_Edit] = []
    for patch, file in parts:
        for hunk in file.hunks:
            low = max(hunk.start - 1, 0)
            high = low + len(hunk.source)
            if tuple(lines[low:high]) != hunk.source:
                problems.add(
                    f"carry {patch.id}: {hunk.label} does not stand there in {tree}, and carries are applied without "
                    f"fuzz; see `moetier stack status`, then run `moetier stack rebase {patch.id} --onto VERSION`"
                )
            new = [_Edit(patch.id, low + a, low + b, hunk.target[c:d], low, high) for a, b, c, d in hunk.groups]
            for edit, other in [
                (edit, other) for edit in new for other in edits if other.low != low or other.carry != patch.id
            ]:
                if edit.disturbs(other) or other.disturbs(edit):
                    who = (
                        f"carries {other.carry} and {edit.carry}"
                        if other.carry != patch.id
                        else f"carry {patch.id} twice"
                    )
                    problems.add(f"{path}: {who} at line {edit.start + 1} of {tree}; make them one carry")
            edits += new
    problems.raise_any()
    return edits


def scope_problems(patch: Patch, scope: str, package: str, from_source: bool) -> list[str]:
    """Return what a carry of this scope may not touch."""
    found = []
    for file in patch.files:
        top = PurePosixPath(file.path).parts[0]
        native = PurePosixPath(file.path).suffix in NATIVE or PurePosixPath(file.path).name in {
            "setup.py",
            "CMakeLists.txt",
        }
        if scope == "test" and top != "tests":
            found.append(f"carry {patch.id}: {file.path} is outside tests/, and its scope is test; make it two carries")
        elif scope == "runtime" and top == "tests":
            found.append(f"carry {patch.id}: {file.path} is a test, and its scope is runtime; make it two carries")
        elif scope == "runtime" and not from_source and (top != package or native):
            found.append(
                f"carry {patch.id}: {file.path} is not in a wheel, or compiled parts are built from it; set "
                'build = "source" in the profiles that carry it'
            )
    return found
