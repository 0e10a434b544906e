"""Errors of the stack: one, or all that a check found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moetier.errors import MoetierError


class StackError(MoetierError):
    """A file of the stack, an index, a wheel or a carry is not what it has to be."""


class CollectedError(StackError):
    """Several at once, so that a person sees all of them in one run."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = f"{len(problems)} errors:\n  " if len(problems) > 1 else ""
        super().__init__(count + "\n  ".join(problems))


class Problems:
    """Collects errors instead of stopping at the first."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, text: str) -> None:
        if text not in self.found:
            self.found.append(text)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A StackError in the block is noted, and the block left."""
        try:
            yield
        except CollectedError as errors:
            for problem in errors.problems:
                self.add(problem)
        except StackError as error:
            self.add(str(error))

    def raise_any(self) -> None:
        """CollectedError if there was one."""
        if self.found:
            raise CollectedError(self.found)
