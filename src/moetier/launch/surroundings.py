"""Look at what vLLM takes for granted around it, before it starts.

Each look finds all well, or says what cures it (variables for the server's environment, one line to say), or raises the
one sentence that a person needs. A cure is ours where a folder or a smaller size of our own does as well.
"""

from __future__ import annotations

import os
import pwd
import resource
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moetier.errors import SettingsError
from moetier.folders import home, takes_files, temporary_roots
from moetier.launch.command import SOCKET_FOLDER_BYTES, ServeRequest, tensor_parallel_size
from moetier.launch.drain import FOLDER_VARIABLE
from moetier.machine import limits as machine
from moetier.vllm_arguments import has

MIB = 2**20
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
BROADCAST_MIB, ANSWERS_MIB = 160, 240
"""MiB of /dev/shm for vLLM's queues: from the engine to all workers, and from each worker."""
QUEUE_CHUNKS = 10
"""Chunks of each queue; larger messages than a chunk go through a socket."""
SPARE_MIB = 8
"""Left free in /dev/shm beside the queues."""
CHUNK_VARIABLE = "VLLM_MQ_MAX_CHUNK_BYTES_MB"
LEAST_FILES = 192
"""Open files that a process of the server needs beside the store's, with some tens of connections."""
BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


@dataclass(frozen=True)
class Cure:
    """Variables for the server's environment, in place of what the user has, and the line that says so."""

    environment: Mapping[str, str] = field(default_factory=dict)
    line: str | None = None


@dataclass(frozen=True)
class Surroundings:
    """All cures."""

    environment: dict[str, str]
    lines: tuple[str, ...]


def socket_root() -> Path:
    """The folder for the server's scratch folder: one that takes files, with a name short enough for sockets."""
    room = SOCKET_FOLDER_BYTES - len("/moetier-serve-") - 8
    roots = temporary_roots()
    for root in roots:
        if len(os.fsencode(root)) <= room and takes_files(root):
            return root
    raise SettingsError(
        f"expected a folder for sockets whose name has at most {room} bytes and which takes files, found none among "
        f"{', '.join(map(str, roots))}; set TMPDIR to one"
    )


def look(request: ServeRequest, scratch: Path, on_cpu: bool) -> Surroundings:
    """Every look, in order; SettingsError from the first that knows no cure."""
    looks: tuple[Callable[[], Cure | None], ...] = (
        lambda: _temporary_files(scratch),
        lambda: _home(scratch),
        _user_name,
        lambda: _shared_memory(request, on_cpu),
        lambda: _pinning(request, on_cpu),
        lambda: _open_files(request),
    )
    cures = [cure for look in looks if (cure := look())]
    environment: dict[str, str] = {}
    for cure in cures:
        environment |= cure.environment
    return Surroundings(environment, tuple(cure.line for cure in cures if cure.line))


def _temporary_files(scratch: Path) -> Cure:
    """All temporary files of the server go where they are removed after it, whatever ends it."""
    ours = dict.fromkeys(("TMPDIR", "VLLM_RPC_BASE_PATH", FOLDER_VARIABLE), str(scratch))
    named = os.environ.get("TMPDIR")
    if named and scratch.parent != Path(named).absolute():
        why = "is too long for sockets" if takes_files(Path(named)) else "takes no files"
        return Cure(ours, f"TMPDIR={named} {why}; the server's temporary files are in {scratch}")
    return Cure(ours)


