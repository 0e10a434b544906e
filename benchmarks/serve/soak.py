"""Soak: a server under steady traffic for some minutes; every answer checked, its memory watched.

    python benchmarks/serve/soak.py [--minutes 20] [--clients 4] [--dram-records 25%]

Starts `moetier serve` on the bundled model, lets each client ask items of the evaluation sets one after the other, and
prints a table and JSON: requests, HTTP errors, scores, throughput, what the tiers counted, and the resident memory of
all the server's processes after the first minute and at the end. At its end the server compares its tables, and the
bytes of every record in DRAM with their checksums. Exit 1 if a request failed, nothing was evicted, or the server did
not end cleanly.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from openai import OpenAI, OpenAIError
from server import MODEL, ROOT, start

from moetier_bench.eval.ask import Server, ask, client
from moetier_bench.eval.items import Item, load_set

TASKS = ("arithmetic", "copy", "json", "toolcalls")
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "glm45", "--reasoning-parser", "glm45")


def main() -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--dram-records", default="25%")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, port = start(
            Path(folder),
            "soak",
            ["--dram-records", arguments.dram_records, "--set", "check_at_end=true"],
            PARSERS,
            {"VLLM_ENFORCE_STRICT_TOOL_CALLING": "0"},
        )
        try:
            report = soak(process, port, arguments.minutes * 60, arguments.clients)
            report |= counted(port)
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(120)
        report["checked_at_end"] = checked(Path(folder) / "log")
    report = {"machine": machine(), "dram_records": arguments.dram_records, **report, "exit_code": code}
    for name, value in report.items():
        print(f"{name:28} {value}")
    print(json.dumps(report))
    sound = report["evictions"] and report["checked_at_end"] and not report["errors"] and not code
    return int(not sound)


def soak(process: subprocess.Popen[bytes], port: int, seconds: float, clients: int) -> dict[str, Any]:
    """Ask until the time is over."""
    server = Server(f"http://127.0.0.1:{port}/v1", MODEL, None, 256)
    items: list[Item] = [item for task in TASKS for item in load_set(ROOT / "models" / "eval" / f"{task}.jsonl")]
    end = time.monotonic() + seconds
    scores: dict[str, list[bool]] = {task: [] for task in TASKS}
    latencies, errors = [], []
    lock = threading.Lock()

    def asking(connected: OpenAI, number: int) -> None:
        position = number * len(items) // clients
        while time.monotonic() < end:
            begun = time.monotonic()
            try:
                result = ask(connected, server, items[position % len(items)])
            except OpenAIError as error:
                with lock:
                    errors.append(repr(error)[:200])
                continue
            with lock:
                scores[result.task].append(bool(result.correct))
                latencies.append(time.monotonic() - begun)
            position += 1

    with client(server.url, None, server.timeout) as connected, ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(asking, connected, number) for number in range(clients)]
        samples = watch(process, end)
        for one in asked:
            one.result()
    return {
        "clients": clients,
        "seconds": seconds,
        "requests": len(latencies),
        "errors": len(errors),
        "first_errors": errors[:3],
        "share_right": {task: round(sum(found) / len(found), 4) for task, found in scores.items() if found},
        "median_latency_s": round(statistics.median(latencies), 3) if latencies else None,
        "rss_mib_after_a_minute": samples[min(len(samples) - 1, 6)] if samples else None,
        "rss_mib_at_end": samples[-1] if samples else None,
        "rss_mib_all": samples,
    }


def counted(port: int) -> dict[str, int]:
    """What the tiers did, from /metrics. A record that stays in DRAM when all slots are full evicts another."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    names = {"hits": "hits", "misses": "misses", "evictions": "dram_fills", "store_reads": "store_reads"}
    return {
        name: int(
            sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"moetier_{metric}_total"))
        )
        for name, metric in names.items()
    }


def checked(log: Path) -> str:
    """What the server said of its tables and bytes at its end; empty if nothing."""
    found = [line for line in log.read_text(errors="replace").splitlines() if "records in DRAM have the right" in line]
    return found[-1].partition("moetier: ")[2] if found else ""


def watch(process: subprocess.Popen[bytes], end: float) -> list[int]:
    """Resident memory of all processes of the server in MiB, every ten seconds. (Shared pages count once a process.)"""
    samples = []
    while time.monotonic() < end:
        time.sleep(max(0.0, min(10.0, end - time.monotonic())))
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        samples.append(sum(member.memory_info().rss for member in family) >> 20)
    return samples


def machine() -> str:
    """What it ran on."""
    return (
        f"{platform.machine()}, {len(psutil.Process().cpu_affinity() or [])} CPUs, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    sys.exit(main())
