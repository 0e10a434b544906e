"""The thread pool that the kernels run on."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.amounts import MAX_THREADS
from moetier.errors import SettingsError
from moetier.kernels.cpu import _native
from moetier.machine import limits as machine
from moetier.machine import numa


class ThreadPool:
    """A team of native threads for the kernels. It sleeps when idle; one call runs at a time, others take turns.

    A fork takes no threads along. In the child, whatever would run on the pool raises RuntimeError, also on a mailbox
    that uses it; both may be dropped, and new ones made. That holds for our own threads: fork while no thread of the
    process is inside numpy's BLAS, whose fork handler may then wait for ever, in the parent.

    Parameters
    ----------
    threads
        How many threads compute, the calling one included. Default: one per CPU, within the cgroup's quota.
    cpus
        CPUs that the threads may use. Default: those of the process. Where they lie on several NUMA nodes, each thread
        keeps to those of one. The caller's own affinity is left as it is.

    """

    def __init__(self, threads: int | None = None, cpus: Sequence[int] | None = None) -> None:
        chosen = machine.allowed_cpus() if cpus is None else tuple(cpus)
        outside = machine.outside_cpus(chosen)
        if not chosen or outside:
            raise SettingsError(
                f"CPUs {list(chosen)}: this process may not use {list(outside) or 'none'}, "
                f"its own are {list(machine.allowed_cpus())}; name some of those"
            )
        count = machine.default_threads(chosen) if threads is None else threads
        if not 1 <= count <= MAX_THREADS:
            raise SettingsError(f"threads: expected 1 to {MAX_THREADS}, found {count}")
        try:
            of_threads = numa.cpus_of_threads(count, chosen, numa.nodes(chosen))
            self._native: _native.Pool | None = _native.Pool(count, [list(cpus) for cpus in of_threads])
        except RuntimeError as error:
            raise SettingsError(
                f"expected to start {count} threads, found: {error}; set threads lower, or raise the limit on processes"
            ) from error
        self.threads = count
        self.cpus = chosen

    @property
    def native(self) -> _native.Pool:
        """The binding's object; RuntimeError after `close`."""
        if self._native is None:
            raise RuntimeError("the thread pool is closed")
        return self._native

    def close(self) -> None:
        """Drop the threads. They end once no `CpuExperts` uses them any more."""
        self._native = None
