"""The trouble of a scenario: provoked once, then gone."""

from __future__ import annotations

from types import TracebackType

from moetier.errors import MoetierError
from tests.remedies.messages import Message


class Trouble:
    """Holds the messages of a scenario (most have one), and what has been shown of them so far.

    As a context manager it expects the MoetierError (or SystemExit with text) that carries a message. `said` takes
    what a command printed. `gone` is called when the advice was followed and the same work succeeded.
    """

    def __init__(self, *messages: Message) -> None:
        self._messages = messages
        self._left = list(messages)
        self.text = ""
        """What was said last."""
        self.solved = False

    @property
    def provoked(self) -> bool:
        """Whether every message has been shown."""
        return not self._left

    def said(self, text: str) -> None:
        """Accept what was printed or logged, if a message of the scenario is in it."""
        shown = [message for message in self._messages if message.pattern.search(text)]
        assert shown, f"expected {[message.template for message in self._messages]!r} in {text!r}"
        self._left = [message for message in self._left if message not in shown]
        self.text = text

    def gone(self) -> None:
        """Record that the advice worked; only after the trouble was seen."""
        assert self.provoked, f"not provoked before it was called gone: {[one.template for one in self._left]!r}"
        self.solved = True

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        assert error is not None, (
            f"expected an error that says {[one.template for one in self._messages]!r}, found none"
        )
        if not isinstance(error, MoetierError | SystemExit | AssertionError) or self.provoked:
            return False
        self.said(str(error))
        return True
