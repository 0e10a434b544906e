"""A forked child and its parent's threads: what would wait for them is refused, all else goes on and ends."""

import pytest

from tests.forking import said_by_children
from tests.kernels.forks import ALLOWED, REFUSED


@pytest.mark.parametrize("case", REFUSED)
def test_a_child_is_told_that_it_has_no_threads(case: str) -> None:
    assert said_by_children("-m", "tests.kernels.forks", case) == {
        "the thread pool was made before a fork; make one in this process"
    }


@pytest.mark.parametrize("case", ALLOWED)
def test_a_child_can_make_its_own_and_drop_its_parents(case: str) -> None:
    assert said_by_children("-m", "tests.kernels.forks", case) == {"done"}
