"""Peak memory of a build and of a served model, against what `moetier serve` says it will take.

    python benchmarks/serve/memory.py MODEL [--shares 100% 25% 0]

For every share of the experts in DRAM: the server is started, asked once, and the peak resident memory (VmHWM) of its
worker process, which holds the records, is read. Prints a table and JSON; exit 1 where a peak is above the budget.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from moetier.budget import ENGINE_BYTES

MOETIER = str(Path(sys.executable).with_name("moetier"))


def main() -> int:
    """Measure the build, then the server at every share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shares", nargs="+", default=["100%", "25%", "0"])
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        subprocess.run([MOETIER, "store", "build", str(arguments.model), str(store), "--json"], check=True)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
        rows.append({"what": "store build", "peak_mib": peak})
        rows += [serve(arguments.model, store, share, Path(folder)) for share in arguments.shares]
    for row in rows:
        print(row)
    print(json.dumps(rows))
    return int(any(row["peak_mib"] > row["budget_mib"] for row in rows[1:]))


def serve(model: Path, store: Path, share: str, folder: Path) -> dict[str, Any]:
    """Start, ask, read the worker's peak, stop."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [MOETIER, "serve", str(model), "--store", str(store), "--dram-records", share, "--port", str(port)]
    command += ["--log-file", str(folder / "log"), "--kv-cache-gib", "0.25", "--json", "--", "--max-model-len", "1024"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            placement = json.loads(process.stdout.readline())
            ask(process, port, model.resolve().name)
            family = psutil.Process(process.pid).children(recursive=True)
            peak = max(high_water(member.pid) for member in family)
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(120)
    told = sum(tier["bytes"] for tier in placement["tiers"] if tier["tier"] != "disk")
    return {
        "what": f"serve, {share} of the experts in DRAM",
        "records_mib": placement["tiers"][0]["bytes"] >> 20,
        "peak_mib": peak,
        "budget_mib": (told + ENGINE_BYTES) >> 20,
        "exit_code": code,
    }


def ask(process: subprocess.Popen[str], port: int, name: str) -> None:
    """One completion that routes to most experts, once the server answers."""
    body = json.dumps({"model": name, "prompt": list(range(100, 612)), "max_tokens": 64}).encode()
    while process.poll() is None:
        try:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=300):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server did not start: exit code {process.returncode}")


def high_water(pid: int) -> int:
    """Peak resident memory of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) >> 10
    return 0


if __name__ == "__main__":
    sys.exit(main())
