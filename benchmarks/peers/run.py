"""Peers and ours on the same steps in one run: `python -m benchmarks.peers.run --help`, from the repository's root.

Each round draws one routing and gives it to every contestant in turn, in a new order every round; medians of at least 7
rounds. A round in which other processes took noticeable CPU time is measured again. Exit 1 where no peer ran.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.base import Peer, PeerAbsentError, Step
from moetier.bench.kernel import describe_machine, parse_shape
from moetier.formats import LayerGeometry

ROUNDS = 9
MOST_TRIES = 27
QUIET_SHARE = 0.05
"""CPU time of other processes, as a share of all CPUs' time in a round, up to which the round counts."""
SETTLE_SECONDS = 0.3
"""Between two contestants. The threads of llama.cpp go on polling after a call: with 0.01 s they took half of the next
contestant's time on 2 CPUs, whoever that was."""


def contestants(geometry: LayerGeometry, threads: int, cache: Path) -> dict[str, Callable[[], Peer]]:
    from benchmarks.peers.kt import Kt
    from benchmarks.peers.llama import Llama
    from benchmarks.peers.ours import Ours
    from benchmarks.peers.torch_bf16 import TorchBf16

    return {
        "moetier": lambda: Ours(geometry, threads),
        "llama-mxfp4": lambda: Llama(geometry, threads, "mxfp4", cache),
        "llama-q4_k": lambda: Llama(geometry, threads, "q4_k", cache),
        "torch-bf16": lambda: TorchBf16(geometry, threads),
        "kt-mxfp4": lambda: Kt(geometry, threads, "mxfp4", cache),
        "kt-bf16": lambda: Kt(geometry, threads, "bf16", cache),
    }


def cpu_times() -> tuple[float, float]:
    """Seconds of CPU time since boot: of everything, and of this process."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / 100, time.process_time()


def one_round(peers: list[Peer], step: Step, cpus: int) -> tuple[dict[str, float], float]:
    """Seconds of each peer, and the share of the CPUs that others took meanwhile."""
    all_before, own_before = cpu_times()
    start = time.perf_counter()
    seconds = {}
    for peer in random.sample(peers, len(peers)):
        time.sleep(SETTLE_SECONDS)  # let the threads of the one before stop spinning
        begin = time.perf_counter()
        peer.run(step)
        seconds[peer.name] = time.perf_counter() - begin
    all_after, own_after = cpu_times()
    others = (all_after - all_before) - (own_after - own_before)
    return seconds, others / ((time.perf_counter() - start) * cpus)


def measure(peers: list[Peer], geometry: LayerGeometry, tokens: int) -> dict[str, Any]:
    rng = np.random.default_rng(tokens)
    cpus = describe_machine()["cpus"]
    for peer in peers:
        peer.run(Step.random(geometry, tokens, rng))  # graphs, pages
    quiet: list[dict[str, float]] = []
    disturbed: list[tuple[float, dict[str, float]]] = []
    while len(quiet) < ROUNDS and len(quiet) + len(disturbed) < MOST_TRIES:
        seconds, others = one_round(peers, Step.random(geometry, tokens, rng), cpus)
        if others <= QUIET_SHARE:
            quiet.append(seconds)
        else:
            disturbed.append((others, seconds))
    missing = ROUNDS - len(quiet)
    used = quiet + [seconds for _, seconds in sorted(disturbed, key=lambda item: item[0])[:missing]]
    medians = {peer.name: statistics.median(seconds[peer.name] for seconds in used) * 1e3 for peer in peers}
    return {"M": tokens, "ms": medians, "quiet_rounds": len(quiet), "rounds": len(used)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="4096,2048,64,6", help="a name of moetier bench kernel, or H,I,E,K")
    parser.add_argument("--threads", type=int, default=describe_machine()["cpus"])
    parser.add_argument("--tokens", default="1,4,16,64,512")
    parser.add_argument("--only", default="", help="names to run, comma-separated; default all")
    parser.add_argument("--cache", type=Path, default=Path(".cache/peers"), help="where peers are downloaded and built")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    geometry = parse_shape(args.shape)
    peers: list[Peer] = []
    absent = {}
    for name, make in contestants(geometry, args.threads, args.cache.resolve()).items():
        if args.only and name not in args.only.split(","):
            continue
        try:
            peers.append(make())
        except PeerAbsentError as error:
            absent[name] = str(error)
            print(f"skipped {name}: {error}", file=sys.stderr)
    rows = []
    for tokens in map(int, args.tokens.split(",")):
        rows.append(measure(peers, geometry, tokens))
        cells = ", ".join(f"{name} {ms:.1f}" for name, ms in rows[-1]["ms"].items())
        print(
            f"M={tokens}: {cells} ms ({rows[-1]['quiet_rounds']} of {rows[-1]['rounds']} rounds undisturbed)",
            flush=True,
        )
    result = {
        "machine": describe_machine(),
        "shape": args.shape,
        "threads": args.threads,
        "rows": rows,
        "absent": absent,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if any(not peer.name.startswith("moetier") for peer in peers) else 1


if __name__ == "__main__":
    sys.exit(main())
