"""What the machine's memory gives, as we measure it and as a program apart from us does, one after the other."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moetier.kernels.cpu import ThreadPool, available_isas, integer_peak, read_bandwidth
from moetier.kernels.cpu.measure import ReadWay, read_ways
from moetier.tiers.pages import map_touched

BYTES, PART = 512 << 20, 32 << 20
"""Of memory, and of one reading: each reads another part, which no cache holds any more."""
READINGS, ROUNDS = 8, 8
BUSY = 1.5
"""Runnable processes a CPU, beyond which two threads are seldom at work at once."""
LEAST, MOST = 0.85, 1.5
"""Of the best reading of the other. Readings are taken until both hold: a busy machine wants more of them."""


@pytest.fixture(scope="module")
def memory() -> NDArray[np.uint8]:
    return np.frombuffer(map_touched(BYTES), np.uint8)[:BYTES]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[Callable[[int, int], int]]:
    """The functions of reads.c."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or "avx2" not in available_isas():
        pytest.skip("wants a C compiler and AVX2")
    library = tmp_path_factory.mktemp("reads") / "reads.so"
    source = Path(__file__).with_name("reads.c")
    subprocess.run([compiler, "-O2", "-mavx2", "-shared", "-fPIC", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    functions = [loaded.plain, loaded.streams]
    for function in functions:
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
    return functions


def rate(function: Callable[[int, int], int], memory: NDArray[np.uint8], threads: int) -> float:
    part = memory.nbytes // threads
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(time.sleep, [0.0] * threads))  # its threads are there
        start = time.perf_counter()
        sums = pool.map(lambda at: function(memory.ctypes.data + at * part, part), range(threads))
        found = sum(sums) % 2**64
        seconds = time.perf_counter() - start
    assert found == int(memory.view(np.uint64).sum())
    return memory.nbytes / seconds


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", ["avx2", None], ids=["avx2", "widest"])
def test_our_reading_is_as_fast_as_another_s_and_no_faster_than_memory(
    isa: str | None, threads: int, memory: NDArray[np.uint8], others: list[Callable[[int, int], int]]
) -> None:
    pool = ThreadPool(threads)
    ways = read_ways(isa)
    ours, theirs = dict.fromkeys(ways, 0.0), 0.0
    parts = itertools.cycle(memory[at : at + PART] for at in range(0, BYTES, PART))
    for _ in range(ROUNDS):
        for _ in range(READINGS):
            theirs = max(theirs, *(rate(function, next(parts), threads) for function in others))
            ours = {way: max(ours[way], read_bandwidth(pool, next(parts), way)) for way in ways}
        if LEAST * theirs <= max(ours.values()) <= MOST * theirs:
            break
    else:
        if os.getloadavg()[0] > BUSY * len(os.sched_getaffinity(0)):
            pytest.skip(f"others keep this machine busy (load {os.getloadavg()[0]:.1f}): readings differ by themselves")
    pool.close()
    assert LEAST * theirs <= max(ours.values()) <= MOST * theirs, {way: speed / theirs for way, speed in ours.items()}


def test_every_width_of_this_machine_is_tried() -> None:
    names = [way.isa for way in read_ways()]
    assert names[0] == available_isas()[0]
    assert set(names) == {available_isas()[0], "portable", *({"avx2"} & set(available_isas()))}
    assert {way.isa for way in read_ways("portable")} == {"portable"}


@pytest.mark.parametrize("size", [0, 64, 192, 256, 4096 + 64, (1 << 20) + 64])
def test_any_size_is_read_in_any_way(size: int) -> None:
    pool = ThreadPool(2)
    for isa in available_isas():
        for way in read_ways(isa):
            assert read_bandwidth(pool, np.zeros(size, np.uint8), way) >= 0
    with pytest.raises(ValueError, match="READ_WAYS"):
        read_bandwidth(pool, np.zeros(64, np.uint8), ReadWay("portable", 99))
    pool.close()


@pytest.mark.parametrize("isa", available_isas())
def test_the_peak_of_a_kernel_set_is_a_number_of_products(isa: str) -> None:
    pool = ThreadPool(1)
    assert 1e8 < max(integer_peak(pool, isa) for _ in range(READINGS)) < 1e14
    pool.close()
