"""What vLLM's scheduler says of each step reaches the tiers: thin subclasses of vLLM's workers, named by --worker-cls.

The workers themselves are in cpu_worker.py and gpu_worker.py, since importing vLLM's prepares the process for that
device. They rely on `load_model` and `execute_model(scheduler_output)`, and on two fields of the latter's argument:
`num_scheduled_tokens` and `scheduled_spec_decode_tokens`, which are the same from vLLM 0.26 to 0.33.
"""

from __future__ import annotations

import os
import traceback
from typing import Any

from vllm.logger import init_logger

from moetier.residency import Step
from moetier.serve.vllm import runtime

logger = init_logger(f"vllm.{__name__}")


def step_of(scheduler_output: Any) -> Step:
    """Requests of a step, and whether a prompt is in it."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    tokens = scheduler_output.num_scheduled_tokens
    return Step.of((count, len(drafts.get(request, ()))) for request, count in tokens.items())


class StepAware:
    """To be put before a worker of vLLM's among the bases."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; what runs before the first scheduled step is a warm-up."""
        result = super().load_model(*args, **kwargs)  # type: ignore[misc]
        runtime.warm_up()
        return result

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, after the tiers have heard of the step.

        Where the model is spread over ranks, one that fails ends its process: the others wait for it in a collective,
        and vLLM ends them all only when it sees a process end.
        """
        tokens = scheduler_output.total_num_scheduled_tokens
        step = step_of(scheduler_output)
        if tokens:
            runtime.begin_step(step, tokens)
        try:
            result = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
            if tokens:
                runtime.end_step(step)
            return result
        except BaseException:
            if runtime.ranks() > 1:
                logger.error("moetier: this rank failed and ends, so that no other waits for it:\n%s", _trace())
                os._exit(1)
            raise


def _trace() -> str:
    return traceback.format_exc()
