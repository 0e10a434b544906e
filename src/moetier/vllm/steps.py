"""Tell the tiers what vLLM's scheduler says of each step: thin subclasses of vLLM's workers, named by --worker-cls.

The workers themselves are in cpu_worker.py and gpu_worker.py, since importing vLLM's prepares the process for that
device. They rely on `load_model`, `initialize_from_config(kv_cache_config)`, `compile_or_warm_up_model`,
`execute_model(scheduler_output)` and `sample_tokens`, and on three fields of the scheduler's output:
`num_scheduled_tokens`, `total_num_scheduled_tokens` and `scheduled_spec_decode_tokens`, which are the same from vLLM
0.26 to 0.33.

A step under speculation runs several forwards, and a graph is chosen for each by a number of its own:

    execute_model   the model           total_num_scheduled_tokens: one token of each request that decodes and the
                                        guesses that it verifies, or a chunk of its prompt. Up to the largest captured
                                        size the dispatcher may find a graph for it (whole where all requests have
                                        1 + guesses tokens, in pieces else); above that it runs eagerly.
    sample_tokens   the drafter, first  as many tokens again, and up to one block of guesses a request (drafters that
                                        guess at once); a graph of its own or none
                    the drafter, 2 to k one token a request, again
                    n-gram              nothing on the device

So *scheduled* decides which way the model's forward goes: above `planned_tokens`, beyond which nothing is captured
(support.py), the host may drive it. *live* is how many rows any of these forwards may hold: scheduled, and 1 + guesses
of each request. Counting the latter among the former let the host fill staging slots under a graph.
"""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.logger import init_logger

from moetier.engine.hybrid import Launch
from moetier.tiers.step import Step
from moetier.vllm import runtime

logger = init_logger(f"vllm.{__name__}")


def step_of(scheduler_output: Any) -> Step:
    """Requests of a step, and whether a prompt is in it."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    tokens = scheduler_output.num_scheduled_tokens
    return Step.of((count, len(drafts.get(request, ()))) for request, count in tokens.items())


def launch_of(scheduler_output: Any, speculative: Any) -> Launch:
    """The two numbers of a step. speculative: vLLM's speculative config, or None."""
    scheduled = int(scheduler_output.total_num_scheduled_tokens)
    if speculative is None:
        return Launch.plain(scheduled)
    block = speculative.num_speculative_tokens + 1
    return Launch(scheduled, scheduled + len(scheduler_output.num_scheduled_tokens) * block, drafts=True)


class StepAware:
    """To be put before a worker of vLLM's among the bases."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; what runs before the first scheduled step is a warm-up."""
        if not faulthandler.is_enabled():
            faulthandler.enable()  # a fault of native code leaves words, too
        with _last_words():
            result = super().load_model(*args, **kwargs)  # type: ignore[misc]
            runtime.warm_up()
        return result

    def determine_available_memory(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with _last_words():
            return super().determine_available_memory(*args, **kwargs)  # type: ignore[misc]

    def initialize_from_config(self, kv_cache_config: Any) -> Any:
        """As vLLM's."""
        self._kv_cache_config = kv_cache_config
        with _last_words():
            return super().initialize_from_config(kv_cache_config)  # type: ignore[misc]

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; then everything is allocated, and the first rank tells the launcher how much."""
        from moetier.vllm.kv import tell

        with _last_words():
            result = super().compile_or_warm_up_model(*args, **kwargs)  # type: ignore[misc]
            if self.rank == 0:  # type: ignore[attr-defined]
                tell(self, self._kv_cache_config)
        return result

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, after the tiers have heard of the step."""
        step = step_of(scheduler_output)
        launch = launch_of(scheduler_output, self.vllm_config.speculative_config)  # type: ignore[attr-defined]
        with _ends_alone(), _last_words():
            if launch.scheduled:
                runtime.begin_step(step, launch)
            result = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
            if launch.scheduled:
                runtime.end_step(step)
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's: what the device could not do shows here."""
        with _ends_alone(), _last_words():
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]


@contextmanager
def _last_words() -> Iterator[None]:
    """Leave the reason of what ends the engine's process in the log and for the launcher, whoever raised it."""
    try:
        yield
    except Exception as error:
        runtime.tell_failure(error)
        raise


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
