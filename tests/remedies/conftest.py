"""The fixture `trouble`: a test marked @remedy provokes the message that it names, and finds the trouble gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remedies.messages import find
from tests.remedies.places import Place
from tests.remedies.stacks import polite, stack
from tests.remedies.trouble import Trouble
from tests.stack.conftest import demo as demo
from tests.stack.project import Demo


@pytest.fixture
def trouble(request: pytest.FixtureRequest) -> Iterator[Trouble]:
    """The trouble of the messages that the test's marks `remedy(path, part of the template)` name."""
    marks = list(request.node.iter_markers("remedy"))
    assert marks, "a test that takes `trouble` is marked with @remedy(path, part)"
    trouble = Trouble(*(find(*mark.args) for mark in marks))
    yield trouble
    assert trouble.solved, "the scenario ended without trouble.gone()"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A folder with a checkpoint in it, for scenarios of `moetier store`."""
    place = Place(tmp_path)
    place.make()
    return place


@pytest.fixture
def locked(demo: Demo) -> Demo:
    """The demo stack with one carry, locked."""
    polite(demo)
    stack(demo, "lock")
    return demo
