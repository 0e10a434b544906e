"""vLLM's worker on a GPU, telling the tiers of each step."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from moetier.vllm.fixed import FixedWeights
from moetier.vllm.queues import fit_queues
from moetier.vllm.steps import StepAware


class MoetierGpuWorker(FixedWeights, StepAware, Worker):
    """See `FixedWeights` and `StepAware`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fit_queues()
        super().__init__(*args, **kwargs)
