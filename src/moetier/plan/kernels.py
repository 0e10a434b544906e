"""Time of the experts of one layer call on the device: the kernels that so many tokens are given to.

Three kinds (kernels/cuda): one launch for one token (one.cu); for a few, launches that read an expert once for GROUP of
its pairs (decode.cu); for more than FEW_PAIRS pairs, tiles of TILE pairs of one expert (prefill.cu), which unpack its
weights once a tile and multiply STEP pairs at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moetier.plan.costs import Costs
from moetier.plan.geometry import Geometry
from moetier.plan.workload import routed

FEW_PAIRS, GROUP, TILE, STEP = 128, 8, 128, 16
"""MAX_PAIRS and GROUP of kernels/cuda/decode.py; the panels of path.py there on Hopper, 48 pairs elsewhere."""


def device_seconds(geometry: Geometry, costs: Costs, chances: NDArray[np.float64], rows: float, ranks: int) -> float:
    """Seconds of one layer call of `rows` tokens for the experts on the device, the hybrid step's own part included.

    chances: float64 [N], of each of these experts, that a token is routed to it. Which kernels run depends on all of a
    call's pairs, those of missed experts too.
    """
    touched = float(routed(chances, rows).sum())
    if not touched:
        return 0.0
    read = geometry.record_bytes / ranks / costs.gpu_rate.value
    if rows <= 1:
        return costs.one.value + costs.begin.value + touched * read / costs.one_share.value
    pairs = rows * chances
    if rows * geometry.top_k <= FEW_PAIRS:
        groups = passes(chances, rows, GROUP) + costs.few_pair.value * float(pairs.sum())
        return costs.few.value + groups * read / costs.few_share.value
    pair = 6 * geometry.hidden * geometry.intermediate / ranks / (costs.gpu_ops.value * costs.ops_share.value)
    steps = STEP * touched + float(np.maximum(pairs - STEP / 2, 0.0).sum())  # pairs, each expert's padded to STEP
    multiplied = (costs.tile.value * passes(chances, rows, TILE) + steps) * pair
    return costs.few.value + max(multiplied, touched * read / costs.few_share.value)


def record_seconds(geometry: Geometry, costs: Costs, pairs: float, rows: float, ranks: int) -> float:
    """Seconds that one more expert, of so many pairs, adds to a layer call of a few tokens."""
    read = geometry.record_bytes / ranks / costs.gpu_rate.value
    if rows <= 1:
        return read / costs.one_share.value
    return (1 + costs.few_pair.value * pairs) * read / costs.few_share.value


def passes(chances: NDArray[np.float64], rows: float, size: int) -> float:
    """The mean of all experts' pairs over `size`, each rounded up, where the experts are picked with these chances [N].

    That an expert has more than one `size` of pairs is taken from a normal law (its logistic likeness).
    """
    mean = rows * chances
    deviation = np.sqrt(np.maximum(mean * (1 - chances), 1e-12))
    most = int(np.ceil(np.max(np.minimum(mean + 4 * deviation, np.ceil(rows))) / size))
    over = size * np.arange(1, most)[:, None] + 0.5
    return float(routed(chances, rows).sum() + (0.5 + 0.5 * np.tanh(0.851 * (mean - over) / deviation)).sum())
