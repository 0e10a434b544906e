"""Whether a store and a checkpoint belong together: by what both are known by, and by the experts themselves."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import numpy as np

from moetier.errors import StoreError
from moetier.store.checkpoint import Checkpoint
from moetier.store.store import Store
from moetier.store.work import Meter, Report, Workers, default_threads

logger = logging.getLogger(__name__)

EACH = 2
"""Experts of each layer that a start compares..."""
SECONDS = 5.0
"""...but only one of each if that takes longer than this."""
LIMIT_SECONDS = 20.0
"""From here on layers are left out, which is said: a slow disk must not keep a server from starting."""
THREADS = 2
"""At a start: each needs the room of a few experts, beside all that is being loaded."""


def open_store(path: str | Path, checkpoint: Checkpoint) -> Store:
    """Open the store at `path` for a checkpoint; StoreError where it was built from another one."""
    store = Store.open(path)
    known = store.manifest.checkpoint.identities
    if values := checkpoint.identities.differs(known):
        store.close()
        raise StoreError(
            f"{path} was built from another checkpoint: expected identity {values[0]}, found {values[1]}; build one "
            f"for this checkpoint with `moetier store build {quote(str(checkpoint.path))} OUT` into another folder"
        )
    if not checkpoint.identities.certain_of(known):
        old = path if known.sampled is None else checkpoint.path
        again = "" if known.sampled is None else " --trim OTHER_FOLDER"
        logger.warning(
            "moetier: %s was written by an older moetier, which knew a checkpoint by its headers only: those are the "
            "same, as a fine-tune's would be; `moetier store build WHOLE_CHECKPOINT %s%s` compares every expert and "
            "records more",
            old,
            path,
            again,
        )
    return store


@dataclass(frozen=True)
class Comparison:
    """Report of a comparison: so many experts of so many layers; `skipped` are the numbers of the layers left out."""

    experts: int
    layers: int
    skipped: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        left_out = f"; too slow, not compared: layers {', '.join(map(str, self.skipped))}" if self.skipped else ""
        return (
            f"{self.experts} experts of {self.layers} layers compared with the checkpoint's in {self.seconds:.1f} s: "
            f"equal{left_out}"
        )


def compare_some(
    store: Store, checkpoint: Checkpoint, each: int = EACH, seconds: float = SECONDS, limit: float = LIMIT_SECONDS
) -> Comparison | None:
    """Compare a few random experts of each layer with the checkpoint, bit for bit; None where it has none (trimmed).

    StoreError names the first that differs.
    """
    if checkpoint.origin is not None:
        return None
    begun = time.monotonic()
    comparer = _Comparer(store, checkpoint)
    layers = random.sample(range(len(store.manifest.layers)), len(store.manifest.layers))
    chosen = {layer: random.sample(range(comparer.experts), min(each, comparer.experts)) for layer in layers}
    compared: set[int] = set()
    count = 0
    with Workers(THREADS, "moetier-compare") as pool:
        for at in range(min(each, comparer.experts)):
            for some in _batched(layers):
                if time.monotonic() - begun > (min(seconds, limit) if at else limit):
                    break
                items = [layer * comparer.experts + chosen[layer][at] for layer in some]
                pool.map(comparer.compare, items)
                compared |= set(some)
                count += len(some)
    skipped = sorted(store.manifest.layers[layer].number for layer in set(layers) - compared)
    return Comparison(count, len(compared), tuple(skipped), time.monotonic() - begun)


def compare_all(
    store: Store, checkpoint: Checkpoint, threads: int | None = None, progress: Report | None = None
) -> int:
    """Compare every expert with the checkpoint; how many. StoreError names the first that differs."""
    comparer = _Comparer(store, checkpoint)
    total = len(store.manifest.layers) * comparer.experts
    with Workers(threads or default_threads(), "moetier-compare") as pool:
        pool.map(comparer.compare, range(total), Meter("compare", total, progress))
    return total


def _batched(layers: list[int]) -> Iterable[tuple[int, ...]]:
    return (tuple(layers[at : at + THREADS]) for at in range(0, len(layers), THREADS))


class _Comparer:
    """Builds records from the checkpoint and holds them against the store's checksums.

    Every read of the store is held against those too, so a record that is bad on the disk is not this check's business.
    """

    def __init__(self, store: Store, checkpoint: Checkpoint) -> None:
        checkpoint.require_experts()
        self.store, self.checkpoint = store, checkpoint
        self.experts = store.manifest.geometry.experts
        by_number = {layer.number: index for index, layer in enumerate(checkpoint.moe_layers)}
        self._source = [by_number.get(layer.number) for layer in store.manifest.layers]
        self._local = threading.local()

    def compare(self, item: int) -> None:
        """Compare one expert: item counts experts over all layers of the store."""
        layer, expert = divmod(item, self.experts)
        number, source = self.store.manifest.layers[layer].number, self._source[layer]
        if source is None:
            raise StoreError(
                f"layer {number}: {self.store.path} has it and {self.checkpoint.path} does not; " + self._remedy()
            )
        if not hasattr(self._local, "record"):
            self._local.record = np.empty(self.store.layout.stride, np.uint8)
        record = self._local.record
        self.store.layout.pack(self.checkpoint.read_expert(source, expert), record)
        if wrong := self.store.problem(layer, expert, record):
            raise StoreError(
                f"layer {number}, expert {expert}: the store {self.store.path} holds other weights than the checkpoint "
                f"{self.checkpoint.path}, whose record has {wrong}; " + self._remedy()
            )

    def _remedy(self) -> str:
        return (
            "the checkpoint was changed after the store was built, or never was the store's: build its store with "
            f"`moetier store build {quote(str(self.checkpoint.path))} OUT --check 4` into another folder, or restore "
            "the checkpoint"
        )
