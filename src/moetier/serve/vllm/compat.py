"""What we change in vLLM while it runs, each with the reason; its names that are not public are used here alone.

Written against vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def seeds_rest(runner: Any) -> Iterator[None]:
    """Keep the generators of requests whose token of this step is thrown away, since their prompt goes on.

    vLLM samples for them too, then takes the draw back by the generator's offset, which a CPU's does not have: the
    engine dies ("CPU Generator does not use offset"). Without a generator they are sampled by the common one and
    nothing has to be taken back: a seeded answer depends on the seed, however the prompt was cut into steps.
    """
    batch = runner.input_batch
    thrown_away = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
    kept = {row: batch.generators.pop(row) for row in thrown_away.tolist() if row in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(kept)
