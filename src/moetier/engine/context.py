"""State that the layers of a model share in a step: the engine's words about it, and who listens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moetier.engine.recording import Call, Recorder
from moetier.tiers.step import UNKNOWN, Step
from moetier.trace.record import TraceWriter


class Sampler(Protocol):
    """Who looks at some calls."""

    wanted: bool
    """Whether it takes the next call."""

    def sample(self, call: Call) -> None:
        """Take a call that was computed; its arrays are the caller's, and change once this returns."""


@dataclass
class Context:
    """One a model. The engine's side sets `step` and `real` before a forward."""

    step: Step = UNKNOWN
    real: bool = True
    """False while the engine warms up on made-up tokens: nothing is counted then, and nothing learnt or recorded."""
    recorder: Recorder | None = None
    trace: TraceWriter | None = None
    sampler: Sampler | None = None

    def close(self) -> None:
        """Close the recordings."""
        for listener in (self.recorder, self.trace):
            if listener is not None:
                listener.close()
