"""Compare a store with its checkpoint, value by value."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from moetier.errors import StoreError
from moetier.formats import ExpertMatrices
from moetier.store.checkpoint import Checkpoint
from moetier.store.store import Store
from moetier.store.work import Meter, Report, for_each


def check_experts(
    store: Store, checkpoint: Checkpoint, count: int, pool: ThreadPoolExecutor, progress: Report | None
) -> int:
    """Compare `count` random experts of every layer, as they lie on the disk, with the checkpoint; how many those are.

    The first code or scale that differs is a StoreError.
    """
    experts = store.manifest.geometry.experts
    chosen = [
        layer * experts + expert
        for layer in range(len(store.manifest.layers))
        for expert in random.sample(range(experts), min(count, experts))
    ]

    def job(item: int) -> None:
        layer, expert = divmod(item, experts)
        record = np.empty(store.manifest.record_stride, np.uint8)
        store.read_record(layer, expert, record)
        difference = first_difference(store.layout.unpack(record), checkpoint.read_expert(layer, expert))
        if difference is not None:
            entry = store.manifest.layers[layer]
            raise StoreError(
                f"layer {entry.number}, expert {expert}: the store's {difference} differs from the checkpoint's; "
                f"remove {store.path / entry.sums} and run the build again"
            )

    if chosen:
        for_each(pool, chosen, job, Meter("check", len(chosen), progress))
    return len(chosen)


def first_difference(found: ExpertMatrices, wanted: ExpertMatrices) -> str | None:
    """Name and place of the first code or scale that differs, None if all are equal."""
    for matrix in ("gate", "up", "down"):
        for part in ("codes", "scales"):
            differ = np.argwhere(getattr(getattr(found, matrix), part) != getattr(getattr(wanted, matrix), part))
            if differ.size:
                return f"{matrix} {part} at {differ[0].tolist()} ({len(differ)} in all)"
    return None
