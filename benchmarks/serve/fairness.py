"""Fairness: how long running streams wait between two tokens while a long prompt enters.

    python benchmarks/serve/fairness.py [--streams 1 2 4 8] [--chunks 128 512 2048] [--prompt 1800] [--rounds 3]

For every chunk size (vLLM's --max-num-batched-tokens) a server on the bundled model is started. Some streams decode;
then a prompt of as many tokens as the model has positions for enters, and the gaps between the tokens of each stream
are measured until its first token comes. A chunk's time is that of the prompt over its chunks. Prints a table and JSON;
exit 1 where the p99 gap is above two chunks, that is where a stream waited for more than the chunk it was in. It wants
a quiet machine: where the client does not get the CPU, tokens pile up before it and the gaps are the client's (a median
gap far below a step's time says so).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from server import MODEL, start

BEFORE, AFTER = 40, 20
"""Tokens of each stream before the prompt comes, and after its first token."""


def main() -> int:
    """Measure every chunk size with every number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--prompt", type=int, default=1800)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dram-records", default="25%")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for chunk in arguments.chunks:
            process, port = start(
                Path(folder),
                str(chunk),
                ["--dram-records", arguments.dram_records],
                ["--max-num-batched-tokens", str(chunk), "--no-enable-prefix-caching"],
            )
            try:
                for streams in arguments.streams:
                    rows.append(row(chunk, streams, arguments.prompt, measured(port, streams, arguments)))
                    print(rows[-1], flush=True)
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(120)
    print(table(rows))
    cpus = len(psutil.Process().cpu_affinity() or [])
    report = {"machine": f"{platform.machine()}, {cpus} CPUs", "dram_records": arguments.dram_records, "rows": rows}
    print(json.dumps(report))
    return int(any(one["p99_gap_ms"] > 2 * one["chunk_ms"] for one in rows))


def measured(port: int, streams: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rounds, after one in which vLLM makes its kernels for steps of these sizes."""
    return [asyncio.run(measure(port, streams, arguments.prompt)) for _ in range(1 + arguments.rounds)][1:]


class Stream:
    """One stream: when each of its tokens came."""

    def __init__(self, client: httpx.AsyncClient, prompt: list[int], tokens: int) -> None:
        self.times: list[float] = []
        self._client, self._prompt, self._tokens = client, prompt, tokens
        self.done = False

    async def run(self) -> None:
        """Until it has all its tokens, or `done` is set."""
        asked = {"model": MODEL, "prompt": self._prompt, "max_tokens": self._tokens, "temperature": 0}
        asked |= {"stream": True, "ignore_eos": True}
        async with self._client.stream("POST", "/completions", json=asked) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():  # not parsed: the client shares the CPUs with the server
                if line.startswith("data: {"):
                    self.times.append(time.perf_counter())
                if self.done:
                    return


async def measure(port: int, streams: int, prompt: int) -> dict[str, Any]:
    """One long prompt among `streams`: gaps before and while it enters, and its time to first token, in seconds."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1", timeout=600) as client:
        running = [Stream(client, random_prompt(16), 1500) for _ in range(streams)]
        tasks = [asyncio.create_task(one.run()) for one in running]
        await reach(running, BEFORE)
        entered = time.perf_counter()
        long = Stream(client, random_prompt(prompt), 1)
        await long.run()
        first = long.times[0]
        await reach(running, max(len(one.times) for one in running) + AFTER)
        for one in running:
            one.done = True
        await asyncio.gather(*tasks)
    before = [gap for one in running for gap in gaps(one.times, 0.0, entered)]
    while_it = [gap for one in running for gap in gaps(one.times, entered, first)]
    return {"before": before, "while": while_it, "ttft": first - entered}


def random_prompt(tokens: int) -> list[int]:
    """Ids that no prefix cache has seen."""
    return [random.randrange(100, 4000) for _ in range(tokens)]


async def reach(running: Sequence[Stream], tokens: int) -> None:
    """Wait until every stream has so many tokens."""
    while min(len(one.times) for one in running) < tokens:
        await asyncio.sleep(0.005)


def gaps(times: list[float], begin: float, end: float) -> list[float]:
    """Between tokens, where the later one came in [begin, end + what it was waiting for]."""
    found = []
    for earlier, later in itertools.pairwise(times):
        if later >= begin and earlier <= end:
            found.append(later - earlier)
    return found


def row(chunk: int, streams: int, prompt: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all rounds: gaps in milliseconds."""
    chunks = math.ceil(prompt / max(1, chunk - streams))
    entering = sorted(gap for one in rounds for gap in one["while"])
    ttft = statistics.median(one["ttft"] for one in rounds)
    return {
        "chunk": chunk,
        "streams": streams,
        "gap_before_ms": round(1e3 * statistics.median(gap for one in rounds for gap in one["before"]), 2),
        "median_gap_ms": round(1e3 * statistics.median(entering), 2),
        "p99_gap_ms": round(1e3 * entering[min(len(entering) - 1, math.ceil(0.99 * len(entering)) - 1)], 2),
        "max_gap_ms": round(1e3 * entering[-1], 2),
        "gaps": len(entering),
        "ttft_ms": round(1e3 * ttft, 1),
        "chunks": chunks,
        "chunk_ms": round(1e3 * ttft / chunks, 2),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """For a document."""
    names = list(rows[0])
    lines = [" | ".join(names), " | ".join("---" for _ in names)]
    lines += [" | ".join(str(one[name]) for name in names) for one in rows]
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
