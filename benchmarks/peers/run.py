"""The same routed-expert layer through our kernels and through each peer, by pairs: `python -m benchmarks.peers.run`.

Same threads, same shape, same routing: every round gives the same tokens to both of a pair in turn, in a new order
every round; medians of at least 7 rounds. Each contestant has a process of its own that stands still while the other
runs. A round in which other processes took noticeable CPU time is measured again. Exit 1 where no peer ran.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.base import PeerAbsentError
from benchmarks.peers.contestants import OURS, Contestant, makers
from moetier.doctor.measure.kernel import describe_machine, parse_shape

ROUNDS = 9
MOST_TRIES = 27
QUIET_SHARE = 0.05
"""CPU time of other processes, as a share of all CPUs' time in a round, up to which the round counts."""


def cpu_seconds(pair: Sequence[Contestant]) -> tuple[float, float]:
    """CPU seconds since boot of everything, and of this run."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    own = time.process_time() + sum(contestant.cpu_seconds() for contestant in pair)
    return (user + nice + system + irq + softirq + steal) / 100, own


def one_round(pair: Sequence[Contestant], tokens: int, seed: int, cpus: int) -> tuple[dict[str, float], float]:
    """Seconds of each, and the share of the CPUs that others took meanwhile."""
    all_before, own_before = cpu_seconds(pair)
    start = time.perf_counter()
    seconds = {contestant.name: contestant.turn(tokens, seed) for contestant in random.sample(pair, len(pair))}
    all_after, own_after = cpu_seconds(pair)
    others = (all_after - all_before) - (own_after - own_before)
    return seconds, others / ((time.perf_counter() - start) * cpus)


def measure(pair: Sequence[Contestant], tokens: int) -> dict[str, Any]:
    cpus = describe_machine()["cpus"]
    one_round(pair, tokens, 0, cpus)  # graphs, pages
    quiet: list[dict[str, float]] = []
    disturbed: list[tuple[float, dict[str, float]]] = []
    while len(quiet) < ROUNDS and len(quiet) + len(disturbed) < MOST_TRIES:
        seconds, others = one_round(pair, tokens, 1 + len(quiet) + len(disturbed), cpus)
        if others <= QUIET_SHARE:
            quiet.append(seconds)
        else:
            disturbed.append((others, seconds))
    missing = ROUNDS - len(quiet)
    used = quiet + [seconds for _, seconds in sorted(disturbed, key=lambda item: item[0])[:missing]]
    ours, theirs = (contestant.name for contestant in pair)
    return {
        "M": tokens,
        "ms": {name: statistics.median(seconds[name] for seconds in used) * 1e3 for name in (ours, theirs)},
        "ratio": statistics.median(seconds[theirs] / seconds[ours] for seconds in used),
        "quiet_rounds": len(quiet),
        "rounds": len(used),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="4096,2048,64,6", help="a name of moetier bench kernel, or H,I,E,K")
    parser.add_argument("--threads", type=int, default=describe_machine()["cpus"])
    parser.add_argument("--tokens", default="1,4,16,64,512")
    parser.add_argument("--only", default="", help="peers to run, comma-separated; default all")
    parser.add_argument("--cache", type=Path, default=Path(".cache/peers"), help="where peers are downloaded and built")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    geometry = parse_shape(args.shape)
    cache = args.cache.resolve()
    known = [name for name in makers(geometry, args.threads, cache) if name != OURS]
    chosen = args.only.split(",") if args.only else known
    if unknown := set(chosen) - set(known):
        parser.error(f"--only {','.join(sorted(unknown))}: expected some of {', '.join(known)}")
    result: dict[str, Any] = {"machine": describe_machine(), "shape": args.shape, "threads": args.threads}
    result |= {"rows": [], "absent": {}}
    ours = Contestant(OURS, geometry, args.threads, cache)
    for name in chosen:
        try:
            peer = Contestant(name, geometry, args.threads, cache)
        except PeerAbsentError as error:
            result["absent"][name] = str(error)
            print(f"skipped {name}: {error}", file=sys.stderr)
            continue
        for tokens in map(int, args.tokens.split(",")):
            row = measure((ours, peer), tokens)
            result["rows"].append({"peer": name, **row})
            cells = ", ".join(f"{which} {ms:.1f}" for which, ms in row["ms"].items())
            undisturbed = f"{row['quiet_rounds']} of {row['rounds']} rounds undisturbed"
            print(f"M={tokens}: {cells} ms, {row['ratio']:.2f} times as long ({undisturbed})", flush=True)
        peer.close()
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    ours.close()
    return 0 if result["rows"] else 1


if __name__ == "__main__":
    sys.exit(main())
