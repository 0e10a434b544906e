"""What the CPU kernels accept, refuse and say; threads, CPUs, instruction sets."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from moetier.contract import Family, LayerGeometry
from moetier.errors import SettingsError, StoreError
from moetier.kernels.cpu import ISA_VARIABLE, CpuExperts, ThreadPool, available_isas, start_time
from moetier.machine.limits import allowed_cpus, default_threads

from .support import assert_same_bits, expected, make_inputs, make_layer, run_forward

GEOMETRY = LayerGeometry(64, 64, experts=4, top_k=2)


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2)


@pytest.fixture(scope="module")
def layer():
    return make_layer(np.random.default_rng(0), GEOMETRY)


@pytest.fixture
def kernel(pool):
    return CpuExperts(GEOMETRY, Family(), pool, max_tokens=8)


@pytest.fixture
def step():
    x, ids, weights = make_inputs(np.random.default_rng(1), GEOMETRY, 3)
    ids[:] = [[0, 2], [2, 3], [3, 0]]
    return x, ids, weights


def addresses_of(layer, ids):
    return layer.addresses[list(ids)]


# Steps


def test_begin_lists_experts_and_pairs(kernel, step):
    experts, pairs = kernel.begin(*step)
    assert (experts.tolist(), pairs.tolist()) == ([0, 2, 3], [2, 2, 2])
    assert experts.dtype == pairs.dtype == np.int32


def test_forward_lists_experts_and_pairs(kernel, layer, step):
    experts, pairs = kernel.forward(*step, layer.addresses, np.empty((3, 64), np.uint16))
    assert (experts.tolist(), pairs.tolist()) == ([0, 2, 3], [2, 2, 2])


def test_no_tokens(kernel, layer):
    x, ids, weights = make_inputs(np.random.default_rng(1), GEOMETRY, 0)
    out = np.empty((0, 64), np.uint16)
    experts, pairs = kernel.forward(x, ids, weights, layer.addresses, out)
    assert experts.size == pairs.size == 0
    experts, _ = kernel.begin(x, ids, weights)
    kernel.down(0, np.empty(0, np.uint64))
    kernel.finish(out)
    assert experts.size == 0


def test_a_step_without_a_routed_expert_is_zero(kernel, layer, step):
    x, ids, weights = step
    kernel.begin(x, np.full_like(ids, -1), weights)
    out = np.full((3, 64), 7, np.uint16)
    kernel.finish(out)
    assert not out.any()


def test_begin_drops_an_unfinished_step(kernel, layer, step):
    kernel.begin(*step)
    kernel.gate_up(np.array([1], np.int32), addresses_of(layer, [2]))
    wanted = expected(layer, *step, Family())
    assert_same_bits(run_forward(kernel, layer, *step), wanted)


def test_forward_names_absent_experts(kernel, layer, step):
    addresses = layer.addresses.copy()
    addresses[[2, 3]] = 0
    with pytest.raises(StoreError, match=r"\[2, 3\]"):
        kernel.forward(*step, addresses, np.empty((3, 64), np.uint16))


def test_forward_ignores_absent_experts_that_are_not_routed(kernel, layer, step):
    addresses = layer.addresses.copy()
    addresses[1] = 0
    out = np.empty((3, 64), np.uint16)
    kernel.forward(*step, addresses, out)
    assert_same_bits(out, expected(layer, *step, Family()))


def test_forward_closes_a_split_step(kernel, layer, step):
    kernel.begin(*step)
    run_forward(kernel, layer, *step)
    with pytest.raises(RuntimeError, match="no step is open"):
        kernel.finish(np.empty((3, 64), np.uint16))


# Misuse


def test_calls_without_begin(pool, layer):
    kernel = CpuExperts(GEOMETRY, Family(), pool, max_tokens=8)
    with pytest.raises(RuntimeError, match="no step is open"):
        kernel.gate_up(np.array([0], np.int32), addresses_of(layer, [0]))
    with pytest.raises(RuntimeError, match="no step is open"):
        kernel.down(0, addresses_of(layer, [0]))
    with pytest.raises(RuntimeError, match="no step is open"):
        kernel.finish(np.empty((0, 64), np.uint16))


def test_misuse_is_refused_and_the_step_still_ends_right(kernel, layer, step):
    kernel.begin(*step)

    def gate_up(indices, ids):
        kernel.gate_up(np.array(indices, np.int32), addresses_of(layer, ids))

    out = np.empty((3, 64), np.uint16)
    with pytest.raises(RuntimeError, match="outside the list"):
        gate_up([0, 3], [0, 3])
    with pytest.raises(RuntimeError, match="outside the list"):
        gate_up([-1], [0])
    with pytest.raises(RuntimeError, match="twice"):
        gate_up([1, 1], [2, 2])
    with pytest.raises(RuntimeError, match="before its gate_up"):
        kernel.down(0, addresses_of(layer, [0]))
    gate_up([1, 0], [2, 0])
    with pytest.raises(RuntimeError, match="twice"):
        gate_up([2, 0], [3, 0])
    with pytest.raises(RuntimeError, match="ascending order"):
        kernel.down(1, addresses_of(layer, [2]))
    with pytest.raises(RuntimeError, match="before its gate_up"):
        kernel.down(0, addresses_of(layer, [0, 2, 3]))
    kernel.down(0, addresses_of(layer, [0, 2]))
    with pytest.raises(RuntimeError, match="ascending order"):
        kernel.down(0, addresses_of(layer, [0]))
    with pytest.raises(RuntimeError, match="every routed expert"):
        kernel.finish(out)
    with pytest.raises(RuntimeError, match="outside the list"):
        kernel.down(2, addresses_of(layer, [3, 3]))
    gate_up([2], [3])
    kernel.down(2, addresses_of(layer, [3]))
    kernel.finish(out)
    assert_same_bits(out, expected(layer, *step, Family()))
    with pytest.raises(RuntimeError, match="no step is open"):
        kernel.finish(out)


@pytest.mark.parametrize("offset", [1, 16, 32])
def test_records_must_be_aligned(kernel, layer, step, offset):
    with pytest.raises(ValueError, match="multiple of 64"):
        kernel.forward(*step, layer.addresses + np.uint64(offset), np.empty((3, 64), np.uint16))
    kernel.begin(*step)
    with pytest.raises(ValueError, match="multiple of 64"):
        kernel.gate_up(np.array([0], np.int32), layer.addresses[:1] + np.uint64(offset))
    with pytest.raises(ValueError, match="multiple of 64"):
        kernel.gate_up(np.array([0], np.int32), np.zeros(1, np.uint64))


def replaced(step, index, array):
    return tuple(array if i == index else part for i, part in enumerate(step))


@pytest.mark.parametrize(
    ("index", "array", "found"),
    [
        (0, np.zeros((3, 64), np.float64), r"x: expected uint16 or float32 \[any, 64\].*found float64 \[3, 64\]"),
        (0, np.zeros((3, 32), np.float32), r"found float32 \[3, 32\]"),
        (0, np.zeros(64, np.float32), r"found float32 \[64\]"),
        (0, np.zeros((3, 128), np.float32)[:, ::2], "strided"),
        (0, np.zeros((9, 64), np.float32), "at most 8 tokens, found 9"),
        (0, np.zeros((2, 64), np.float32), r"ids: expected int32 or int64 \[2, 2\].*found int32 \[3, 2\]"),
        (1, np.zeros((3, 2), np.int16), "found int16"),
        (1, np.zeros((3, 3), np.int32), r"found int32 \[3, 3\]"),
        (1, np.zeros((2, 3), np.int32).T, "strided"),
        (2, np.zeros((3, 2), np.float64), "weights: expected float32"),
        (2, np.zeros((2, 2), np.float32), r"found float32 \[2, 2\]"),
    ],
)
def test_wrong_inputs(kernel, layer, step, index, array, found):
    bad = replaced(step, index, array)
    with pytest.raises(ValueError, match=found):
        kernel.begin(*bad)
    with pytest.raises(ValueError, match=found):
        kernel.forward(*bad, layer.addresses, np.empty((bad[0].shape[0], 64), np.uint16))


def test_wrong_outputs_and_addresses(kernel, layer, step):
    out = np.empty((3, 64), np.uint16)
    with pytest.raises(ValueError, match="addresses: expected uint64"):
        kernel.forward(*step, layer.addresses.astype(np.int64), out)
    with pytest.raises(ValueError, match=r"addresses: expected uint64 \[4\]"):
        kernel.forward(*step, layer.addresses[:3].copy(), out)
    with pytest.raises(ValueError, match=r"out: expected uint16 \[3, 64\]"):
        kernel.forward(*step, layer.addresses, out[:2])
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernel.forward(*step, layer.addresses, out)
    kernel.begin(*step)
    with pytest.raises(ValueError, match="addresses"):
        kernel.gate_up(np.array([0, 1], np.int32), layer.addresses[:1].copy())
    with pytest.raises(ValueError, match="first"):
        kernel.down(-1, layer.addresses[:1].copy())
    with pytest.raises(ValueError, match="out"):
        kernel.finish(np.empty((2, 64), np.uint16))


@pytest.mark.parametrize(("first", "count"), [(0, 3), (2, 4), (-1, 1), (4, 1), (0, 0), (1, None)])
def test_slices_that_no_rank_holds(pool, first, count):
    geometry = LayerGeometry(64, 128, experts=2, top_k=1, slices=4)
    with pytest.raises(SettingsError, match="power of two"):
        CpuExperts(geometry, Family(), pool, first_slice=first, slice_count=count)


@pytest.mark.parametrize("isa", available_isas())
def test_workspace_is_stated(pool, isa):
    small = CpuExperts(GEOMETRY, Family(), pool, isa=isa, max_tokens=8).workspace_bytes
    large = CpuExperts(GEOMETRY, Family(), pool, isa=isa, max_tokens=1032).workspace_bytes
    per_token = (large - small) / 1024
    wide, padding = (2 * 64 * 2, 2 * 64) if isa == "amxbf16" else (0, 0)  # a cache line more for each of two pairs
    assert 0 <= per_token - (64 * 5.25 + 2 * 64 * 1.25 + wide) <= 32 + padding


# Threads and CPUs


def test_two_threads_cannot_share_an_object(layer, pool):
    """Whoever finds it busy gets an error; every call that is let in gives the right bits."""
    geometry = LayerGeometry(256, 256, experts=4, top_k=2)
    big = make_layer(np.random.default_rng(2), geometry)
    step = make_inputs(np.random.default_rng(3), geometry, 64)
    kernel = CpuExperts(geometry, Family(), pool, max_tokens=64)
    wanted = expected(big, *step, Family())
    outcomes = []

    def call():
        for _ in range(50):
            try:
                assert_same_bits(run_forward(kernel, big, *step), wanted)
                outcomes.append("ran")
            except RuntimeError as error:
                outcomes.append("busy" if "one step at a time" in str(error) else str(error))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 150
    assert "ran" in outcomes
    assert set(outcomes) <= {"ran", "busy"}


def test_objects_on_one_pool_take_turns(layer, pool, step):
    wanted = expected(layer, *step, Family())
    kernels = [CpuExperts(GEOMETRY, Family(), pool, max_tokens=8) for _ in range(3)]
    failures = []

    def call(kernel):
        try:
            for _ in range(200):
                assert_same_bits(run_forward(kernel, layer, *step), wanted)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=call, args=(kernel,)) for kernel in kernels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_idle_pool_takes_no_cpu_time(layer, step):
    """Workers look for the next call for a moment only, then sleep."""
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count threads' time in nanoseconds")
    kernel = CpuExperts(GEOMETRY, Family(), ThreadPool(3), max_tokens=8)
    run_forward(kernel, layer, *step)
    time.sleep(0.05)
    before = worker_cpu_seconds()
    time.sleep(1.0)
    assert worker_cpu_seconds() - before < 0.01


def worker_cpu_seconds():
    """CPU time of this process's threads but the calling one, by the scheduler's nanosecond count."""
    mine = str(threading.get_native_id())
    tasks = (task for task in Path("/proc/self/task").iterdir() if task.name != mine)
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("idle", [0.0, 0.001], ids=["spinning", "asleep"])
def test_start_time_waits_for_every_thread(threads, idle):
    pool = ThreadPool(threads)
    assert all(0 <= start_time(pool, idle) < 60 for _ in range(20))
    with pytest.raises(ValueError, match="0 to 60 seconds"):
        start_time(pool, -1.0)
    pool.close()


def test_a_closed_pool(layer, step):
    pool = ThreadPool(2)
    kernel = CpuExperts(GEOMETRY, Family(), pool, max_tokens=8)
    pool.close()
    assert_same_bits(run_forward(kernel, layer, *step), expected(layer, *step, Family()))  # it keeps what it has
    with pytest.raises(RuntimeError, match="closed"):
        CpuExperts(GEOMETRY, Family(), pool)


def test_pool_defaults():
    assert allowed_cpus() == tuple(sorted(os.sched_getaffinity(os.getpid())))
    pool = ThreadPool()
    assert pool.threads == default_threads(allowed_cpus()) >= 1
    assert pool.cpus == allowed_cpus()


def test_more_threads_than_cpus(layer, step):
    kernel = CpuExperts(GEOMETRY, Family(), ThreadPool(2 * len(allowed_cpus()) + 1), max_tokens=8)
    for _ in range(20):
        assert_same_bits(run_forward(kernel, layer, *step), expected(layer, *step, Family()))


@pytest.mark.parametrize(("threads", "cpus"), [(0, None), (1, []), (1, [100_000])])
def test_pools_that_cannot_be(threads, cpus):
    with pytest.raises(SettingsError):
        ThreadPool(threads, cpus)


def worker_affinities():
    """Affinity of every other thread of this process that lives."""
    mine, found = threading.get_native_id(), {}
    for thread in (int(task.name) for task in Path("/proc/self/task").iterdir()):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            if thread != mine:
                found[thread] = os.sched_getaffinity(thread)
    return found


def test_workers_leave_the_creators_pinning(layer, step):
    """A thread that is pinned to one CPU makes a pool whose workers may use all allowed ones; it stays pinned."""
    if len(allowed_cpus()) < 2:
        pytest.skip("one CPU only")
    allowed = allowed_cpus()
    found = {}

    def create():
        before = set(worker_affinities())
        os.sched_setaffinity(0, {allowed[0]})
        kernel = CpuExperts(GEOMETRY, Family(), ThreadPool(2, allowed), max_tokens=8)
        run_forward(kernel, layer, *step)
        deadline = time.monotonic() + 300  # each worker asks for its CPUs when it first runs
        while time.monotonic() < deadline and any(
            cpus != set(allowed) for tid, cpus in worker_affinities().items() if tid not in before
        ):
            time.sleep(0.01)
        found.update({tid: cpus for tid, cpus in worker_affinities().items() if tid not in before})
        found["creator"] = os.sched_getaffinity(0)

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    assert found.pop("creator") == {allowed[0]}
    assert list(found.values()) == [set(allowed)]


# Instruction sets


def test_portable_is_always_there(monkeypatch):
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    assert available_isas()[-1] == "portable"


def test_an_environment_variable_forces_a_lower_one(monkeypatch, pool):
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    assert available_isas() == ("portable",)
    assert CpuExperts(GEOMETRY, Family(), pool, max_tokens=8).isa == "portable"


def test_unknown_instruction_sets_are_refused(monkeypatch, pool):
    with pytest.raises(SettingsError, match=r"isa='mmx'.*portable"):
        CpuExperts(GEOMETRY, Family(), pool, isa="mmx", max_tokens=8)
    monkeypatch.setenv(ISA_VARIABLE, "mmx")
    with pytest.raises(SettingsError, match=r"MOETIER_ISA='mmx'.*portable"):
        available_isas()


def test_the_callers_float_state_is_kept(layer, step):
    """A caller that flushes subnormals (as torch can) still gets the contract's bits, and keeps its setting."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    try:
        kernel = CpuExperts(GEOMETRY, Family(), ThreadPool(1), max_tokens=8)
        found = run_forward(kernel, layer, *step)
        assert (torch.tensor([1e-39]) * 1.0).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(found, expected(layer, *step, Family()))


STARTS = """
import resource
from moetier.errors import SettingsError
from moetier.kernels.cpu import ThreadPool
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
try:
    ThreadPool(256)
except SettingsError as error:
    print(error)
print(ThreadPool(2).threads)
"""


def test_threads_that_cannot_be_had_are_an_error():
    """It ended the process once: a thread that was started must be joined before the error leaves."""
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "expected to start 256 threads" in done.stdout
    assert done.stdout.endswith("2\n")
