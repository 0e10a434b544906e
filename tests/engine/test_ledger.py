"""The staging slots have one writer, and who breaks that is told at once."""

from __future__ import annotations

import pytest

from moetier.engine.hybrid.ledger import StagingLedger, Writer

STAGING = range(10, 14)


def test_a_step_that_may_be_a_graph_is_the_device_s() -> None:
    ledger = StagingLedger(STAGING)
    ledger.begin_step(replayed=True)
    ledger.host_takes()  # a call that runs in Python after all
    with pytest.raises(AssertionError, match="would be copied while a graph may use the staging slots"):
        ledger.ahead(3)
    ledger.device_takes()
    ledger.end_step()
    assert ledger.writer is Writer.DEVICE


def test_a_step_that_the_host_drives_copies_ahead_of_one_layer_at_a_time() -> None:
    ledger = StagingLedger(STAGING)
    ledger.begin_step(replayed=False)
    with pytest.raises(AssertionError, match="copies only what it has taken"):
        ledger.ahead(0)
    ledger.host_takes()
    ledger.ahead(0)
    assert ledger.coming == 0
    with pytest.raises(AssertionError, match="on their way for another call"):
        ledger.ahead(1)
    for change in (ledger.device_takes, ledger.end_step, lambda: ledger.begin_step(replayed=True)):
        with pytest.raises(AssertionError, match="on their way for layer 0"):
            change()
    ledger.called()
    ledger.device_takes()
    ledger.end_step()


def test_behind_the_model_s_layers_nothing_is_copied_ahead() -> None:
    """A drafter follows, whose passes may be graphs."""
    ledger = StagingLedger(STAGING)
    ledger.begin_step(replayed=False)
    ledger.end_step()
    ledger.host_takes()
    with pytest.raises(AssertionError, match="while a graph may use"):
        ledger.ahead(0)


def test_the_host_gives_the_slots_back_before_the_next_step() -> None:
    ledger = StagingLedger(STAGING)
    ledger.host_takes()
    with pytest.raises(AssertionError, match="over the end of a step"):
        ledger.begin_step(replayed=True)


def test_every_copy_is_looked_at_where_that_is_asked_for() -> None:
    ledger = StagingLedger(STAGING, check=True)
    with pytest.raises(AssertionError, match="the host fills slot 11, which the device may write"):
        ledger.copied(11)
    ledger.host_takes()
    ledger.copied(11)
    with pytest.raises(AssertionError, match="slot 14 is no staging slot"):
        ledger.copied(14)
    StagingLedger(STAGING).copied(99)
