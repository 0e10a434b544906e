"""What vLLM's scheduler says of each step reaches the tiers: thin subclasses of vLLM's workers, named by --worker-cls.

The workers themselves are in cpu_worker.py and gpu_worker.py, since importing vLLM's prepares the process for that
device. They rely on `load_model`, `initialize_from_config(kv_cache_config)`, `compile_or_warm_up_model` and
`execute_model(scheduler_output)`, and on two fields of the latter's argument:
`num_scheduled_tokens` and `scheduled_spec_decode_tokens`, which are the same from vLLM 0.26 to 0.33.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
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

    def initialize_from_config(self, kv_cache_config: Any) -> Any:
        """As vLLM's."""
        self._kv_cache_config = kv_cache_config
        return super().initialize_from_config(kv_cache_config)  # type: ignore[misc]

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; then everything is allocated, and the first rank tells the launcher how much."""
        from moetier.serve.vllm.kv import tell

        result = super().compile_or_warm_up_model(*args, **kwargs)  # type: ignore[misc]
        if self.rank == 0:  # type: ignore[attr-defined]
            tell(self, self._kv_cache_config)
        return result

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, after the tiers have heard of the step."""
        tokens, step = scheduler_output.total_num_scheduled_tokens, step_of(scheduler_output)
        with _ends_alone():
            if tokens:
                runtime.begin_step(step, tokens + self._drafted(step))
            result = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
            if tokens:
                runtime.end_step(step)
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's: what the device could not do shows here."""
        with _ends_alone():
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]

    def _drafted(self, step: Step) -> int:
        """Tokens that a drafter may run in a step beside the scheduled ones: a block of guesses runs at once."""
        speculative = self.vllm_config.speculative_config  # type: ignore[attr-defined]
        return step.sequences * (speculative.num_speculative_tokens + 1) if speculative is not None else 0


@contextmanager
def _ends_alone() -> Iterator[None]:
    """Where the model is spread over ranks, one that fails ends its process.

    The others wait for it in a collective, and vLLM ends them all only when it sees a process end.
    """
    try:
        yield
    except BaseException:
        if runtime.ranks() > 1:
            logger.error("moetier: this rank failed and ends, so that no other waits for it:\n%s", _trace())
            os._exit(1)
        raise


def _trace() -> str:
    return traceback.format_exc()
