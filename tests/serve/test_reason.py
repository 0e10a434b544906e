"""The first cause in vLLM's log, among what others say of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from moetier.launch.reason import by_signal, reason

WORKER = "(Worker pid=15348) ERROR 12-01 03:15:03 [multiproc_executor.py:1063] "
CORE = "(EngineCore pid=15176) ERROR 12-01 03:15:03 [core.py:1512] "
FRONT = "(APIServer pid=14922) ERROR 12-01 03:15:03 [async_llm.py:906] "
TRACE = ("Traceback (most recent call last):", '  File "/v/core.py", line 1, in run', "    run()", "    ^^^^^")


def said(prefix: str, *error: str) -> list[str]:
    return [prefix + line for line in (*TRACE, *error)]


CONSEQUENCES = [
    CORE + "EngineCore encountered a fatal error.",
    *said(CORE, "RuntimeError: Worker failed with error 'no offset', please check the stack trace above"),
    *said(FRONT, "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."),
    'INFO:     127.0.0.1:56218 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error',
    "nanobind: leaked 3 instances!",
    ' - leaked function "create_masked_load"',
]
CAUSE = "The above exception was the direct cause of the following exception:"
MEANWHILE = "During handling of the above exception, another exception occurred:"

LOGS = {
    "worker": (
        [*said(WORKER, "RuntimeError: no offset"), *said(WORKER, "RuntimeError: no offset", ""), *CONSEQUENCES],
        "Worker: RuntimeError: no offset",
    ),
    "message-of-some-lines": (
        [*said(WORKER, "torch.OutOfMemoryError: no room", "for 3 GiB", ""), *CONSEQUENCES],
        "Worker: torch.OutOfMemoryError: no room\nfor 3 GiB",
    ),
    "engine-at-its-start": (
        [
            *said(CORE, "RuntimeError: Insufficient space in /dev/shm"),
            *said("", "RuntimeError: Insufficient space in /dev/shm"),
            *said("", "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore': 1}"),
        ],
        "EngineCore: RuntimeError: Insufficient space in /dev/shm",
    ),
    "raised-from-another": (
        [*said(WORKER, "OSError: [Errno 5] I/O error", "", CAUSE, "", *TRACE, "ValueError: no tensor"), *CONSEQUENCES],
        "Worker: OSError: [Errno 5] I/O error",
    ),
    "raised-while-another-was-handled": (
        [*said(WORKER, "KeyError: 'x'", "", MEANWHILE, "", *TRACE, "ValueError: no tensor x"), *CONSEQUENCES],
        "Worker: ValueError: no tensor x (while handling KeyError: 'x')",
    ),
    "two-ranks": (
        [
            *said(WORKER.replace("Worker", "Worker_TP1"), "RuntimeError: rank 1 failed"),
            *said(WORKER.replace("Worker", "Worker_TP0"), "RuntimeError: Connection closed by peer"),
            *CONSEQUENCES,
        ],
        "Worker_TP1: RuntimeError: rank 1 failed",
    ),
    "an-older-story": (
        [*said(WORKER.replace("03:15", "02:15"), "ValueError: no adapter"), *said(WORKER, "OSError: 5"), *CONSEQUENCES],
        "Worker: OSError: 5",
    ),
    "frontend-alone": (
        [*said("", "zmq.error.ZMQError: ipc path is too long")],
        "zmq.error.ZMQError: ipc path is too long",
    ),
    "usage": (
        ["usage: api_server.py [-h]", "api_server.py: error: unrecognized arguments: --wrong"],
        "api_server.py: error: unrecognized arguments: --wrong",
    ),
    "worker-killed": (
        [
            CORE + "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.",
            *said(CORE, "RuntimeError: cancelled"),
        ],
        f"VllmWorker-0 was {by_signal('', -signal.SIGKILL)[5:]}",  # type: ignore[index]
    ),
    "engine-killed-at-its-start": (
        said("", "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore': -7}"),
        f"EngineCore was {by_signal('', -signal.SIGBUS)[5:]}",  # type: ignore[index]
    ),
    "nothing": (["INFO 12-01 all is well"], None),
    "only-consequences": (
        CONSEQUENCES,
        "EngineCore: RuntimeError: Worker failed with error 'no offset', please check the stack trace above",
    ),
    "cut-in-a-traceback": ([*TRACE], None),
}


@pytest.mark.parametrize(("lines", "expected"), LOGS.values(), ids=LOGS)
def test_the_first_cause_is_found(lines: list[str], expected: str | None, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(["started", *lines, ""]))
    assert reason(log) == expected


def test_exit_codes_that_are_known_are_told_without_a_log(tmp_path: Path) -> None:
    found = reason(tmp_path / "none", [("EngineCore", -signal.SIGKILL), ("vLLM's server", 0)])
    assert found is not None
    assert found.startswith("EngineCore was killed by SIGKILL, most likely by the kernel, for memory")
    found = reason(tmp_path / "none", [("EngineCore", -signal.SIGKILL)], for_memory=True)
    assert found is not None
    assert found.startswith("EngineCore was killed by SIGKILL, by the kernel, for memory")
    assert reason(tmp_path / "none", [("EngineCore", 1), ("vLLM's server", -signal.SIGTERM)]) is None


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGUSR1, 63], ids=str)
def test_a_signal_is_named(number: int) -> None:
    found = by_signal("EngineCore", -number)
    assert found is not None
    assert found.startswith("EngineCore was killed by ")
