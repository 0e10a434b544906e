"""The fixture `trouble`: a test marked @remedy provokes the message that it names, and finds the trouble gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.remedies.messages import find
from tests.remedies.trouble import Trouble


@pytest.fixture
def trouble(request: pytest.FixtureRequest) -> Iterator[Trouble]:
    """The trouble of the message that the test's mark `remedy(path, part of the template)` names."""
    mark = request.node.get_closest_marker("remedy")
    assert mark is not None, "a test that takes `trouble` is marked with @remedy(path, part)"
    trouble = Trouble(find(*mark.args))
    yield trouble
    assert trouble.solved, "the scenario ended without trouble.gone()"
