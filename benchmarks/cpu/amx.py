"""Kernel sets of this machine beside each other: one routed-expert layer, same routing, same records, taking turns.

    python benchmarks/cpu/amx.py --json amx.json

`layer` times whole calls (64 experts, top-6 by default), `rows` calls in which every expert has exactly M tokens (4
experts, top-4), which shows from how many rows a kernel pays. Every result is compared with that of the first set.
Needs numpy and the built extension (benchmarks/cpu/machine.sh builds it with cmake alone).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetier.contract import Family, LayerGeometry
from moetier.doctor.measure.kernel import make_records
from moetier.kernels.cpu import CpuExperts, ThreadPool, integer_peak, read_bandwidth
from moetier.kernels.cpu.isa import machine_isas
from moetier.machine import limits as machine

ISAS = ("amxbf16", "amx", "avx512", "avx512vnni")
LAYER_TOKENS = (1, 4, 16, 64, 512)
ROWS_AN_EXPERT = (1, 2, 4, 6, 8, 12, 16, 17, 24, 32, 48, 64, 128, 512)
ROUNDS = 9


def make_step(geometry: LayerGeometry, tokens: int, rng: np.random.Generator) -> tuple[NDArray[Any], ...]:
    """Inputs of a call: x as bf16 bits [M, hidden], ids and weights [M, top_k]."""
    x = (rng.standard_normal((tokens, geometry.hidden), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    ids = np.argsort(rng.random((tokens, geometry.experts)), axis=1)[:, : geometry.top_k].astype(np.int32)
    return x, np.ascontiguousarray(ids), rng.random((tokens, geometry.top_k), np.float32)


def measure(
    geometry: LayerGeometry, pool: ThreadPool, isas: Sequence[str], tokens: Sequence[int], what: str
) -> Iterator[dict[str, Any]]:
    """A row for each number of tokens and kernel set: median and quartiles of ROUNDS calls."""
    memory, addresses = make_records(geometry)
    rng = np.random.default_rng(1)
    for count in tokens:
        kernels = {isa: CpuExperts(geometry, Family(10.0, True), pool, isa=isa, max_tokens=count) for isa in isas}
        times: dict[str, list[float]] = {isa: [] for isa in isas}
        differ = dict.fromkeys(isas, 0)
        distinct = []
        for turn in range(ROUNDS + 1):  # the first warms up
            step = make_step(geometry, count, rng)
            results = {}
            for isa in np.roll(isas, turn):
                results[isa] = np.empty((count, geometry.hidden), np.uint16)
                start = time.perf_counter()
                experts, _ = kernels[isa].forward(*step, addresses, results[isa])
                times[isa].append(time.perf_counter() - start)
            distinct.append(experts.size)
            for isa in isas:
                differ[isa] += int((results[isa] != results[isas[0]]).sum())
        weights = 3 * geometry.hidden * geometry.intermediate
        read = read_bandwidth(pool, memory) / 1e9
        for isa in isas:
            quarter, middle, three_quarters = statistics.quantiles(times[isa][1:], n=4)
            yield {
                "what": what,
                "M": count,
                "isa": isa,
                "threads": pool.threads,
                "us": middle * 1e6,
                "us_quartiles": [quarter * 1e6, three_quarters * 1e6],
                "gbps": statistics.median(distinct[1:]) * weights * 17 / 32 / middle / 1e9,
                "read_gbps": read,
                "gops": 2 * count * geometry.top_k * weights / middle / 1e9,
                "times_avx512": statistics.median(times["avx512"][1:]) / middle if "avx512" in times else None,
                "differ": differ[isa],
            }


def describe() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.machine(), "cpus": len(machine.allowed_cpus())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--threads", type=int, action="append", help="repeat for more; default all, then 1")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    isas = [isa for isa in ISAS if isa in machine_isas()]
    result: dict[str, Any] = {"machine": describe(), "isas": isas, "peaks": [], "rows": []}
    print(result["machine"], isas, flush=True)
    layer = LayerGeometry(args.hidden, args.intermediate, args.experts, args.top_k)
    few = LayerGeometry(args.hidden, args.intermediate, 4, 4)
    for threads in args.threads or (machine.default_threads(machine.allowed_cpus()), 1):
        pool = ThreadPool(threads)
        result["peaks"] += [
            {"isa": isa, "threads": threads, "gops": statistics.median(integer_peak(pool, isa) for _ in range(5)) / 1e9}
            for isa in isas
        ]
        print(*result["peaks"][-len(isas) :], sep="\n", flush=True)
        for geometry, what, tokens in ((layer, "layer", LAYER_TOKENS), (few, "rows", ROWS_AN_EXPERT)):
            fitting = [count for count in tokens if count <= 64 * threads]
            for row in measure(geometry, pool, isas, fitting, what):
                result["rows"].append(row)
                print(
                    f"{what:5} threads={threads:2} M={row['M']:3} {row['isa']:10} {row['us']:9.0f} us "
                    f"{row['gbps']:6.1f} of {row['read_gbps']:5.1f} GB/s {row['gops']:6.0f} GOP/s "
                    f"{row['times_avx512'] or 0:5.2f} x avx512, {row['differ']} differ",
                    flush=True,
                )
                if args.json:
                    args.json.write_text(json.dumps(result, indent=1) + "\n")
        pool.close()
    return int(any(row["differ"] for row in result["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
