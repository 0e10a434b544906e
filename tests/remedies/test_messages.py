"""The walk finds the messages that tell their reader what to do."""

from __future__ import annotations

from tests.remedies.messages import find, messages


def test_the_walk_finds_messages() -> None:
    assert len(messages()) > 200
    assert find("store/manifest.py", "is no store").pattern.search(
        "/tmp/x is no store: expected store.json in it, found none; make it with `moetier store build CHECKPOINT OUT` "
        "(one that was interrupted resumes)"
    )
