"""Faults of a hybrid server on a GPU: each engine has its own, all of them beside each other and one without.

    python benchmarks/hybrid/faults.py MODEL [--stop 30]

Wanted: a process that is stopped for less than the device's patience, Python's lock kept by a thread that waits for the
device, a record that is damaged under load and a disk that takes no more writes change no token; one that is stopped
for longer, a killed thread and a record that cannot be healed end the engine, with a reason where somebody is left to
say it, and no token that differs before. Prints a table and, where $OUT names a folder, writes faults.json there; exit
1 where a fault ends otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpus
import psutil
from engine import RESULT, ROOT, Engine, prompts_of, tiered

from moetier.store.build import build_store
from moetier.store.store import Store

sys.path.append(str(ROOT))
from tests.serve.damage import flip_a_bit_of_every_record, zero_the_weights

BEFORE_SECONDS = 1.0
"""Of load before the fault."""


@dataclass(frozen=True)
class Running:
    """One engine under load, and its files."""

    engine: Engine
    model: Path
    store: Path

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.engine.process.pid)


@dataclass(frozen=True)
class Fault:
    """What is done, and how the engine must end: `says` is in its reason; None: it answers as without the fault."""

    name: str
    do: Callable[[Running], None]
    ends: bool = False
    says: str = ""
    settings: tuple[tuple[str, Any], ...] = ()
    keep_lock: bool = False
    """Whether a thread waits for the device with Python's lock, which whoever helps with records on disk needs."""


def nothing(_: Running) -> None:
    """The engine whose answers are the right ones."""


def stop(seconds: float) -> Callable[[Running], None]:
    """SIGSTOP the process with its pool and mailbox: the device goes on alone."""

    def do(running: Running) -> None:
        for _ in range(4):  # a device that asked for nothing at that moment does not notice
            running.engine.process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            running.engine.process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
            if seconds >= 10 or running.engine.process.poll() is not None:
                return

    return do


def kill_a_thread(running: Running) -> None:
    """The kernel ends the whole process, as for any fault in a thread."""
    threads = [thread.id for thread in running.process.threads() if thread.id != running.process.pid]
    os.kill(threads[-1], signal.SIGKILL)


def damage(running: Running) -> None:
    """Flip a bit of every record of the store."""
    with Store.open(running.store) as opened:
        layers = len(opened.manifest.layers)
    for layer in range(layers):
        flip_a_bit_of_every_record(running.store, layer)


def damage_both(running: Running) -> None:
    """The checkpoint's weights too, so that nothing can be healed."""
    zero_the_weights(running.model)
    damage(running)


def full_disk(running: Running) -> None:
    """Nothing more can be written: no heat, no healed record."""
    running.process.rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))
    damage(running)


def faults(stop_seconds: float) -> list[Fault]:
    """The first is the one without."""
    return [
        Fault("none", nothing),
        Fault(f"stopped for {stop_seconds:.0f} s", stop(stop_seconds)),
        Fault(
            "stopped for longer than the patience",
            stop(5),
            True,
            "did not answer the device within 2 s",
            (("patience_seconds", 2.0),),
        ),
        Fault("Python's lock kept inside CUDA", nothing, keep_lock=True),
        Fault("a killed thread", kill_a_thread, True),
        Fault("damaged records", damage),
        Fault("damaged records and checkpoint", damage_both, True, "cannot be healed"),
        Fault("damaged records and a full disk", full_disk),
    ]


def run(fault: Fault, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One engine with its own copy of the model and its store, under one fault."""
    model, store = folder / "model", folder / "store"
    shutil.copytree(arguments.model, model)
    build_store(model, store)
    experts = json.loads((model / "config.json").read_text())["n_routed_experts"]
    reason = folder / "reason"
    settings: dict[str, Any] = {"store": str(store), "heat_file": str(folder / "heat"), "failure_file": str(reason)}
    settings |= {"dram_records": "20%", "heat_save_seconds": 1, "threads": arguments.threads}
    settings |= {"slots": round(0.12 * experts), **dict(fault.settings)}
    prompts = prompts_of(model, 16)
    load = {"prompts": prompts, "max_tokens": 96, "repeat_seconds": arguments.load_seconds}
    load["keep_lock"] = fault.keep_lock
    engine = Engine(
        [load],
        model=str(model),
        kv_cache_memory_bytes=1 << 29,
        max_model_len=1024,
        max_num_seqs=16,
        gpu_memory_utilization=0.02,
        **tiered(settings, "decode"),
    )
    begun = time.monotonic()
    engine.go()
    started = time.monotonic()
    time.sleep(BEFORE_SECONDS)
    fault.do(Running(engine, model, store))
    code = engine.end()
    said = json.loads(reason.read_text())["message"] if reason.exists() else ""
    found = [json.loads(line.removeprefix(RESULT)) for line in engine.lines if line.startswith(RESULT)]
    row = {"what": f"fault: {fault.name}", "code": code, "start_s": started - begun, "s": time.monotonic() - started}
    if found:
        done = found[0]["runs"][0]
        row |= {key: done[key] for key in ("rounds", "different", "tokens")}
        row |= {key: done["counts"][key] for key in ("healed", "disk_reads", "slot_fills", "device_alone")}
    log = [line for line in engine.lines if not line.startswith(RESULT)]
    return row | {"reason": said, "log": log[-30:]}


def as_wanted(fault: Fault, row: dict[str, Any], right: list[list[int]]) -> bool:
    """Whether the engine ended as it must."""
    if fault.ends:
        return row["code"] != 0 and fault.says in row["reason"]
    if fault.keep_lock and not row.get("device_alone"):
        return False  # nothing lacked help, so nothing was shown
    return row["code"] == 0 and row.get("different") == 0 and row.get("tokens") == right


def main() -> int:
    """Exit 1 where a fault ends otherwise than it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--stop", type=float, default=30, help="seconds that a process is stopped, less than a minute")
    parser.add_argument("--load-seconds", type=float, default=12, help="of load, at least")
    parser.add_argument("--threads", type=cpus.threads, default=1)
    parser.add_argument("--folder", help="where models and stores are made")
    arguments = parser.parse_args()
    failed, rows, right = False, [], None
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        every = faults(arguments.stop)
        folders = [Path(folder) / str(number) for number in range(len(every))]
        for one in folders:
            one.mkdir()
        with ThreadPoolExecutor(len(every)) as pool:
            running = [pool.submit(run, fault, arguments, one) for fault, one in zip(every, folders, strict=True)]
            for fault, one in zip(every, running, strict=True):
                try:
                    row = one.result()
                except RuntimeError as error:
                    row = {"what": f"fault: {fault.name}", "code": None, "reason": "", "log": str(error)[-3000:]}
                right = right or row.get("tokens")
                row["as wanted"] = as_wanted(fault, row, right or [])
                failed |= not row["as wanted"]
                row.pop("tokens", None)
                print("  ".join(f"{k} {v}" for k, v in row.items() if k != "log" or not row["as wanted"]), flush=True)
                rows.append(row)
                if os.environ.get("OUT"):
                    Path(os.environ["OUT"], "faults.json").write_text(json.dumps(rows, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
