"""A demo stack per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.project import FILES, Demo, Release, serving


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    """The demo project 1.0 on an index, and no carry yet."""
    release = Release()
    release.add("1.0", FILES)
    with serving(release) as index:
        yield Demo(tmp_path, release, index)
