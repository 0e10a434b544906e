"""A recipe's server as our process: on a port that nothing used, serving what was meant, leaving nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from moetier.launch.guard import end_group
from moetier.launch.process import DIRECT
from moetier_bench import BenchError
from moetier_bench.documents import Recipe, Serve

PATIENCE = 120
"""Seconds for an end that was asked for."""
PR_SET_PDEATHSIG = 1
DECIDING = ("VLLM_", "OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "PYTORCH_")
"""Variables of the user that a result would not show: the server does not get them."""


@dataclass(frozen=True)
class Place:
    """Where a recipe is served here. scratch: for logs and state; store: of the experts (engine moetier)."""

    model: Path
    store: Path
    scratch: Path
    port: int

    def names(self, root: Path) -> dict[str, str]:
        """Return what stands for the folders of this machine in a result, longest first."""
        found = {
            str(self.scratch): "{scratch}",
            str(self.store): "{store}",
            str(self.model): "{model}",
            str(Path(sys.executable).parent): "{bin}",
            str(root): "{root}",
            str(Path.home()): "{home}",
        }
        return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


@dataclass(frozen=True)
class Served:
    """A server that answers. seconds: from the start of its process."""

    url: str
    process: psutil.Process
    seconds: float


def command(recipe: Recipe, place: Place, check_at_end: bool = False) -> list[str]:
    """The command line of a recipe's server. check_at_end: it compares its tables and bytes when it ends."""
    serve = recipe.serve
    if serve.engine == "moetier":
        return [
            *(sys.executable, "-m", "moetier", "serve", str(place.model)),
            *("--store", str(place.store), "--build-store", "--port", str(place.port)),
            *("--log-file", str(place.scratch / "vllm.log"), "--json"),
            *(("--kv-cache-gib", str(serve.kv_cache_gib)) if serve.kv_cache_gib else ()),
            *_settings(serve, place, {"check_at_end": True} if check_at_end else {}),
            "--",
            *serve.vllm,
        ]
    cache = ("--kv-cache-memory-bytes", str(int(serve.kv_cache_gib * 2**30))) if serve.kv_cache_gib else ()
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(place.model)),
        *("--served-model-name", place.model.name, "--host", "127.0.0.1", "--port", str(place.port)),
        *cache,
        *serve.vllm,
    ]


def _settings(serve: Serve, place: Place, more: dict[str, Any]) -> Iterator[str]:
    """Settings as options. Heat starts empty and stays out of the store: a run does not depend on those before it."""
    for name, value in {"heat_file": str(place.scratch / "heat.json"), **serve.settings, **more}.items():
        yield from ("--set", f"{name}={json.dumps(value)}")


def environment(recipe: Recipe) -> dict[str, str]:
    """Ours, but of what decides speed and answers only the recipe's variables; no usage statistics."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DECIDING)}
    return {**kept, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **recipe.serve.env}


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(recipe: Recipe, place: Place, check_at_end: bool = False) -> Iterator[Served]:
    """Start, wait until it answers as the model that was meant, and end it; BenchError with the log's end if it does
    not come up.
    """
    place.scratch.mkdir(parents=True, exist_ok=True)
    output = place.scratch / "server.out"
    began = time.monotonic()
    with output.open("wb") as out:
        process = subprocess.Popen(
            command(recipe, place, check_at_end),
            env=environment(recipe),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        while not (_answers(place) and (recipe.serve.engine != "moetier" or placed(place))):
            waited = time.monotonic() - began
            if process.poll() is not None or waited > recipe.serve.start_seconds:
                state = "ended" if process.poll() is not None else "does not answer"
                raise BenchError(f"{recipe.id}: the server {state} after {waited:.0f} s: {log_end(place)}")
            time.sleep(0.1)
        yield Served(f"http://127.0.0.1:{place.port}", psutil.Process(process.pid), time.monotonic() - began)
    finally:
        _end(process)


def _end_with_parent() -> None:
    """Run in the child: if we are killed, the server is told to end. A shell's background ignores interrupts, which is
    inherited: the server must hear ours.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _answers(place: Place) -> bool:
    """Whether our model answers there."""
    try:
        with DIRECT.open(f"http://127.0.0.1:{place.port}/health", timeout=5) as answer:
            if answer.status != 200:
                return False
        with DIRECT.open(f"http://127.0.0.1:{place.port}/v1/models", timeout=5) as answer:
            names = [model["id"] for model in json.load(answer)["data"]]
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return False
    if names != [place.model.name]:
        raise BenchError(f"port {place.port}: expected our server of {place.model.name}, found {', '.join(names)}")
    return True


def placed(place: Place) -> dict[str, int]:
    """Return records by tier, and of all experts, as the launcher says once the server is ready; empty before."""
    for line in _said(place, "server.out").splitlines(keepends=True):
        if line.startswith('{"model"') and line.endswith("\n"):
            said = json.loads(line)
            found = {tier["tier"]: tier["records"] for tier in said["tiers"] if tier["records"] is not None}
            return {**found, "all": said["layers"] * said["experts"]}
    return {}


def checked_at_end(recipe: Recipe, place: Place) -> int | str:
    """Records of DRAM and slots that had the right bytes when the server ended, or what it says went wrong."""
    log = _said(place, "vllm.log") + _said(place, "server.out")
    found = re.findall(r"moetier: tables agree, (\d+) records in DRAM", log)
    slots = not recipe.serve.settings.get("slots") or "moetier: slots agree" in log
    if not found or not slots:
        return f"the tables were not found to agree: {log_end(place)}"
    return sum(map(int, found)) + placed(place).get("device slots", 0)


def _said(place: Place, name: str) -> str:
    path = place.scratch / name
    return path.read_text(errors="replace") if path.is_file() else ""


def log_end(place: Place, lines: int = 5) -> str:
    """The last lines of what the server said."""
    for name in ("server.out", "vllm.log"):
        for marker in ("moetier: error:", "Error:"):
            found = [line.strip() for line in _said(place, name).splitlines() if marker in line]
            if found:
                return found[-1][-500:]
    return " | ".join(_said(place, "server.out").splitlines()[-lines:]) or "(no output)"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, and kill what is left of its session."""
    family = _family(process.pid)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    if process.poll() is None:
        process.kill()
        process.wait()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=30)
    end_group(process.pid)  # what does not descend from it any more: stock vLLM's, of a frontend that was killed


def _family(pid: int) -> Sequence[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []
