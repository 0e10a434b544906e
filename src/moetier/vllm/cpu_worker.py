"""vLLM's worker on the CPU, telling the tiers of each step."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from moetier.vllm.compat import seeds_rest
from moetier.vllm.fixed import FixedWeights
from moetier.vllm.queues import fit_queues
from moetier.vllm.resting import rest_while_waiting
from moetier.vllm.steps import StepAware


class MoetierCpuWorker(FixedWeights, StepAware, CPUWorker):
    """See `FixedWeights` and `StepAware`; and its process rests between steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        rest_while_waiting()
        fit_queues()
        super().__init__(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, for seeded requests whose prompt goes on too."""
        with seeds_rest(self.model_runner):
            return super().sample_tokens(*args, **kwargs)
