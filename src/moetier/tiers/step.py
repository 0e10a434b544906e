"""The engine's words about a step, as far as caching cares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One forward of the model."""

    sequences: int = 0
    """Requests in the step; 0: the engine does not say."""
    prefill: bool = False
    """Whether a prompt, or a chunk of one, is in it. Then nearly every expert is routed to, and that says little about
    what the running sequences need: policies learn nothing from it."""

    @classmethod
    def of(cls, tokens_and_drafts: Iterable[tuple[int, int]]) -> Step:
        """The step of requests with so many tokens, of which so many are drafts that the step verifies.

        A request that decodes has one token besides its drafts; one with more is in its prompt.
        """
        requests = list(tokens_and_drafts)
        return cls(len(requests), any(tokens > drafts + 1 for tokens, drafts in requests))


UNKNOWN = Step()
"""Where no engine says anything: every step counts as decode, and every pair as a use."""
