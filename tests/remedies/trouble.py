"""The trouble of a scenario: provoked once, then gone."""

from __future__ import annotations

from types import TracebackType

from moetier.errors import MoetierError
from tests.remedies.messages import Message


class Trouble:
    """Holds the message of a scenario, and what has been shown of it so far.

    As a context manager it expects the MoetierError (or SystemExit with text) that carries the message. `said` takes
    what a command printed. `gone` is called when the advice was followed and the same work succeeded.
    """

    def __init__(self, message: Message) -> None:
        self.message = message
        self.provoked = False
        self.solved = False

    def said(self, text: str) -> None:
        """Accept what was printed or logged, if the message is in it."""
        assert self.message.pattern.search(text), f"expected {self.message.template!r} in {text!r}"
        self.provoked = True

    def gone(self) -> None:
        """Record that the advice worked; only after the trouble was seen."""
        assert self.provoked, "the message was not provoked before it was called gone"
        self.solved = True

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        assert error is not None, f"expected an error that says {self.message.template!r}, found none"
        if not isinstance(error, MoetierError | SystemExit | AssertionError) or self.provoked:
            return False
        self.said(str(error))
        return True
