"""NUMA nodes from files of other machines, threads over them, and the kernel's own word on interleaved pages."""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moetier.kernels.cpu import ThreadPool
from moetier.machine import numa
from moetier.machine.limits import allowed_cpus
from moetier.machine.numa import Node


def machine_with(root: Path, cpulists: dict[int, str], memory: str | None = None) -> Path:
    for number, cpus in cpulists.items():
        folder = root / numa.NODES / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    if memory is not None:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/status").write_text(f"Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t{memory}\n")
    return root


def test_two_sockets(tmp_path):
    root = machine_with(tmp_path, {1: "4-7,12-15", 0: "0-3,8-11"}, "0-1")
    found = numa.nodes(range(16), root)
    assert found == (Node(0, (0, 1, 2, 3, 8, 9, 10, 11)), Node(1, (4, 5, 6, 7, 12, 13, 14, 15)))


def test_only_the_cpus_that_are_asked_about(tmp_path):
    root = machine_with(tmp_path, {0: "0-3", 1: "4-7", 10: "8-11"}, "0-10")
    assert numa.nodes((3, 9), root) == (Node(0, (3,)), Node(10, (9,)))


def test_a_container_that_may_use_one_nodes_memory(tmp_path):
    root = machine_with(tmp_path, {0: "0-3", 1: "4-7"}, "1")
    assert numa.nodes(range(8), root) == (Node(1, (4, 5, 6, 7)),)


def test_a_node_of_memory_alone_is_not_ours(tmp_path):
    assert numa.nodes(range(4), machine_with(tmp_path, {0: "0-3", 2: ""}, "0-2")) == (Node(0, (0, 1, 2, 3)),)


@pytest.mark.parametrize("memory", [None, ""], ids=["no-status", "empty-list"])
def test_missing_files(tmp_path, memory):
    root = machine_with(tmp_path, {0: "0-1"}, memory)
    (root / numa.NODES / "node0/cpulist").unlink()
    assert numa.nodes((0, 1), root) == ()
    assert numa.nodes((0, 1), tmp_path / "nothing") == ()


TWO = (Node(0, (0, 1, 2, 3)), Node(1, (4, 5, 6, 7)))


@pytest.mark.parametrize(
    ("threads", "on_first"), [(8, 4), (4, 2), (2, 1), (1, 1), (3, 2), (16, 8)], ids=lambda value: str(value)
)
def test_threads_in_proportion(threads, on_first):
    spread = numa.cpus_of_threads(threads, range(8), TWO)
    assert [spread.count(node.cpus) for node in TWO] == [on_first, threads - on_first]


def test_threads_on_uneven_nodes():
    uneven = (Node(0, (0,)), Node(1, (4, 5, 6)))
    spread = numa.cpus_of_threads(4, (0, 4, 5, 6), uneven)
    assert spread == [(0,), (4, 5, 6), (4, 5, 6), (4, 5, 6)]


@pytest.mark.parametrize("known", [(), TWO[:1], (TWO[0], Node(1, (4,)))], ids=["none", "one", "cpu-without-node"])
def test_threads_are_not_pinned_without_knowing(known):
    assert numa.cpus_of_threads(3, (0, 1, 5), known) == [(0, 1, 5)] * 3


def numa_maps(address: int) -> str | None:
    """The kernel's line on the mapping that begins at `address`."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines() if Path("/proc/self/numa_maps").exists() else []
    return next((line for line in lines if line.startswith(f"{address:x} ")), None)


def test_interleaved_pages_as_the_kernel_tells_them():
    over = numa.nodes(allowed_cpus())
    memory = mmap.mmap(-1, 64 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    if not over or (refused := numa.interleave(address, len(memory), over)):
        pytest.skip(f"this kernel grants no memory policy: {refused if over else 'no NUMA nodes'}")
    line = numa_maps(address)
    if line is None:
        pytest.skip("this kernel has no /proc/self/numa_maps")
    assert line.split()[1].startswith("interleave")


def test_a_refusal_is_told():
    refused = numa.interleave(1, mmap.PAGESIZE, (Node(0, (0,)),))
    assert refused is not None
    assert "Invalid argument" in refused or "not permitted" in refused or "not implemented" in refused


def test_a_refusal_is_logged_once_and_harms_nothing(monkeypatch, caplog):
    monkeypatch.setattr(numa, "known_nodes", lambda: TWO)
    numa._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "moetier.machine.numa"):
        numa.spread(1, mmap.PAGESIZE)
        numa.spread(1, mmap.PAGESIZE)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "first" in caplog.text


def test_no_information_is_one_log_line(monkeypatch, caplog):
    monkeypatch.setattr(numa, "nodes", lambda cpus: ())
    numa.known_nodes.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "moetier.machine.numa"):
            numa.spread(0, mmap.PAGESIZE)
            numa.spread(0, mmap.PAGESIZE)
        assert len(caplog.records) == 1
        assert "tells nothing" in caplog.text
    finally:
        numa.known_nodes.cache_clear()


WORKERS = """
import os, sys, time
from pathlib import Path
from moetier.machine import numa
from moetier.machine.numa import Node
first, second = map(int, sys.argv[1:])
numa.nodes = lambda cpus: (Node(0, (first,)), Node(1, (second,)))
from moetier.kernels.cpu import ThreadPool

def masks():
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    return sorted(tuple(os.sched_getaffinity(task)) for task in tasks if task != os.getpid())

pool = ThreadPool(4, (first, second))
for _ in range(30_000):  # each worker asks for its CPUs when it first runs
    if masks() == [(first,), (second,), (second,)]:
        break
    time.sleep(0.01)
print(masks())
"""


@pytest.mark.skipif(len(allowed_cpus()) < 2, reason="one CPU only")
def test_workers_are_pinned_to_their_node():
    """Two CPUs passed off as nodes: threads 0 and 1 belong to the first, 2 and 3 to the second; 0 is the caller."""
    first, second = allowed_cpus()[:2]
    command = [sys.executable, "-c", WORKERS, str(first), str(second)]
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert found.stdout.strip() == str([(first,), (second,), (second,)])


def test_a_pool_on_this_machine_keeps_its_cpus():
    pool = ThreadPool(2)
    assert pool.cpus == allowed_cpus()
    pool.close()