def _home(scratch: Path) -> Cure | None:
    """Caches of vLLM, torch and triton want a home that takes files."""
    owner = home()
    bad = owner is None or not takes_files(owner)
    ours = {"HOME": str(scratch / "home")} if bad else {}
    for variable, below_home in (("XDG_CACHE_HOME", ".cache"), ("XDG_CONFIG_HOME", ".config")):
        named = os.environ.get(variable)
        if named and not (Path(named).is_absolute() and _can_take_files(Path(named))):
            ours[variable] = str(scratch / "home" / below_home)
        elif not named and owner and (owner / below_home).is_dir():
            usable = takes_files(owner / below_home)
            if usable == bad:  # the one differs from its home
                ours[variable] = str((owner if usable else scratch / "home") / below_home)
    if not ours:
        return None
    (scratch / "home").mkdir()
    found = "none" if owner is None else f"{owner}, which takes no files" if bad else f"{' and '.join(ours)} unusable"
    return Cure(ours, f"expected a home folder for caches, found {found}; until the server ends {scratch}/home is used")


def _can_take_files(folder: Path) -> bool:
    """Whether files can be made there, once it is made itself."""
    return takes_files(next((path for path in (folder, *folder.parents) if path.exists()), folder))


def _user_name() -> Cure | None:
    """A user id without an entry in passwd has no name, which torch asks for."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        ours = {name: f"user{os.getuid()}" for name in ("LOGNAME", "USER") if not os.environ.get(name)}
        return Cure(ours) if ours else None
    return None


def _shared_memory(request: ServeRequest, on_cpu: bool) -> Cure | None:
    """The engine and its workers talk through /dev/shm."""
    ranks = tensor_parallel_size(request.extra)
    if has(request.extra, "--distributed-executor-backend") or not (on_cpu or ranks > 1):
        return None
    wanted = BROADCAST_MIB + ANSWERS_MIB * ranks + SPARE_MIB
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free // MIB
        usable = takes_files(SHARED_MEMORY)
    except OSError:
        free, usable = 0, False
    if usable and free >= wanted:
        return None
    remedy = "`docker run --shm-size=1g`, or as root: mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm"
    chunk = (free - SPARE_MIB) // (QUEUE_CHUNKS * (1 + ranks))
    if not usable or chunk < 1:
        found = f"{free} MiB" if usable else "none that takes files"
        raise SettingsError(
            f"{SHARED_MEMORY}: expected {SPARE_MIB + QUEUE_CHUNKS * (1 + ranks)} MiB free at least, found {found}; "
            f"make room there (`ls -l /dev/shm`), or give it a size: {remedy}"
        )
    return Cure(
        {CHUNK_VARIABLE: str(min(chunk, 15))},
        f"{SHARED_MEMORY} has {free} MiB free, vLLM's queues want {wanted}: they are made smaller; for full ones give "
        f"it a size: {remedy}",
    )


def _pinning(request: ServeRequest, on_cpu: bool) -> Cure | None:
    """Some sandboxes forbid to choose CPUs."""
    if machine.may_pin():
        return None
    cpus = machine.allowed_cpus()
    if request.settings.cpus and set(request.settings.cpus) != set(cpus):
        raise SettingsError(
            f"cpus: expected to pin threads to {list(request.settings.cpus)}, found that this system forbids to choose "
            "CPUs (sched_setaffinity is refused); leave --set cpus out, or allow the call"
        )
    line = f"this system forbids to choose CPUs (sched_setaffinity is refused): threads are not pinned, on CPUs {cpus}"
    if not on_cpu:
        return Cure({}, line)
    ranks = tensor_parallel_size(request.extra)
    threads = max(1, len(machine.compute_cpus(cpus)) // ranks)
    ours = {BIND_VARIABLE: "nobind"}
    return Cure(ours if os.environ.get("OMP_NUM_THREADS") else {**ours, "OMP_NUM_THREADS": str(threads)}, line)


def _open_files(request: ServeRequest) -> Cure | None:
    """The limit that we may set is set by us: vLLM raises its own to 65,535 or not at all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            hard = soft
    wanted = LEAST_FILES + sum(1 for _ in request.settings.store.glob("layer-*.records"))
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise SettingsError(
            f"open files: expected a limit of {wanted} at least, found {hard}; raise it: ulimit -n 4096 (docker "
            "run --ulimit nofile=4096)"
        )
    return None
