"""Every message that tells its reader what to do is tried by a scenario of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.remedies.messages import find, messages


def test_the_walk_finds_messages() -> None:
    assert len(messages()) > 200
    assert find("store/manifest.py", "is no store").pattern.search(
        "/tmp/x is no store: expected store.json in it, found none; make it with `moetier store build CHECKPOINT OUT` "
        "(one that was interrupted resumes)"
    )


def test_every_message_is_tried(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if item.path.parent == Path(__file__).parent]
    missing = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {item.path.name for item in items}
    if missing:
        pytest.skip(f"wants all scenarios: {', '.join(sorted(missing))} were not collected")
    left = set(messages()) - {find(*mark.args[:2]) for item in items for mark in item.iter_markers("remedy")}
    listed = "\n".join(f"{m.path}:{m.line}: {m.template}" for m in sorted(left, key=lambda m: (m.path, m.line)))
    assert not left, f"{len(left)} messages tell what to do, and no scenario of tests/remedies does it:\n{listed}"
