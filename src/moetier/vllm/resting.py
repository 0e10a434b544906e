"""Processes of vLLM that wait for each other rest meanwhile, where the CPUs are those that compute.

vLLM's engine and its workers look for each other's messages in a loop that yields and never sleeps, for up to a second
after the last one, which under load is always. On two CPUs that took 0.6 of one from the threads that compute, from the
frontend and from its clients, before whom tokens piled up. A sleep from the first look on would not do: vLLM's wake-up
calls may be lost while messages are frequent.
"""

from __future__ import annotations

import time

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

REST_SECONDS = 1e-4
"""Between two looks. A message is late by this at most, and the looks take a tenth of a CPU."""

_wait = SpinCondition.wait


def rest_while_waiting() -> None:
    """From now on, in this process. Relies on `SpinCondition`, which is the same from vLLM 0.26 to 0.33."""
    SpinCondition.wait = _resting_wait


def _resting_wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
    """As vLLM's, but for the yield."""
    if time.monotonic() <= self.last_read + self.busy_loop_s:
        time.sleep(REST_SECONDS)
    else:
        _wait(self, timeout_ms)
