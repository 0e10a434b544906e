"""Whether a change is in an upstream tree already: also when it was moved or reformatted, never when it was altered.

A hunk is judged by its runs of changed lines. Each is looked for with lines of context around it, as the patched file
has them, and counts as landed only if the file has more of that passage than the unpatched pinned file has, and less
of the passage that it replaces. So what merely looks alike elsewhere in the file is not taken for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from moetier_stack.archive import Tree
from moetier_stack.lines import Line, plain_lines, python_lines
from moetier_stack.patch import FilePatch, Hunk, Patch, apply_patches

CONTEXT = 3
FAR_CHANGED = 3
"""Changed lines that a passage needs to be recognized in another file, where its surroundings may differ too."""
NEEDLES = 16
"""Longest words of a passage that another file must have before it is looked at closely."""


@dataclass(frozen=True)
class Passage:
    """A run of changed lines before and after, with up to `CONTEXT` lines on either side."""

    before: tuple[Line, ...]
    after: tuple[Line, ...]
    lead: int
    trail: int
    at_start: bool
    at_end: bool

    def trimmed(self, context: int) -> Passage:
        """The same with at most `context` lines on either side."""
        lead, trail = min(self.lead, context), min(self.trail, context)
        cut = slice(self.lead - lead, None), self.trail - trail
        before, after = self.before[cut[0]], self.after[cut[0]]
        return Passage(
            before[: len(before) - cut[1]],
            after[: len(after) - cut[1]],
            lead,
            trail,
            self.at_start and lead == self.lead,
            self.at_end and trail == self.trail,
        )

    @property
    def added(self) -> tuple[Line, ...]:
        return self.after[self.lead : len(self.after) - self.trail]

    @property
    def removed(self) -> tuple[Line, ...]:
        return self.before[self.lead : len(self.before) - self.trail]


@dataclass(frozen=True)
class Place:
    """Where a landed passage was found."""

    path: str
    line: int


def landed_runs(patch: Patch, pinned: Tree, upstream: Tree) -> dict[Hunk, list[Place | None]]:
    """For every hunk, where each of its runs of changed lines is in `upstream`; None: it is not there.

    A run that changes white space only has nothing that could land; it is left out, and a hunk may have no run then.

    The patch must apply to `pinned` (else CollectedError): an altered context or removed line shows there.
    """
    patched = apply_patches([patch], pinned.texts, pinned.name)
    found: dict[Hunk, list[Place | None]] = {}
    for file in patch.files:
        old, new = pinned.texts.get(file.path, b""), patched[file.path]
        if file.kind != "modify":
            place = _whole_file(file, new, upstream)
            for hunk in file.hunks:
                found[hunk] = [place] * len(hunk.groups)
            continue
        shift = 0
        for hunk in sorted(file.hunks, key=lambda hunk: hunk.start):
            runs = [_Run(file.path, old, new or b"", hunk, group, shift) for group in hunk.groups]
            found[hunk] = [_find(run, pinned, upstream) for run in runs if any(run.passages())]
            shift += len(hunk.target) - len(hunk.source)
    return found


def _whole_file(file: FilePatch, new: bytes | None, upstream: Tree) -> Place | None:
    there = upstream.texts.get(file.path)
    if new is None:
        return Place(file.path, 1) if file.path not in upstream.digests else None
    if there is None:
        return None
    return Place(file.path, 1) if _same(file.path, new, there) else None


def _same(path: str, a: bytes, b: bytes) -> bool:
    return any(
        x is not None and y is not None and _keys(x) == _keys(y)
        for x, y in zip(_views(path, a), _views(path, b), strict=True)
    )


@dataclass(frozen=True)
class _Run:
    """A run of changed lines of a hunk, whose file is moved by `shift` lines by the hunks before."""

    path: str
    old: bytes
    new: bytes
    hunk: Hunk
    group: tuple[int, int, int, int]
    shift: int

    def passages(self) -> list[Passage | None]:
        """The run in each view of the file; None where the view cannot see it."""
        start, (a, b, c, d) = max(self.hunk.start - 1, 0), self.group
        rows = (start + a + 1, start + b), (start + self.shift + c + 1, start + self.shift + d)  # 1-based, both inside
        views = zip(_views(self.path, self.old), _views(self.path, self.new), strict=True)
        return [None if old is None or new is None else _passage(old, new, *rows) for old, new in views]


def _find(run: _Run, pinned: Tree, upstream: Tree) -> Place | None:
    there = upstream.texts.get(run.path)
    for view, passage in enumerate(run.passages()):
        if passage is None:
            continue
        old, new = _views(run.path, run.old)[view] or (), _views(run.path, run.new)[view] or ()
        here = _views(run.path, there)[view] if there is not None else None
        if here is not None and (line := _near(passage, old, new, here)):
            return Place(run.path, line)
        if _gone(passage, old, here) and (place := _far(run.path, passage, view, pinned, upstream)):
            return place
    return None


def _passage(
    old: Sequence[Line], new: Sequence[Line], old_rows: tuple[int, int], new_rows: tuple[int, int]
) -> Passage | None:
    """The run in terms of `Line`s; None if it changes white space only, which no comparison here can see."""
    a, b = _range(old, old_rows), _range(new, new_rows)
    lead = min(CONTEXT, a[0], b[0])
    trail = min(CONTEXT, len(old) - a[1], len(new) - b[1])
    before, after = tuple(old[a[0] - lead : a[1] + trail]), tuple(new[b[0] - lead : b[1] + trail])
    if _keys(before) == _keys(after):
        return None
    return Passage(before, after, lead, trail, a[0] == lead, a[1] + trail == len(old))


def _range(lines: Sequence[Line], rows: tuple[int, int]) -> tuple[int, int]:
    """Indices of the lines that share a physical row with `rows`; of an empty run, where it would stand."""
    first, last = rows
    if last < first:
        inside = [n for n, line in enumerate(lines) if line.first < first <= line.last]
        if inside:  # an insertion into a statement of several rows
            return inside[0], inside[0] + 1
        index = sum(line.last < first for line in lines)
        return index, index
    index = sum(line.last < first for line in lines)
    return index, sum(line.first <= last for line in lines)


def _near(passage: Passage, old: Sequence[Line], new: Sequence[Line], here: Sequence[Line]) -> int:
    """The physical line in `here`, the file of the same name, where the passage stands; 0: it does not."""
    for context in range(CONTEXT, 0, -1):
        part = passage.trimmed(context)
        if not (part.lead or part.at_start) or not (part.trail or part.at_end):
            return 0
        places = [place for place in _occurrences(part.after, here) if _bounded(part, place, here)]
        wanted = _occurrences(part.after, new)
        more = len(places) >= len(wanted) > len(_occurrences(part.after, old))
        if more and _replaced(part, old, new, here):
            return here[places[0]].first
    if _complete(passage, here) and _gone(passage, old, here):
        places = _occurrences(passage.added, here)
        if places and not _occurrences(passage.added, old):
            return here[places[0]].first
    return 0


def _bounded(part: Passage, place: int, here: Sequence[Line]) -> bool:
    """Whether a passage without context on a side, since its file begins or ends there, is not just a part of more."""
    end = place + len(part.after)
    starts = bool(part.lead) or place == 0
    return starts and (bool(part.trail) or end == len(here) or _complete_at(part, end - len(part.added), here))


def _replaced(part: Passage, old: Sequence[Line], new: Sequence[Line], here: Sequence[Line]) -> bool:
    """Whether what the change takes away is gone, as far as it takes it away at all."""
    stood, left = len(_occurrences(part.before, old)), len(_occurrences(part.before, new))
    return left >= stood or len(_occurrences(part.before, here)) < stood


def _gone(passage: Passage, old: Sequence[Line], here: Sequence[Line] | None) -> bool:
    """Whether what was taken away is in the file less often than before; nothing was: yes."""
    if not passage.removed:
        return True
    part = passage.trimmed(1)
    return here is None or len(_occurrences(part.before, here)) < len(_occurrences(part.before, old))


def _complete(passage: Passage, here: Sequence[Line]) -> bool:
    """Whether the added lines are whole definitions, and end in `here` where they end in the patch."""
    places = _occurrences(passage.added, here)
    return bool(places) and all(_complete_at(passage, place, here) for place in places)


def _complete_at(passage: Passage, place: int, here: Sequence[Line]) -> bool:
    added, after = passage.added, place + len(passage.added)
    if len(added) < 2 or added[0].key[0] not in {"def", "class", "async", "@"}:
        return False
    ends = after >= len(here) or here[after].indent <= here[place].indent
    return ends and any(line.indent > added[0].indent for line in added)


def _far(path: str, passage: Passage, view: int, pinned: Tree, upstream: Tree) -> Place | None:
    """The passage in another file that changed since the pinned version."""
    suffix = path[path.rfind(".") :]
    part = passage.trimmed(1)
    whole = bool(part.lead and part.trail)
    if len(part.added) < FAR_CHANGED:
        return None
    words = re.findall(r"[A-Za-z_]\w+", " ".join(word for line in part.added for word in line.key))
    needles = [word.encode() for word in sorted(set(words), key=len)[-NEEDLES:]]
    for other in sorted(upstream.texts):
        if other == path or not other.endswith(suffix) or upstream.digests[other] == pinned.digests.get(other):
            continue
        if not all(needle in upstream.texts[other] for needle in needles):
            continue
        here = _views(other, upstream.texts[other])[view]
        then: Sequence[Line] = _views(other, pinned.texts.get(other, b""))[view] or ()
        if here is None:
            continue
        if whole and len(_occurrences(part.after, here)) > len(_occurrences(part.after, then)):
            return Place(other, here[_occurrences(part.after, here)[0]].first)
        if _complete(passage, here) and _occurrences(part.added, here) and not _occurrences(part.added, then):
            return Place(other, here[_occurrences(part.added, here)[0]].first)
    return None


def _occurrences(wanted: Sequence[Line], lines: Sequence[Line]) -> list[int]:
    """Where `wanted` stands in `lines`: equal keys, equal indentation relative to its first line."""
    if not wanted:
        return []
    found = []
    size = len(wanted)
    for start in range(len(lines) - size + 1):
        if lines[start].key != wanted[0].key:
            continue
        depth = lines[start].indent - wanted[0].indent
        if all(
            there.key == line.key and there.indent - line.indent == depth
            for there, line in zip(lines[start : start + size], wanted, strict=True)
        ):
            found.append(start)
    return found


def _keys(lines: Sequence[Line]) -> list[tuple[int, tuple[str, ...]]]:
    base = lines[0].indent if lines else 0
    return [(line.indent - base, line.key) for line in lines]


@lru_cache(maxsize=1024)
def _views(path: str, content: bytes) -> tuple[tuple[Line, ...] | None, tuple[Line, ...] | None]:
    """A file as plain lines and, if it is Python, as logical lines."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None, None
    python = path.endswith(".py")
    logical = python_lines(text) if python else None
    return tuple(plain_lines(text, collapse=not python)), None if logical is None else tuple(logical)
