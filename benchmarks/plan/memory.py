"""`moetier serve MODEL`: what its plan gives for device and host, and what the running server takes. One server start.

    python benchmarks/plan/memory.py MODEL [--store STORE] [--slots N] [--explained] [--seconds 600] [-- VLLM ARGUMENTS]

Without --slots and --dram-records the server plans by itself. It is asked one long and one short question, so that
buffers which are made at the first use count. --explained: `serve --explain` is begun before, and ended when it has
said its plan; the server must then start with that very plan.
Prints a table and, where $OUT names a folder, writes it there (--name). Stopped (SIGINT, SIGTERM, or --seconds are
over) it prints what it has by then. Exit 1: not ready, no answer, or another plan than explained.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from moetier.budget import GIB
from moetier.errors import MoetierError
from moetier.launch.planned import Given, Serving, plan_serving
from moetier.launch.process import check_port, runs_on_cpu

SECONDS, EXPLAIN_SECONDS, END_SECONDS, POLL = 600.0, 60.0, 20.0, 0.5
BEFORE_START = "vLLM's log:"
"""What `moetier serve` says when it has said its plan and is about to start vLLM."""


class Stopped(Exception):
    """By a signal, or because the time is over."""


@dataclass
class Found:
    """Of a server; memory in bytes: once it has answered what is in use, before that the most that was."""

    state: str = "not started"
    seconds: float = 0.0
    device: int = 0
    host: int = 0
    plan_as_explained: bool | None = None

    def look(self, process: subprocess.Popen[bytes], device_before: int) -> None:
        self.device = max(self.device, device_used() - device_before)
        self.host = max(self.host, host_used(process))


def device_used() -> int:
    """Bytes in use on the first GPU by anybody; 0 without one."""
    if runs_on_cpu():
        return 0
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def host_used(process: subprocess.Popen[bytes]) -> int:
    """Proportional set size of the process and all below it that are still there."""
    total = 0
    try:
        root = psutil.Process(process.pid)
        for one in [root, *root.children(recursive=True)]:
            try:
                total += one.memory_full_info().pss
            except psutil.Error:
                continue
    except psutil.Error:
        return 0
    return total


def ask(url: str, name: str, words: int) -> None:
    body = {"model": name, "prompt": "one " * words, "max_tokens": 8, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer = json.load(urllib.request.urlopen(request, timeout=120))
    if answer["usage"]["completion_tokens"] != 8:
        raise Stopped(f"expected an answer of 8 tokens, found {answer['usage']}")


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=2).read()
    except OSError:
        return False
    return True


def start(command: Sequence[str], said: Path) -> subprocess.Popen[bytes]:
    """In a session of its own: signals to us end it by `end` alone."""
    with said.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def wait(process: subprocess.Popen[bytes], until: Callable[[], bool], most: float) -> float:
    """Seconds until that is so; Stopped where the process ends before, or it takes longer than `most`."""
    begun = time.monotonic()
    while not until():
        if process.poll() is not None:
            raise Stopped(f"moetier serve ended with {process.returncode}")
        if time.monotonic() - begun > most:
            raise Stopped(f"not ready after {most:.0f} s")
        time.sleep(POLL)
    return time.monotonic() - begun


def end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does; killed with all below it where it does not end by that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing is left to be stopped
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if process.poll() is not None:
        return
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"the server had not ended {END_SECONDS:.0f} s after SIGINT: killed", file=sys.stderr)
    for one in below:
        if one.is_running():
            one.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def planned_by(said: Path) -> list[str]:
    """The lines in which `serve` says its plan, and what lives where."""
    lines = said.read_text(errors="replace").splitlines() if said.exists() else []
    return [line.strip() for line in lines if line.startswith(("plan:", "your settings", "│"))]


def run(arguments: argparse.Namespace, folder: Path, found: Found) -> None:
    """Fills `found`; Stopped where it ends early."""
    url, said = f"http://127.0.0.1:{arguments.port}", folder / "said"
    command = [sys.executable, "-m", "moetier", "serve", str(arguments.model), "--store", str(arguments.store)]
    command += ["--build-store", "--port", str(arguments.port), "--log-file", str(folder / "log")]
    for option in ("slots", "dram_records"):
        given = getattr(arguments, option)
        command += [] if given is None else [f"--{option.replace('_', '-')}", given]
    vllm = ["--", *arguments.vllm] if arguments.vllm else []
    explained: list[str] = []
    if arguments.explained:
        process = start([*command, "--explain", *vllm], said)
        try:
            wait(process, lambda: BEFORE_START in said.read_text(errors="replace"), EXPLAIN_SECONDS)
        finally:
            process.kill()
            process.wait()
        explained = planned_by(said)
        print("\n".join(line for line in said.read_text(errors="replace").splitlines() if BEFORE_START not in line))
    before = device_used()
    process = start([*command, *vllm], said)
    found.state = "starting"

    def ready() -> bool:
        found.look(process, before)
        return answers(url)

    begun = time.monotonic()
    try:
        found.seconds = wait(process, ready, arguments.seconds)
        found.state = "ready"
        for words in (min(2000, arguments.context // 2), 8):
            ask(url, arguments.model.resolve().name, words)
        found.device = found.host = 0  # of a started server, not of its start
        found.look(process, before)
        found.state = "answered"
        found.plan_as_explained = planned_by(said) == explained if explained else None
    finally:
        found.seconds = found.seconds if found.state in ("ready", "answered") else time.monotonic() - begun
        end(process)
        print(said.read_text(errors="replace"))
        log = folder / "log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        wanted = ("memory", "KV cache", "raph captur", " took ", "rror")
        print("\n".join(line[-200:] for line in lines if any(word in line for word in wanted)))


def table(serving: Serving, found: Found) -> dict[str, dict[str, float]]:
    """Planned beside measured."""
    plan = serving.plan
    return {
        "start_s": {"planned": plan.metrics["start_s"][0], "measured": found.seconds},
        "device_GiB": {"planned": plan.placement.device_bytes / GIB, "measured": found.device / GIB},
        "host_GiB": {"planned": plan.placement.host_bytes / GIB, "measured": found.host / GIB},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--store", type=Path, help="built if it is not there; by default in a temporary folder")
    parser.add_argument("--slots")
    parser.add_argument("--dram-records")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the most that the start may take")
    parser.add_argument("--explained", action="store_true", help="the plan must be what `serve --explain` says")
    parser.add_argument("--name", default="plan-memory", help="of the JSON file in $OUT")
    parser.add_argument("vllm", nargs="*", help="behind --: arguments for vLLM")
    arguments = parser.parse_args()
    try:
        check_port("127.0.0.1", arguments.port)  # another server would answer in its place
        given = Given(arguments.dram_records, arguments.slots, tuple(arguments.vllm))
        serving = plan_serving(arguments.model, given, not runs_on_cpu())
    except MoetierError as error:
        parser.error(str(error))
    arguments.context = serving.plan.placement.wanted.context
    found = Found()

    def stop(number: int, _: object) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with tempfile.TemporaryDirectory() as folder:
        arguments.store = arguments.store or Path(folder) / "store"
        try:
            run(arguments, Path(folder), found)
        except (Stopped, OSError) as error:
            found.state += f", then {error}"
    rows = table(serving, found)
    for what, row in rows.items():
        print(f"{what:12} planned {row['planned']:8.2f}  measured {row['measured']:8.2f}")
    for name, parts in (("device", serving.plan.placement.device), ("host", serving.plan.placement.host)):
        print(f"{name}: " + ", ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items()))
    print(f"the server: {found.state}; its plan is the explained one: {found.plan_as_explained}")
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], f"{arguments.name}.json").write_text(json.dumps({**rows, **asdict(found)}, indent=1))
    return int(found.state != "answered" or found.plan_as_explained is False)


if __name__ == "__main__":
    sys.exit(main())
