"""docs/upstream.md: for every carry, what becomes of it in every version that is watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from moetier_stack.definition import Carry
from moetier_stack.errors import Problems
from moetier_stack.index import versions
from moetier_stack.status import CarryStatus, State, carry_status
from moetier_stack.workspace import Workspace

HEAD = """# Carries and upstream

Written by `moetier stack status`; do not edit. A carry is a patch on a pinned version, and its end state is that it is
gone. [stack.md](stack.md) says what the states mean and how they are found.
"""


def statuses(space: Workspace, version: Version | None, say: Callable[[str], None]) -> list[CarryStatus]:
    """State of every carry against one version, or (None) against every watched one, oldest first.

    CollectedError if a carry does not apply to its pinned source.
    """
    found: list[CarryStatus] = []
    problems = Problems()
    for name, source in space.definition.sources.items():
        carries = [carry for carry in space.definition.carries if carry.target == name]
        if not carries:
            continue
        pinned = space.pinned_tree(name)
        for against in [version] if version is not None else watched(space, name):
            say(f"{source.project} {against}")
            is_pinned = str(against) == space.lock.sources[name].version
            tree = pinned if is_pinned else space.release_tree(source, against)
            for carry in carries:
                with problems.collecting():
                    patch, data = space.patch(carry.id), space.patch_bytes(carry.id)
                    found.append(carry_status(patch, data, pinned, tree, str(against)))
    problems.raise_any()
    return found


def watched(space: Workspace, name: str) -> list[Version]:
    """Released versions that a source watches, and the pinned one."""
    source = space.definition.sources[name]
    files = space.index(source.index).files(source.project)
    found = versions(files, lambda file: file.tags is None, SpecifierSet(source.watch))
    return sorted({*found, Version(space.lock.sources[name].version)})


def advice(status: CarryStatus, pinned: str) -> str:
    """Return what to do about a carry, in a few words."""
    if status.version == pinned:
        return "pinned"
    if Version(status.version) < Version(pinned):
        return "older than the pin"
    rebase = f"moetier stack rebase {status.carry} --onto {status.version}"
    if status.moved:
        return f"before you move there, as its lines moved: {rebase}"
    return {
        State.LANDED: "drop the carry when you move there",
        State.PARTLY: f"drop what landed: {rebase}",
        State.REBASE: f"before you move there: {rebase}",
    }.get(status.state, "nothing to do")


def document(space: Workspace, found: Sequence[CarryStatus]) -> str:
    """The text of docs/upstream.md."""
    carries = space.definition.carries
    return "\n".join([HEAD, *(_section(space, c, [one for one in found if one.carry == c.id]) for c in carries)])


def _section(space: Workspace, carry: Carry, found: Sequence[CarryStatus]) -> str:
    source, pinned = space.definition.sources[carry.target], space.lock.sources[carry.target].version
    upstream = f"<{carry.upstream}>" if carry.upstream.startswith("https://") else carry.upstream
    users = [f"`{name}`" for name, profile in space.definition.profiles.items() if carry.id in profile.carries]
    lines = [
        f"## {carry.id}",
        "",
        f"- on {source.project} {pinned}, scope {carry.scope}, in {', '.join(users) or 'no profile'}",
        f"- why: {carry.why}",
        f"- evidence: {carry.evidence}",
        f"- upstream: {upstream}",
        f"- dropped when: {carry.drop_when}",
        "",
        f"| {source.project} | state | |",
        "| --- | --- | --- |",
        *(f"| {status.version} | {status.state} | {advice(status, pinned)} |" for status in found),
    ]
    for status in found:
        lines += _details(status)
    return "\n".join([*lines, ""])


def _details(status: CarryStatus) -> list[str]:
    """Hunks that do not just apply."""
    lines = []
    for hunk in status.hunks:
        if hunk.state is State.REBASE:
            lines += ["", f"{status.version}: {hunk.label} needs a rebase. Upstream changed:", "", "```diff"]
            lines += [line.rstrip() for line in hunk.change.split("\n")] + ["```"]
        elif hunk.places:
            where = ", ".join(f"{place.path}:{place.line}" for place in hunk.places)
            lines += ["", f"{status.version}: {hunk.label} {hunk.state} at {where}."]
    if status.note:
        lines += ["", f"{status.version}: git says: {status.note}"]
    return lines
