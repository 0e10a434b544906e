"""Whatever stops the device leaves its words, and the traceback where it was ours."""

from __future__ import annotations

import logging
import queue
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the device tier wants torch")

from moetier.engine.hybrid.helper import Helper
from moetier.errors import MoetierError, RecordReadError


class Mailbox:
    """The device's end: requests are put into it, and what came of them is taken out."""

    def __init__(self) -> None:
        self.requests: queue.Queue[Any] = queue.Queue()
        self.ends: queue.Queue[tuple[str, int]] = queue.Queue()
        self.alone = 0

    def await_help(self, milliseconds: int) -> Any:
        try:
            return self.requests.get(timeout=milliseconds / 1e4)
        except queue.Empty:
            return None

    def counts(self) -> tuple[int, ...]:
        return (0, 0, 0, self.alone)

    def answer(self, request: Any) -> None:
        self.ends.put(("answered", request.number))

    def refuse(self, request: Any) -> None:
        self.ends.put(("refused", request.number))


def helping(error: Exception | None) -> Any:
    def help_with(request: Any, _mailbox: Any) -> None:
        if error is not None:
            raise error

    return SimpleNamespace(index=3, help=help_with)


def run(
    error: Exception | None, layer: int = 3, alone: int = 0, **mail: int
) -> tuple[tuple[str, int] | None, list[MoetierError]]:
    """What came of a request, or of none where the mailbox says that the device is late; and what was said."""
    mailbox: Any = Mailbox()
    mailbox.alone = alone
    said: list[MoetierError] = []
    box: Any = SimpleNamespace(late=0, refused=0)
    helper = Helper(mailbox, box, [helping(error)], 60, said.append)
    end = None
    if mail:
        vars(box).update(mail)
    else:
        mailbox.requests.put(SimpleNamespace(number=7, layer=layer))
        end = mailbox.ends.get(timeout=60)
    helper.stop()
    helper.join()
    return end, said


def test_a_request_that_can_be_answered() -> None:
    assert run(None) == (("answered", 7), [])


def test_a_record_that_cannot_be_had_says_so() -> None:
    error = RecordReadError("layer 1, expert 2: Input/output error")
    assert run(error) == (("refused", 7), [error])


@pytest.mark.parametrize("layer", [3, 4], ids=["raised", "no such layer"])
def test_a_fault_of_ours_keeps_its_traceback(layer: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        end, (said,) = run(ValueError("a slip"), layer)
    assert end == ("refused", 7)
    assert "a fault of moetier: " + ("ValueError('a slip')" if layer == 3 else "KeyError(4)") in str(said)
    assert "Traceback" in caplog.text


def test_a_device_that_waited_too_long(capfd: pytest.CaptureFixture[str]) -> None:
    end, (said,) = run(None, late=9)
    assert end is None
    assert "did not answer the device within 60 s (request 9)" in str(said)


def test_a_kernel_that_refused() -> None:
    assert "refused request 9" in str(run(None, late=9, refused=9)[1][0])


def test_requests_that_were_answered_alone_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert run(None, alone=2) == (("answered", 7), [])
    assert [record.getMessage() for record in caplog.records if "answered from disk alone" in record.getMessage()] == [
        "2 requests of the device got no help for 2000 ms and were answered from disk alone, with the same bits: "
        "most likely a thread kept Python's lock while it waited for the device"
    ]
