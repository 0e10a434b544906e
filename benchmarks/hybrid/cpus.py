"""CPU threads of a benchmark: as many as `moetier serve` takes of the CPUs that this process may use."""

from __future__ import annotations

import argparse

from moetier.machine import limits as machine


def granted() -> int:
    """CPUs that this process may use: its affinity (taskset) and its cgroup's quota, not the machine's size."""
    return machine.default_threads(machine.allowed_cpus())


def served() -> int:
    """Threads that compute misses where nobody says how many."""
    return machine.serving_threads(machine.allowed_cpus(), beside_device=True)


def threads(text: str) -> int:
    """Of the command line. More than there are CPUs is refused: they take turns, and every figure is of that."""
    most = granted()
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"expected 1 to {most}, the CPUs that this process may use, found {text!r}")
    return int(text)
