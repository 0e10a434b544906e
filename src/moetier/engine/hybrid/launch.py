"""A step that the engine is about to launch, in two numbers that are not the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """scheduled: tokens of the model's own forward, by which the engine chooses a graph for it, or none.

    live: the most rows of any forward of the step that may be real: a drafter's, too, whose passes have sizes of their
    own. What follows in a graph padded to more is not computed. drafts: whether forwards of a drafter may follow.
    """

    scheduled: int
    live: int
    drafts: bool = False

    @classmethod
    def plain(cls, tokens: int) -> Launch:
        """A step without a drafter: all that is scheduled is real, and nothing else is."""
        return cls(tokens, tokens)
