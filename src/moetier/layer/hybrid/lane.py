"""A stream for copies beside the one that computes; on a device without streams (a CPU) they happen at once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Mark = torch.cuda.Event | None
"""A point of a stream; None where everything before it is done already."""


class Lane:
    """Copies to `device`, in the order they are asked for, ordered against compute by marks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`source`, in memory that the device can read, stays as it is until a mark that comes after."""
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def upload(self, values: NDArray[np.int32]) -> torch.Tensor:
        """A small array that compute will use."""
        tensor = torch.from_numpy(values)
        if self._stream is None:
            return tensor.clone()
        with torch.cuda.stream(self._stream):
            there = tensor.pin_memory().to(self._device, non_blocking=True)
        there.record_stream(torch.cuda.current_stream(self._device))
        return there

    def after(self, mark: Mark) -> None:
        """What is copied from now on waits for `mark` of the computing stream."""
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
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def compute_after(self, mark: Mark) -> None:
        """What the current stream is given from now on waits for `mark`."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)
