"""vLLM's worker on the CPU, telling the tiers of each step."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from moetier.serve.vllm.steps import StepAware


class MoetierCpuWorker(StepAware, CPUWorker):
    """See `StepAware`."""
