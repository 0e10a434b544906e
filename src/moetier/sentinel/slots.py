"""The device slots that a sentinel looks after: their bytes, copied back on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from moetier.engine.hybrid.layer import HybridLayer
from moetier.engine.model import IntegrityError, TieredModel
from moetier.tiers.slots import ABSENT


class WatchedSlots:
    """The slots of a model's layers, which may grow. On a CPU device copies happen at once."""

    def __init__(self, tiers: TieredModel, layers: Sequence[HybridLayer], device: torch.device) -> None:
        self._tiers, self._layers = tiers, layers
        on_device = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_device else None  # type: ignore[no-untyped-call]
        self._lock = Lock()  # the engine's thread cures while the sentinel's looks
        self._host = torch.zeros(tiers.part.bytes, dtype=torch.uint8, pin_memory=on_device)
        """A record as the store's checksums take it: what slots leave out of its padding is zeros."""

    def experts(self) -> Iterator[tuple[int, int]]:
        """Yield index of the layer and expert of each slot that is live."""
        for layer in self._layers:
            for expert in layer.slots.live:
                yield layer.index, int(expert)

    def problem(self, index: int, expert: int) -> str | None:
        """Say what is wrong with the bytes of a slot, "" for nothing; None where it was refilled meanwhile."""
        slots = self._layer(index).slots
        slot, fills = int(slots.mirror[expert]), slots.fills
        if slot == ABSENT:
            return None
        bytes_ = min(self._host.numel(), slots.slots.shape[1])
        with self._lock:
            with torch.cuda.stream(self._stream):  # None: no stream, and nothing to wait for
                self._host[:bytes_].copy_(slots.slots[slot, :bytes_], non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()
            if slots.fills != fills:
                return None
            return self._tiers.store.problem(index, expert, self._host.numpy(), self._tiers.part.first)

    def cure(self, index: int, expert: int, right: NDArray[np.uint8]) -> str:
        """Put the `right` bytes into a resident's slot, or take a spare one out of service; which of them, in words.

        Between steps, with the compute stream current. IntegrityError where the slot does not hold what is written.
        """
        slots = self._layer(index).slots
        if expert not in slots.resident:
            slots.quarantine(expert)
            return "the slot is not used any more"
        slots.rewrite(expert, torch.from_numpy(right))
        if self._stream is not None:
            torch.cuda.current_stream(slots.device).synchronize()
        if wrong := self.problem(index, expert):
            number = self._tiers.store.manifest.layers[index].number
            raise IntegrityError(
                f"layer {number}, expert {expert}: its device slot was written again and still has {wrong}: the "
                "device's memory is at fault; test it before it serves again"
            )
        return "it was written again, and is right now"

    def _layer(self, index: int) -> HybridLayer:
        return next(layer for layer in self._layers if layer.index == index)
