"""vLLM's executor of CPU workers, with an engine that rests while they compute."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from moetier.vllm.resting import rest_while_waiting


class RestingExecutor(MultiprocExecutor):
    """As vLLM's."""

    def _init_executor(self) -> None:
        rest_while_waiting()
        super()._init_executor()
