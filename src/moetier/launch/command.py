"""The vLLM server's command line and environment, as pure functions of what was asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from moetier.budget import GIB
from moetier.errors import SettingsError
from moetier.launch.keys import HASHES, VARIABLE, hashes_of
from moetier.launch.passed import TLS, take
from moetier.machine import limits as machine
from moetier.settings import Settings
from moetier.vllm_arguments import RANKS, SIZES, has, number_of, value_of

CPU_WORKER = "moetier.vllm.cpu_worker.MoetierCpuWorker"
GPU_WORKER = "moetier.vllm.gpu_worker.MoetierGpuWorker"
CPU_EXECUTOR = "moetier.vllm.executor.RestingExecutor"
ACCESS = "moetier.vllm.access.Access"
DRAINING = "moetier.vllm.draining.Draining"
LEAST_SHUTDOWN_SECONDS = 10
"""Seconds of vLLM's own end, after the drain: the engine saves heat in it. The launcher sees to the drain time."""
SOCKET_FOLDER_BYTES = 107 - 37
"""The longest name of a folder for vLLM's sockets: a socket's path may have 107 bytes, and vLLM's name has 36."""


@dataclass(frozen=True)
class ServeRequest:
    """A request of `moetier serve`. Values that `extra` has for other fields are in them, and no longer in `extra`."""

    model: Path
    settings: Settings
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    key_in_shell: str = f"${VARIABLE}"
    """A word that a shell replaces by one of the keys."""
    served: tuple[str, ...] = ()
    """Names of the model in the API, the first of which is the model's own; (): that of its folder."""
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
    """Lines of `--explain` about them."""
    planned_device_bytes: int | None = None
    scratch: Path | None = None
    """A folder that is gone after the server."""
    scratch_lock: int | None = None
    """Descriptor of its lock, which the server's processes keep."""
    log_kept: bool = True
    """False: the log is in the scratch folder, for there is no other place."""
    surroundings: Mapping[str, str] = field(default_factory=dict)
    """Variables for the server's environment that its surroundings ask for (surroundings.py)."""

    def __post_init__(self) -> None:
        taken = take(self.extra)
        object.__setattr__(self, "extra", taken.left)
        for name in ("host", "port", "drain_seconds", "served", "api_keys"):
            value = getattr(taken, name)
            if value is not None and value != ():
                object.__setattr__(self, name, value)

    @property
    def tls(self) -> bool:
        """Whether the server speaks https."""
        return any(value_of(self.extra, name) for name in TLS)

    @property
    def asks_for_certificates(self) -> bool:
        """Whether the server wants one of every client, whoever asks."""
        return self.tls and value_of(self.extra, "--ssl-cert-reqs") not in (None, "0")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_reachable_only_with_key(request: ServeRequest) -> None:
    """Listening beyond loopback without an API key is refused."""
    if not is_loopback(request.host) and not request.api_keys:
        raise SettingsError(
            f"--host {request.host} can be reached from other machines, and no API key is set; "
            f"give one with --api-key-file or {VARIABLE}, or listen on 127.0.0.1"
        )


def arguments(request: ServeRequest, on_cpu: bool) -> list[str]:
    """Command line of the server process. No API key is on it: hashes of them travel in the environment.

    The layer that asks for them comes last, which makes it the outermost one.
    """
    command = [
        *(sys.executable, "-W", "ignore::DeprecationWarning", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(request.model), "--served-model-name", *served_names(request)),
        *("--quantization", "moetier", "--load-format", "moetier"),
        *("--additional-config", json.dumps({"moetier": request.settings.model_dump(mode="json", exclude_none=True)})),
        *("--host", request.host, "--port", str(request.port)),
        *("--shutdown-timeout", str(max(request.drain_seconds, LEAST_SHUTDOWN_SECONDS))),
        *("--middleware", DRAINING),
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
    return [*command, *request.derived, *request.extra, "--middleware", ACCESS]


def served_names(request: ServeRequest) -> tuple[str, ...]:
    """Names of the model in the API."""
    return request.served or (request.model.resolve().name,)


def served_name(request: ServeRequest) -> str:
    """The model's own name in the API."""
    return served_names(request)[0]


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
    if not request.usage_stats:
        ours |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    kept = {name: value for name, value in inherited.items() if name != VARIABLE}
    return {**ours, **kept, **request.surroundings, HASHES: hashes_of(request.api_keys)}


def cpus_of_rank(cpus: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """The CPUs of a rank: neighbours, equally many but for one; shared where there are fewer than ranks."""
    if len(cpus) < ranks:
        return (cpus[rank % len(cpus)],)
    return tuple(cpus[rank * len(cpus) // ranks : (rank + 1) * len(cpus) // ranks])


def tensor_parallel_size(extra: Sequence[str]) -> int:
    """Return what vLLM's arguments ask for; SettingsError where that is no number."""
    found = value_of(extra, *RANKS)
    if found is None:
        return 1
    ranks = number_of(extra, *RANKS)
    if ranks is None:
        raise SettingsError(f"--tensor-parallel-size: expected a number of ranks, found {found[:60]!r}; give one")
    return ranks


def url_from_here(request: ServeRequest) -> str:
    """Where this machine reaches the server, also where it listens on every address."""
    host = request.host or "0.0.0.0"  # noqa: S104 (compared, not bound)
    try:
        address = ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    except ValueError:
        pass  # a name
    return f"{'https' if request.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{request.port}"


def example(request: ServeRequest) -> str:
    """A curl line that the running server answers. Its certificate is rarely one for this machine's own address."""
    body = {
        "model": served_name(request),
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "temperature": 0,
    }
    key = f' -H "Authorization: Bearer {request.key_in_shell}"' if request.api_keys else ""
    return (
        f"curl {'-k ' if request.tls else ''}{url_from_here(request)}/v1/chat/completions "
        f"-H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
    )
