"""`moetier serve MODEL` without flags: what its plan gives for device and host, and what the running server takes.

    python benchmarks/plan/memory.py MODEL [--store STORE]

The store is built if it is not there. The server is asked one long and one short question first, so that buffers which
are made at the first use count. Prints a table and, where $OUT names a folder, writes plan-memory.json there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

from moetier.errors import MoetierError
from moetier.plan.hardware import GIB
from moetier.plan.serving import Given, plan_serving
from moetier.serve.launcher import check_port, runs_on_cpu

START_SECONDS, END_SECONDS, POLL = 240, 60, 0.5


def device_used() -> int:
    """Bytes in use on the first GPU by anybody; 0 without one."""
    if runs_on_cpu():
        return 0
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def host_used(process: subprocess.Popen[bytes]) -> int:
    """Proportional set size of the process and all below it."""
    root = psutil.Process(process.pid)
    return sum(one.memory_full_info().pss for one in [root, *root.children(recursive=True)])


def ask(url: str, name: str, words: int) -> None:
    body = {"model": name, "prompt": "one " * words, "max_tokens": 8, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=120).read()


def wait(url: str, process: subprocess.Popen[bytes], most: float) -> float:
    """Seconds until the server answers; SystemExit where it ends or takes longer than `most`."""
    start = time.monotonic()
    while time.monotonic() - start < most:
        if process.poll() is not None:
            sys.exit(f"moetier serve ended with {process.returncode}")
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).read()
        except OSError:
            time.sleep(POLL)
            continue
        return time.monotonic() - start
    sys.exit(f"the server was not ready after {most:.0f} s, so nothing was measured; give it longer (--start-seconds)")


def end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does; killed where it does not end by that."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"the server had not ended {END_SECONDS} s after SIGINT: killed", file=sys.stderr)
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--start-seconds", type=float, default=START_SECONDS, help="how long the server may take")
    arguments = parser.parse_args()
    try:
        check_port("127.0.0.1", arguments.port)  # another server would answer in its place
        plan = plan_serving(arguments.model, Given(), not runs_on_cpu()).plan
    except MoetierError as error:
        parser.error(str(error))
    before, url = device_used(), f"http://127.0.0.1:{arguments.port}"
    with tempfile.TemporaryDirectory() as folder:
        store = arguments.store or Path(folder) / "store"
        command = [sys.executable, "-m", "moetier", "serve", str(arguments.model), "--store", str(store)]
        log = Path(folder) / "log"
        process = subprocess.Popen([*command, "--build-store", "--port", str(arguments.port), "--log-file", str(log)])
        try:
            took = wait(url, process, arguments.start_seconds)
            for words in (min(2000, plan.placement.wanted.context // 2), 8):
                ask(url, arguments.model.resolve().name, words)
            device, host = device_used() - before, host_used(process)
        finally:
            end(process)
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            wanted = ("memory", "KV cache", "raph captur")
            print("\n".join(line[-200:] for line in lines if any(word in line for word in wanted)))
    table = {
        "start_s": {"planned": plan.metrics["start_s"][0], "measured": took},
        "device_GiB": {"planned": plan.placement.device_bytes / GIB, "measured": device / GIB},
        "host_GiB": {"planned": plan.placement.host_bytes / GIB, "measured": host / GIB},
    }
    for what, row in table.items():
        print(f"{what:12} planned {row['planned']:8.2f}  measured {row['measured']:8.2f}")
    for name, parts in (("device", plan.placement.device), ("host", plan.placement.host)):
        print(f"{name}: " + ", ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items()))
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "plan-memory.json").write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM before anything was measured"))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted before anything was measured")
