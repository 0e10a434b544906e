"""Fairness: how long running streams wait between two tokens while a long prompt enters.

    python benchmarks/serve/fairness.py [--streams 1 2 4 8] [--chunks 512 derived] [--prompt 1800] [--rounds 5]
        [--model FOLDER --store FOLDER] [--options "--slots 28 ..."] [--vllm "--max-num-seqs 64 ..."] [--json FILE]

For every chunk (vLLM's --max-num-batched-tokens; derived: as `moetier serve` chooses it) a server is started. Some
streams decode, then the prompt enters. Gaps are measured where tokens leave the engine (step_log.py) and at the client,
and the bound in the same rounds: the longest step that held a part of the prompt, and one gap as it is without a
prompt, for the way to the client. The same prompt alone says what a chunk takes without streams.

Prints a table and JSON. A round that does not show what it should is refused, with its reason, and repeated; a cell
with too few others has the reason instead of figures. Exit code 1: a p99 gap above its bound, two chunks between two
tokens of a stream, or a cell without figures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import platform
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import steps as engine
from server import MODEL, ROOT, start

BEFORE, AFTER = 40, 20
"""Tokens of each stream before the prompt comes, and after its first token."""
LONGEST = 1500
"""Tokens of a stream, if nobody stops it."""
BEAT = 0.001
"""Seconds that the client sleeps again and again: by how much one was longer, so late it may have seen a token."""


def main() -> int:
    """Measure every chunk with every number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--chunks", nargs="+", default=["512", "derived"])
    parser.add_argument("--prompt", type=int, default=1800)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / MODEL)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--options", default="--dram-records 25%", help="for moetier serve")
    parser.add_argument("--vllm", default="", help="for vLLM")
    parser.add_argument("--schedules-ahead", action="store_true", help="as vLLM does on GPUs")
    parser.add_argument("--most-foreign-cpus", type=float, default=0.25, help="that other processes may use meanwhile")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    machine = f"{platform.machine()}, {len(psutil.Process().cpu_affinity() or [])} CPUs"
    report = {"machine": machine, "model": arguments.model.name, "options": arguments.options, "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        for chunk in arguments.chunks:
            for row in of_chunk(Path(folder), chunk, arguments):
                rows.append(row)
                print(row, flush=True)
                if arguments.json:  # each time, so that a run that is cut short leaves what it has
                    arguments.json.write_text(json.dumps(report, indent=1))
    print(table(rows))
    print(json.dumps(report))
    return int(any(row["reason"] or row["p99_ms"] > row["bound_ms"] for row in rows))


def of_chunk(folder: Path, chunk: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each number of streams, from one server."""
    log = folder / f"steps-{chunk}"
    scheduler = "step_log.AsyncStepLog" if arguments.schedules_ahead else "step_log.StepLog"
    vllm = ["--no-enable-prefix-caching", "--scheduler-cls", scheduler, *shlex.split(arguments.vllm)]
    vllm += [] if chunk == "derived" else ["--max-num-batched-tokens", chunk]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {"STEP_LOG": str(log), "PYTHONPATH": paths}
    options = [*shlex.split(arguments.options), "--explain"]
    process, port = start(folder, chunk, options, vllm, environment, arguments.model, arguments.store)
    try:
        bench = Bench(port, arguments.model.name, arguments.prompt, arguments.most_foreign_cpus, log, process.pid)
        count = arguments.rounds
        alone = [step.seconds for one in bench.rounds(0, count) if not one.reason for step in one.entering]
        for streams in arguments.streams:
            yield {"chunk": chunk, "streams": streams, **figures(bench.rounds(streams, count), count, alone)}
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


@dataclass(frozen=True)
class Round:
    """One prompt among streams. Gaps in seconds, at the client and of the engine; reason: why it does not count."""

    before: list[float]
    client: list[float]
    engine: list[float]
    entering: list[engine.Step]
    chunks_between: int
    ttft: float
    reason: str


@dataclass(frozen=True)
class Bench:
    """A server, what is asked of it, and where its engine logs."""

    port: int
    model: str
    prompt: int
    most_foreign: float
    log: Path
    pid: int

    def rounds(self, streams: int, count: int) -> list[Round]:
        """So many that count, and those that were refused meanwhile; no more than twice as many are tried.

        Before them one in which vLLM makes its kernels for steps of these sizes.
        """
        self._round(streams)
        found: list[Round] = []
        while len(found) < 2 * count and sum(not one.reason for one in found) < count:
            found.append(self._round(streams))
        return found

    def _round(self, streams: int) -> Round:
        offset = self.log.stat().st_size if self.log.exists() else 0
        cpu, began = self._foreign(), time.perf_counter()
        running, long, entered, late = asyncio.run(self._measure(streams))
        foreign = (self._foreign() - cpu) / (time.perf_counter() - began)
        time.sleep(0.3)  # until the engine has heard that the streams are gone
        steps, first = engine.read(self.log, offset), long.times[0]
        held = [step for step in engine.entering(steps, long.name) if step.of(long.name)]
        client = [gap for one in running for gap in gaps(one.times, entered, first)]
        usual = statistics.median(engine.gaps(steps, steps, "short") or [0.0])
        return Round(
            before=[gap for one in running for gap in gaps(one.times, 0.0, entered)],
            client=client,
            engine=engine.gaps(steps, engine.entering(steps, long.name), "short"),
            entering=held,
            chunks_between=engine.most_between(steps, long.name, "short"),
            ttft=first - entered,
            reason=self._reason(running, first, sum(step.of(long.name) for step in held), foreign, late, usual),
        )

    def _reason(
        self, running: Sequence[Stream], first: float, seen: int, foreign: float, late: float, usual: float
    ) -> str:
        if seen != self.prompt:
            return f"the engine computed {seen} of the prompt's {self.prompt} tokens"
        if any(one.times[-1] <= first for one in running):
            return "a stream ended before the prompt was in"
        if foreign > self.most_foreign:
            return f"other processes used {foreign:.2f} CPUs"
        if running and late > usual:
            return f"the client itself was up to {1e3 * late:.1f} ms late, and a usual step takes {1e3 * usual:.1f}"
        return ""

    async def _measure(self, streams: int) -> tuple[list[Stream], Stream, float, float]:
        """The streams, the prompt, when that was sent, and how late the client was at most in a gap that counts."""
        base = f"http://127.0.0.1:{self.port}/v1"
        async with httpx.AsyncClient(base_url=base, timeout=600) as client, asyncio.TaskGroup() as tasks:
            running = [Stream(client, self.model, f"short-{at}", 16, LONGEST) for at in range(streams)]
            long, heart = Stream(client, self.model, "long", self.prompt, 1), Heart()
            for one in running:
                tasks.create_task(one.run())
            beating = tasks.create_task(heart.beat())
            await reach(running, BEFORE)
            entered, heart.late = time.perf_counter(), 0.0
            await long.run()
            await reach(running, 1 + most_tokens(running))  # the last gaps end behind the prompt's first token
            beating.cancel()
            await reach(running, AFTER + most_tokens(running))
            for one in running:
                one.done = True
        return running, long, entered, heart.late

    def _foreign(self) -> float:
        """CPU seconds of the machine that were neither the server's nor ours, since some moment."""
        used = psutil.cpu_times()
        whole = used.user + used.nice + used.system + used.irq + used.softirq
        server = psutil.Process(self.pid)
        own = [one.cpu_times() for one in (psutil.Process(), server, *server.children(recursive=True))]
        return float(whole - sum(one.user + one.system for one in own))


class Heart:
    """Shows how late this process sees what happens: because it has no CPU, or is busy with something else."""

    def __init__(self) -> None:
        self.late = 0.0

    async def beat(self) -> None:
        """Until it is cancelled."""
        while True:
            slept = time.perf_counter()
            try:
                await asyncio.sleep(BEAT)
            finally:  # cancelled or not
                self.late = max(self.late, time.perf_counter() - slept - BEAT)


class Stream:
    """One request, written before it is timed: when each of its tokens came."""

    def __init__(self, client: httpx.AsyncClient, model: str, name: str, prompt: int, tokens: int) -> None:
        self.times: list[float] = []
        self.done, self.name, self._client = False, name, client
        ids = [random.randrange(100, 4000) for _ in range(prompt)]
        asked = {"model": model, "prompt": ids, "max_tokens": tokens, "temperature": 0}
        self._asked = json.dumps(asked | {"stream": True, "ignore_eos": True}).encode()

    async def run(self) -> None:
        """Until it has all its tokens, or `done` is set."""
        headers = {"X-Request-Id": self.name, "Content-Type": "application/json"}
        async with self._client.stream("POST", "/completions", content=self._asked, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():  # not parsed: the client shares the CPUs with the server
                if line.startswith("data: {"):
                    self.times.append(time.perf_counter())
                if self.done:
                    return
        self.done = True


def most_tokens(running: Sequence[Stream]) -> int:
    """That a stream has by now."""
    return max((len(one.times) for one in running), default=0)


async def reach(running: Sequence[Stream], tokens: int) -> None:
    """Wait until every stream has so many tokens, or all that it gets."""
    while any(len(one.times) < tokens and not one.done for one in running):
        await asyncio.sleep(0.005)


def gaps(times: list[float], begin: float, end: float) -> list[float]:
    """Between tokens, where the later one came in [begin, end + what it was waiting for]."""
    return [later - earlier for earlier, later in itertools.pairwise(times) if later >= begin and earlier <= end]


def figures(tried: Sequence[Round], count: int, alone: Sequence[float]) -> dict[str, Any]:
    """Of the rounds that count, in milliseconds; gaps by p50, p99 and the longest. reason: why there are too few."""
    rounds = [one for one in tried if not one.reason]
    refused = [one.reason for one in tried if one.reason]
    if len(rounds) < count:
        return {"rounds": len(rounds), "refused": len(refused), "reason": refused[-1]}
    client, of_engine = ([gap for one in rounds for gap in getattr(one, name)] for name in ("client", "engine"))
    held = [step.seconds for one in rounds for step in one.entering]
    usual = statistics.median(gap for one in rounds for gap in one.before)
    between = max(one.chunks_between for one in rounds)
    reason = f"{between} chunks between two tokens of a stream" if between > 1 else ""
    found = {
        "gap_before_ms": usual,
        "p50_ms": at(client, 0.5),
        "p99_ms": at(client, 0.99),
        "max_ms": max(client),
        "engine_p99_ms": at(of_engine, 0.99),
        "bound_ms": max(held) + usual,
        "chunk_ms": statistics.median(held),
        "longest_chunk_ms": max(held),
        **({"chunk_alone_ms": statistics.median(alone)} if alone else {}),
        "ttft_ms": statistics.median(one.ttft for one in rounds),
    }
    tokens = max(step.of("long") for one in rounds for step in one.entering)
    counts = {"chunk_tokens": tokens, "chunks": len(rounds[0].entering), "gaps": len(client)}
    counts |= {"rounds": len(rounds), "refused": len(refused)}
    return {name: round(1e3 * value, 1) for name, value in found.items()} | counts | {"reason": reason}


def at(values: Sequence[float], share: float) -> float:
    """Percentile, the value that this share of all does not exceed."""
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For a document."""
    names = list(max(rows, key=len))
    lines = [" | ".join(names), " | ".join("---" for _ in names)]
    lines += [" | ".join(str(row.get(name, "–")) for name in names) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
