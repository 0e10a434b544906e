"""Fate of a carry in another version of its project: applies, needs a rebase, landed, partly landed."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from moetier_stack.archive import Tree
from moetier_stack.errors import StackError
from moetier_stack.git import applies
from moetier_stack.landed import Place, landed_runs
from moetier_stack.patch import Hunk, Patch, apply_patches, lines_of

SHOWN_LINES = 30
MARGIN = 2


class State(StrEnum):
    APPLIES = "applies"
    REBASE = "needs a rebase"
    LANDED = "landed"
    PARTLY = "partly landed"
    BLANK = "changes white space only"
    """State of a hunk of which nothing can land."""


@dataclass(frozen=True)
class HunkStatus:
    """A hunk: landed (and where), applies, or in the way of what upstream changed (which is shown)."""

    label: str
    state: State
    places: tuple[Place, ...] = ()
    change: str = ""


@dataclass(frozen=True)
class CarryStatus:
    carry: str
    version: str
    state: State
    hunks: tuple[HunkStatus, ...]
    note: str = ""
    """Note of git where each hunk for itself would apply."""
    moved: bool = False
    """Whether it applies at other lines than it names: git finds them, `stack lock` does not look."""


def carry_status(patch: Patch, data: bytes, pinned: Tree, upstream: Tree, version: str) -> CarryStatus:
    """State of a carry (its patch, and the bytes of the patch) in `upstream`, whose version is `version`.

    CollectedError if the carry does not apply to `pinned`, for which it was cut.
    """
    runs = landed_runs(patch, pinned, upstream)
    texts = {file.path: upstream.texts[file.path] for file in patch.files if file.path in upstream.texts}
    hunks: list[HunkStatus] = []
    for file in patch.files:
        old, new = (
            lines_of(tree.texts.get(file.path, b""), f"{tree.name}: {file.path}") for tree in (pinned, upstream)
        )
        hunks += [_hunk_status(hunk, runs[hunk], old, new) for hunk in file.hunks]
    with tempfile.TemporaryDirectory(prefix="moetier-stack-") as folder:
        objection = applies(Path(folder) / "tree", data, texts)
    state = _state(hunks, objection)
    alone = state is State.REBASE and all(hunk.state is State.APPLIES for hunk in hunks)
    moved = state is State.APPLIES and not _where_it_says(patch, upstream)
    return CarryStatus(patch.id, version, state, tuple(hunks), objection if alone else "", moved)


def _where_it_says(patch: Patch, tree: Tree) -> bool:
    try:
        apply_patches([patch], tree.texts, tree.name)
    except StackError:
        return False
    return True


def _state(hunks: Sequence[HunkStatus], objection: str) -> State:
    states = {hunk.state for hunk in hunks if hunk.state is not State.BLANK}
    if states == {State.LANDED}:
        return State.LANDED
    if State.LANDED in states or State.PARTLY in states:
        return State.PARTLY
    return State.REBASE if objection else State.APPLIES


def _hunk_status(hunk: Hunk, runs: Sequence[Place | None], old: Sequence[str], new: Sequence[str]) -> HunkStatus:
    places = tuple(place for place in runs if place is not None)
    if not runs:
        return HunkStatus(hunk.label, State.BLANK)
    if len(places) == len(runs):
        return HunkStatus(hunk.label, State.LANDED, places)
    if places:
        return HunkStatus(hunk.label, State.PARTLY, places)
    if _stands(hunk.source, new):
        return HunkStatus(hunk.label, State.APPLIES)
    return HunkStatus(hunk.label, State.REBASE, change=_surrounding_change(hunk, old, new))


def _stands(source: Sequence[str], lines: Sequence[str]) -> bool:
    size = len(source)
    return any(tuple(lines[start : start + size]) == tuple(source) for start in range(len(lines) - size + 1))


def _surrounding_change(hunk: Hunk, old: Sequence[str], new: Sequence[str]) -> str:
    """Return what upstream did to the lines that the hunk stands on, as a unified diff of pinned against upstream."""
    if not new:
        return "the file is gone"
    first, last = max(hunk.start - 1, 0), max(hunk.start - 1, 0) + len(hunk.source)
    low, high = max(first - MARGIN, 0), min(last + MARGIN, len(old))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    there = [_mapped(matcher.get_opcodes(), low), _mapped(matcher.get_opcodes(), high)]
    diff = difflib.unified_diff(old[low:high], new[there[0] : there[1]], "pinned", "upstream", n=MARGIN)
    lines = [line.rstrip("\n") for line in diff][2:]
    more = [f"... {len(lines) - SHOWN_LINES} more lines"] if len(lines) > SHOWN_LINES else []
    return "\n".join(lines[:SHOWN_LINES] + more)


def _mapped(opcodes: Sequence[tuple[str, int, int, int, int]], index: int) -> int:
    """Where a line of the old file is in the new one."""
    for kind, a, b, c, d in opcodes:
        if a <= index < b or (index == b and b == opcodes[-1][2]):
            return min(c + (index - a), d) if kind == "equal" else (c if index == a else d)
    return opcodes[-1][4] if opcodes else 0
