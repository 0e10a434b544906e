"""How a server that is told to end lets its requests end: what the launcher or guard asks, and the frontend reports.

vLLM's own way, SIGTERM, kills the engine when its time is over and leaves open streams hanging. So the frontend's part,
`moetier.vllm.draining`, refuses new requests and ends the open ones first; SIGTERM comes when none is left. They
share small files in the server's scratch folder. Only the standard library, for the guard.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "MOETIER_SCRATCH"
"""Names the folder to the frontend: vLLM makes a middleware without arguments."""
ASKED = "drain.json"
FILE_BYTES = 160
"""Bytes of each file. It is made with the server and written over in place, which a full disk does not prevent."""
LOOK_SECONDS = 0.1
"""Between two looks at the files, on both sides."""
REPORT_SECONDS = 3.0
"""How long after the deadline a frontend may take to say that its last requests were cut off."""
ENDING_SECONDS = 5.0
"""The part of the drain time, half of it at most, that is left to vLLM for its own end."""


@dataclass(frozen=True)
class Report:
    """A frontend process: requests that it works on, and those that it cut off; asked: whether it knows of a drain."""

    pid: int
    asked: bool = False
    running: int = 0
    cut: int = 0


@dataclass(frozen=True)
class Drained:
    """How a drain went. cut: requests that did not come to their end, where the frontends reported them."""

    cut: int
    reported: bool
    """False where a frontend does not report: the requests are vLLM's to drain, by SIGTERM."""


def time_for_requests(drain_seconds: float) -> float:
    """Return the part of the drain time that the requests get."""
    return drain_seconds - min(ENDING_SECONDS, drain_seconds / 2)


def prepare(folder: Path) -> None:
    """Make the file of what is asked for; OSError where the folder takes nothing."""
    _write(folder / ASKED, {"until": None})


def ask(folder: Path, until: float) -> None:
    """Ask for a drain, or for another deadline: on the clock `time.monotonic`, which all processes share."""
    _write(folder / ASKED, {"until": until})


def deadline(folder: Path) -> float | None:
    """When open requests are to be cut off; None while no drain was asked for."""
    until = (_read(folder / ASKED) or {}).get("until")
    return float(until) if isinstance(until, int | float) else None


def report(folder: Path, state: Report) -> None:
    """Say what a frontend works on; OSError where the folder takes nothing."""
    _write(folder / f"requests-{state.pid}.json", asdict(state))


def reports(folder: Path) -> list[Report]:
    """Return what the frontends that live said last."""
    found = []
    for path in folder.glob("requests-*.json"):
        with contextlib.suppress(TypeError):
            state = Report(**(_read(path) or {}))
            if Path("/proc", str(state.pid)).exists():
                found.append(state)
    return found


def drain(folder: Path, until: float, lives: Callable[[], bool], hurried: Callable[[], bool]) -> Drained:
    """Let the requests end until then; those that did not are cut off. hurried: whether to cut them off at once."""
    last: list[Report] = []
    ask(folder, until)
    while lives():
        last = reports(folder) or last
        if not last or all(state.asked and not state.running for state in last):
            break
        if hurried() and until > time.monotonic():
            until = time.monotonic()
            ask(folder, until)
        if time.monotonic() > until + REPORT_SECONDS:
            break
        time.sleep(LOOK_SECONDS)
    answered = bool(last) and all(state.asked for state in last)
    return Drained(sum(state.cut + state.running for state in last) if answered else 0, answered)


def _write(path: Path, value: dict[str, object]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.pwrite(file, json.dumps(value).ljust(FILE_BYTES).encode(), 0)
    finally:
        os.close(file)


def _read(path: Path) -> dict[str, Any] | None:
    """Return what is in a file; None where it is not there, or not written whole yet."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
