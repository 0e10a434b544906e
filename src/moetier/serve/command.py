"""The vLLM server's command line and environment, as pure functions of what was asked for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from moetier import machine
from moetier.errors import SettingsError
from moetier.settings import Settings
from moetier.vllm_arguments import SIZES, has, number_of, value_of

GIB = 2**30
CPU_WORKER = "moetier.serve.vllm.cpu_worker.MoetierCpuWorker"
GPU_WORKER = "moetier.serve.vllm.gpu_worker.MoetierGpuWorker"
CPU_EXECUTOR = "moetier.serve.vllm.executor.RestingExecutor"
SOCKET_FOLDER_BYTES = 107 - 37
"""The longest name of a folder for vLLM's sockets: a socket's path may have 107 bytes, and vLLM's name has 36."""


@dataclass(frozen=True)
class ServeRequest:
    """What `moetier serve` was asked for. `records` is decided: records per layer in DRAM."""

    model: Path
    settings: Settings
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    kv_cache_gib: float = 1.0
    drain_seconds: int = 30
    usage_stats: bool = False
    log_file: Path | None = None
    """Where vLLM's own output goes; None: to the terminal."""
    extra: tuple[str, ...] = ()
    """Arguments that go to vLLM as they are."""
    derived: tuple[str, ...] = ()
    """Those that the plan and launch.py add."""
    launch: tuple[str, ...] = ()
    """What `--explain` says of them."""
    planned_device_bytes: int | None = None
    scratch: Path | None = None
    """A folder that is gone after the server."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_reachable_only_with_key(request: ServeRequest) -> None:
    """Listening beyond loopback without an API key is refused."""
    if not is_loopback(request.host) and not request.api_key:
        raise SettingsError(
            f"--host {request.host} can be reached from other machines, and no API key is set; "
            "give one with --api-key or VLLM_API_KEY, or listen on 127.0.0.1"
        )


def arguments(request: ServeRequest, on_cpu: bool) -> list[str]:
    """Command line of the server process. The API key is not on it: it travels in the environment."""
    command = [
        *(sys.executable, "-W", "ignore::DeprecationWarning", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(request.model), "--served-model-name", served_name(request)),
        *("--quantization", "moetier", "--load-format", "moetier"),
        *("--additional-config", json.dumps({"moetier": request.settings.model_dump(mode="json", exclude_none=True)})),
        *("--host", request.host, "--port", str(request.port)),
        *("--shutdown-timeout", str(request.drain_seconds)),
        *("--worker-cls", CPU_WORKER if on_cpu else GPU_WORKER),
    ]
    if on_cpu:
        command += ["--distributed-executor-backend", CPU_EXECUTOR]
    if on_cpu or request.settings.slots:
        command += ["--kv-cache-memory-bytes", str(int(request.kv_cache_gib * GIB))]
    if not request.settings.slots:
        command += ["--enforce-eager"]
    elif not has((*request.derived, *request.extra), SIZES):
        command += ["--max-cudagraph-capture-size", str(request.settings.planned_tokens)]
    return [*command, *request.derived, *request.extra]


def served_name(request: ServeRequest) -> str:
    """Name of the model in the API: that of its folder."""
    return request.model.resolve().name


def environment(request: ServeRequest, cpus: Sequence[int], inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment of the server process; what the user set in it stays."""
    ranks = tensor_parallel_size(request.extra)
    ours = {
        # OpenMP's threads wait for each other by spinning; passive, they leave the CPUs to the experts' threads.
        "OMP_WAIT_POLICY": "passive",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(
            ",".join(map(str, cpus_of_rank(machine.compute_cpus(cpus), rank, ranks))) for rank in range(ranks)
        ),
    }
    if request.scratch and len(os.fsencode(request.scratch)) <= SOCKET_FOLDER_BYTES:
        ours["VLLM_RPC_BASE_PATH"] = str(request.scratch)  # vLLM leaves its sockets, eight a start, where they were
    if not request.usage_stats:
        ours |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    forced = {"VLLM_API_KEY": request.api_key} if request.api_key else {}
    return {**ours, **inherited, **forced}


def cpus_of_rank(cpus: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """The CPUs of a rank: neighbours, equally many but for one; shared where there are fewer than ranks."""
    if len(cpus) < ranks:
        return (cpus[rank % len(cpus)],)
    return tuple(cpus[rank * len(cpus) // ranks : (rank + 1) * len(cpus) // ranks])


def tensor_parallel_size(extra: Sequence[str]) -> int:
    """What vLLM's arguments ask for; SettingsError where that is no number."""
    found = value_of(extra, "-tp", "--tensor-parallel-size")
    if found is None:
        return 1
    ranks = number_of(extra, "-tp", "--tensor-parallel-size")
    if ranks is None:
        raise SettingsError(f"--tensor-parallel-size: expected a number of ranks, found {found[:60]!r}")
    return ranks


def url_from_here(request: ServeRequest) -> str:
    """Where this machine reaches the server, also where it listens on every address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(request.host, request.host)  # noqa: S104 (compared, not bound)
    return f"http://{f'[{host}]' if ':' in host else host}:{request.port}"


def example(request: ServeRequest) -> str:
    """A curl line that the running server answers."""
    body = {
        "model": served_name(request),
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "temperature": 0,
    }
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if request.api_key else ""
    return (
        f"curl {url_from_here(request)}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"-d '{json.dumps(body)}'"
    )


def api_key_of(option: str | None) -> str | None:
    """The API key: the option, else VLLM_API_KEY."""
    key = option or os.environ.get("VLLM_API_KEY") or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise SettingsError("the API key: expected printable ASCII, which a header can carry; choose another key")
    return key
