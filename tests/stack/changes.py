"""Changes that really went in between two releases, cut at test time as if they were carries."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moetier_stack.archive import Tree
from moetier_stack.git import git, init, write_files
from moetier_stack.patch import read_patch

HEADER = "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\nSubject: [PATCH] {}\n\n---\n"


@dataclass(frozen=True)
class Change:
    """One upstream change of a file, as the bytes of a patch."""

    name: str
    path: str
    data: bytes

    def altered(self, number: int, how: str) -> Change | None:
        """The same with one of its added lines (the `number`-th with words in it) altered; None if there is none."""
        lines = self.data.decode().split("\n")
        start = next(n for n, line in enumerate(lines) if line.startswith("@@"))
        rows = [n for n in range(start, len(lines)) if lines[n].startswith("+") and re.search(r"\w", lines[n])]
        if not rows:
            return None
        row = rows[number % len(rows)]
        if how == "word":
            lines[row] = re.sub(r"(\w)(?=\W*$)", r"\1x", lines[row], count=1)
            if not re.search(r"\wx\W*$", lines[row]):
                lines[row] += "x"
        elif how == "comment":
            lines[row] += "  # altered"
        elif how == "dropped":
            if lines[row - 1][:1] != "+" and lines[row + 1][:1] != "+":
                return None  # a whole run: what is left is a smaller change, and it is upstream
            del lines[row]
        elif how == "twice":
            lines.insert(row, lines[row])
        return Change(self.name, self.path, _recounted(lines).encode())


def _recounted(lines: list[str]) -> str:
    """Hunk headers with the right counts."""
    out: list[str] = []
    for number, line in enumerate(lines):
        header = re.match(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@(.*)", line)
        if header:
            body = []
            for later in lines[number + 1 :]:
                if later.startswith(("@@", "diff ")):
                    break
                body.append(later[:1])
            old = sum(kind in {" ", "-"} for kind in body)
            new = sum(kind in {" ", "+"} for kind in body)
            line = f"@@ -{header[1]},{old} +{header[2]},{new} @@{header[3]}"
        out.append(line)
    return "\n".join(out)


def changes(old: Tree, new: Tree, folder: Path, most: int, package: str = "vllm/") -> list[Change]:
    """Up to `most` changes of Python files, spread evenly over the files that changed; each has 1 to 4 hunks."""
    both = [
        path
        for path in sorted(old.texts)
        if path.startswith(package)
        and path.endswith(".py")
        and path in new.texts
        and old.digests[path] != new.digests[path]
    ]
    init(folder)
    write_files(folder, {path: old.texts[path] for path in both})
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "-m", "old")
    write_files(folder, {path: new.texts[path] for path in both})
    every = git(folder, "diff", "--no-color", "--no-ext-diff").stdout
    found = []
    for diff in re.split(rb"(?m)^(?=diff --git )", every)[1:]:
        path = re.match(rb"diff --git a/(\S+) ", diff)[1].decode()  # type: ignore[index]
        name = re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-")
        if 1 <= diff.count(b"\n@@ ") <= 4 and b"\n+" in diff.split(b"\n@@ ", 1)[1]:
            found.append(Change(name, path, HEADER.format(name).encode() + diff))
    step = max(len(found) // most, 1)
    chosen = found[::step][:most]
    for change in chosen:
        read_patch(change.name, change.data)
    return chosen
