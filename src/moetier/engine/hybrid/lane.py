"""A stream for copies beside the one that computes; on a device without streams (a CPU) they happen at once."""

from __future__ import annotations

import torch

from moetier.tiers.link import copy_to_device

Mark = torch.cuda.Event | None
"""A point of a stream; None where everything before it is done already."""


class Lane:
    """Copies to `device`, in the order they are asked for, ordered against compute by marks."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._index = -1 if self._stream is None else self._stream.device_index
        """As a number, the device's current stream is found several times faster."""

    @property
    def captures(self) -> bool:
        """Whether what the current stream is given goes into a graph, and nothing runs."""
        return self._stream is not None and torch.cuda.is_current_stream_capturing()

    def copy(self, target: int, source: int, size: int) -> None:
        """`size` bytes between addresses; those at `source` stay as they are until a mark that comes after."""
        copy_to_device(target, source, size, self._stream)

    def after(self, mark: Mark) -> None:
        """Let all copies from now on wait for `mark` of the computing stream."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    def mark(self) -> Mark:
        """Behind the copies so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self) -> None:
        """On the host, for the copies so far."""
        if self._stream is not None:
            self._stream.synchronize()

    def compute_mark(self) -> Mark:
        """Behind what the current stream was given so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._index).record_event()

    def compute_after(self, mark: Mark) -> None:
        """Let the current stream wait for `mark` from now on."""
        if mark is not None:
            torch.cuda.current_stream(self._index).wait_event(mark)
