"""vLLM's scheduler, writing when each step began and when its tokens left the engine: for the benchmarks here.

`--scheduler-cls step_log.StepLog` (`AsyncStepLog` where vLLM schedules ahead of the device, as on GPUs) with this
folder on PYTHONPATH and the file to write in STEP_LOG. A line a step: {"begin", "end", "tokens": {request: tokens}},
in seconds of time.perf_counter, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class _Logged:
    """To be put before a scheduler of vLLM's; schedule and update_from_output are the same from 0.26 to 0.33."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log = Path(os.environ["STEP_LOG"]).open("a", buffering=1)  # noqa: SIM115 (as long as the engine)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, noting when."""
        begin = time.perf_counter()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        output.begin = begin
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; what it returns is sent to the frontend at once."""
        result = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if tokens := dict(scheduler_output.num_scheduled_tokens):
            line = {"begin": scheduler_output.begin, "end": time.perf_counter(), "tokens": tokens}
            self._log.write(json.dumps(line) + "\n")
        return result


class StepLog(_Logged, Scheduler):
    """Where a step is over before the next is scheduled."""


class AsyncStepLog(_Logged, AsyncScheduler):
    """Where the next step is scheduled while the device computes."""
