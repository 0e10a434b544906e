"""Every contestant by name, and the process of its own that each runs in."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.peers.base import Peer, PeerAbsentError, Step
from moetier.contract import LayerGeometry

OURS = "moetier"


def makers(geometry: LayerGeometry, threads: int, cache: Path) -> dict[str, Callable[[], Peer]]:
    from benchmarks.peers.kt import Kt
    from benchmarks.peers.llama import Llama
    from benchmarks.peers.ours import Ours
    from benchmarks.peers.torch_bf16 import TorchBf16

    return {
        OURS: lambda: Ours(geometry, threads),
        "llama-mxfp4": lambda: Llama(geometry, threads, "mxfp4", cache),
        "llama-q4_k": lambda: Llama(geometry, threads, "q4_k", cache),
        "torch-bf16": lambda: TorchBf16(geometry, threads),
        "kt-mxfp4": lambda: Kt(geometry, threads, "mxfp4", cache),
        "kt-bf16": lambda: Kt(geometry, threads, "bf16", cache),
    }


def _serve(pipe: Connection, name: str, geometry: LayerGeometry, threads: int, cache: Path) -> None:
    """In the child: build the contestant, then time calls until the pipe closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent, stopped or not
    try:
        peer = makers(geometry, threads, cache)[name]()
    except PeerAbsentError as error:
        pipe.send(error)
        return
    pipe.send(peer.name)
    while (request := pipe.recv()) is not None:
        tokens, seed = request
        rng = np.random.default_rng(seed)
        before, step = Step.random(geometry, tokens, rng), Step.random(geometry, tokens, rng)
        peer.run(before)
        start = time.perf_counter()
        peer.run(step)
        pipe.send(time.perf_counter() - start)


class Contestant:
    """One in a process of its own, which stands still (SIGSTOP) but for its turns: no thread of its spins into others'.

    PeerAbsentError where it cannot be built here.
    """

    def __init__(self, name: str, geometry: LayerGeometry, threads: int, cache: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, geometry, threads, cache), daemon=True)
        self._process.start()
        theirs.close()
        self._pid = self._process.pid or 0
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            answer = PeerAbsentError(f"{name}: its process ended with exit code {self._process.exitcode}")
        if isinstance(answer, PeerAbsentError):
            raise answer
        self.name: str = answer
        os.kill(self._pid, signal.SIGSTOP)

    def turn(self, tokens: int, seed: int) -> float:
        """Seconds of a layer call, right after one of another routing, as layers follow each other in a model."""
        os.kill(self._pid, signal.SIGCONT)
        self._pipe.send((tokens, seed))
        seconds: float = self._pipe.recv()
        os.kill(self._pid, signal.SIGSTOP)
        return seconds

    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.kill()
        self._process.join()
