"""vLLM's worker on a GPU, telling the tiers of each step."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from moetier.serve.vllm.fixed import FixedWeights
from moetier.serve.vllm.steps import StepAware


class MoetierGpuWorker(FixedWeights, StepAware, Worker):
    """See `FixedWeights` and `StepAware`."""
