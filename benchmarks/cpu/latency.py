"""How soon a call computes, and what an idle pool costs: `python benchmarks/cpu/latency.py --json latency.json`.

`start` is the time from a call until the last thread is at work, after so many microseconds without one; `call` that
of a whole layer call of one token on a layer so small that nothing is left but the call; `idle_share_of_a_cpu` what a
pool takes in 5 s without calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from moetier.contract import Family, LayerGeometry, RecordLayout
from moetier.kernels.cpu import CpuExperts, ThreadPool, start_time

IDLE_MICROSECONDS = (0, 10, 50, 90, 1000)
TRIES = 501
IDLE_SECONDS = 5


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle * 1e6, "quartile_low": low * 1e6, "quartile_high": high * 1e6}


def whole_calls(pool: ThreadPool) -> list[float]:
    """Seconds of calls of one token, one right after another."""
    geometry = LayerGeometry(32, 32, 1, 1)
    record = np.zeros(RecordLayout.of(geometry).stride + 64, np.uint8)
    address = np.array([-(-record.ctypes.data // 64) * 64], np.uint64)
    kernel = CpuExperts(geometry, Family(), pool, max_tokens=1)
    x, out = np.zeros((1, 32), np.uint16), np.empty((1, 32), np.uint16)
    ids, weights = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    seconds = []
    for _ in range(TRIES):
        start = time.perf_counter()
        kernel.forward(x, ids, weights, address, out)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    pool = ThreadPool(args.threads)
    result: dict[str, Any] = {"threads": pool.threads, "unit": "microseconds", "start": {}}
    for idle in IDLE_MICROSECONDS:
        result["start"][idle] = quartiles([start_time(pool, idle / 1e6) for _ in range(TRIES)])
    result["call"] = quartiles(whole_calls(pool))
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(IDLE_SECONDS)
    result["idle_share_of_a_cpu"] = (time.process_time() - before) / IDLE_SECONDS
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
