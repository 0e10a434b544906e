"""vLLM's queues in a small /dev/shm: those of the workers' answers, whose size no variable of vLLM's says."""

from __future__ import annotations

import inspect
import os

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from moetier.launch.surroundings import CHUNK_VARIABLE, MIB


def fit_queues() -> None:
    """From now on, in this process: chunks as large as those of the engine's queue, where somebody chose that.

    A message that is larger than a chunk goes through a socket.
    """
    named = os.environ.get(CHUNK_VARIABLE, "")
    if not named.isdecimal():
        return
    parameters = inspect.signature(MessageQueue.__init__).parameters.values()
    defaults = [
        int(named) * MIB if parameter.name == "max_chunk_bytes" else parameter.default
        for parameter in parameters
        if parameter.default is not inspect.Parameter.empty and parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    MessageQueue.__init__.__defaults__ = tuple(defaults)
