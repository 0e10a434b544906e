"""Who writes the staging slots: at every moment either the host's lane or the device, never both.

The staging slots are one ring for all layers. Two may fill it:

- the **device**: a call that it plans by itself copies records into them while it runs. It may be part of a captured
  graph, of the model or of a drafter; when that is replayed no code of ours runs, so the ring must be the device's
  already.
- the **host**: the `Streamer` has a lane copy records into them for calls that it drives. It may begin early, while the
  layer before still computes, but only in a step of which the engine can replay no graph before that call.

    begin_step(replayed=True)   device ............................................................. end_step
                                  |  a call that runs in Python takes the ring, and has given all
                                  +--> host: start .. finish -->  of it to compute when it returns

    begin_step(replayed=False)  device  --ahead(first layer)-->  host: call, ahead(next), call, ... -->  end_step
                                                                 (nothing is on its way behind the last layer)

    drafts                      device: the drafter's passes have sizes of their own, so any of them may be a graph

What is on its way for a coming call (`ahead`) is the only thing that outlives a call, so it is what this object guards.
"""

from __future__ import annotations

from enum import Enum


class Writer(Enum):
    """Who may copy into the staging slots."""

    DEVICE = "the device, which plans its calls"
    HOST = "the host's lane"


class StagingLedger:
    """Kept by the streamer; asserts its invariant at every change.

    check: also at every copy, and at the beginning and end of each step.
    """

    def __init__(self, staging: range, check: bool = False) -> None:
        self.staging, self.check = staging, check
        self.writer = Writer.DEVICE
        self.replayed = False
        """Whether the step may be a graph, of which the host sees no call."""
        self.copies = 0
        """That the host made so far."""
        self._coming: int | None = None

    @property
    def coming(self) -> int | None:
        """The layer for whose next call records are on their way."""
        return self._coming

    def begin_step(self, replayed: bool) -> None:
        """The device has the ring, and keeps it up to the end where the step may be `replayed`."""
        assert self._coming is None, f"records are on their way for layer {self._coming}: forget them first"
        assert self.writer is Writer.DEVICE, "the host kept the staging slots over the end of a step"
        self.replayed = replayed

    def end_step(self) -> None:
        """The model's layers are launched; a drafter's may follow, and may be graphs."""
        assert self._coming is None, f"records are on their way for layer {self._coming}, which this step did not call"
        self.replayed = True

    def host_takes(self) -> None:
        """Wait for what compute was given so far; from now on the lane writes."""
        self.writer = Writer.HOST

    def ahead(self, layer: int) -> None:
        """The lane is about to copy records for the coming call of `layer`."""
        assert not self.replayed, f"records of layer {layer} would be copied while a graph may use the staging slots"
        assert self.writer is Writer.HOST, "the host copies only what it has taken"
        assert self._coming is None, "records are on their way for another call: forget them first"
        self._coming = layer

    def called(self) -> None:
        """The call came, or will not: nothing is on its way for a coming one."""
        self._coming = None

    def copied(self, slot: int) -> None:
        """The lane is about to fill `slot`."""
        self.copies += 1
        if self.check:
            assert self.writer is Writer.HOST, f"the host fills slot {slot}, which the device may write"
            assert slot in self.staging, f"slot {slot} is no staging slot"

    def device_takes(self) -> None:
        """Compute waits for what the lane has copied; from now on calls that the device plans write."""
        assert self._coming is None, f"records are on their way for layer {self._coming}: forget them first"
        self.writer = Writer.DEVICE
