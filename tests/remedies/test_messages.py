"""Every message that tells its reader what to do is tried by a scenario of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.remedies.messages import Message, find, messages


def tried() -> Iterator[Message]:
    """Yield the message of every mark `remedy(path, part)` of this folder's tests and of their rows."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for name, test in vars(import_module(f"tests.remedies.{path.stem}")).items():
            if name.startswith("test_"):
                yield from (find(*mark.args) for mark in _marks(test) if mark.name == "remedy")


def _marks(test: Any) -> Iterator[Any]:
    for mark in getattr(test, "pytestmark", ()):
        yield mark
        if mark.name == "parametrize":
            for row in mark.args[1]:
                yield from getattr(row, "marks", ())


def test_the_walk_finds_messages() -> None:
    assert len(messages()) > 200
    assert find("store/manifest.py", "is no store").pattern.search(
        "/tmp/x is no store: expected store.json in it, found none; make it with `moetier store build CHECKPOINT OUT` "
        "(one that was interrupted resumes)"
    )


def test_every_scenario_names_a_message() -> None:
    assert len(set(tried())) > 200
