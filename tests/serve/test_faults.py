"""Serving on a machine that misbehaves: a full disk, a stopped process, a thread that is killed, a wrong kernel."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from moetier.store.build import build_store
from moetier.store.verify import verify_store
from moetier.trace.record import Trace
from tests.serve.damage import flip_a_bit_of_every_record
from tests.serve.server import LIMIT_SECONDS, Server, serving
from tests.serve.streaming import Request

pytest.importorskip("vllm", reason="vLLM is not installed")

STOPPED_SECONDS = float(os.environ.get("MOETIER_STOPPED_SECONDS", "3"))
"""How long the process that computes is stopped."""


@pytest.fixture
def store(nano: Path, tmp_path: Path) -> Path:
    build_store(nano, tmp_path / "store")
    return tmp_path / "store"


def worker(server: Server) -> psutil.Process:
    """The process that computes."""
    (found,) = [process for process in server.processes() if process.name().startswith("VLLM::Worker")]
    return found


@pytest.mark.long
def test_stopped_then_no_disk_then_a_killed_thread(nano: Path, store: Path, tmp_path: Path) -> None:
    """One server, since each takes long to start; with every expert read from disk for every token."""
    options = ("--record", str(tmp_path / "trace"), "--set", "heat_save_seconds=1")
    with serving(nano, store, tmp_path / "out", dram_records="0", options=options) as server:
        right, process = Request(server).whole(), worker(server)

        running = Request(server)
        assert running.began.wait(LIMIT_SECONDS)
        process.send_signal(signal.SIGSTOP)
        assert running.stalls(STOPPED_SECONDS)
        process.send_signal(signal.SIGCONT)
        assert running.whole() == right

        # Nothing more can be written: not heat, not the trace, not counters, not a record that was healed.
        process.rlimit(psutil.RLIMIT_FSIZE, (0, 0))
        flip_a_bit_of_every_record(store, layer=0)
        assert Request(server).whole() == right
        assert verify_store(store).bad, "healed in memory only"
        assert server.healthy()

        running = Request(server)
        assert running.began.wait(LIMIT_SECONDS)
        threads = [thread.id for thread in process.threads() if thread.id != process.pid]
        os.kill(threads[-1], signal.SIGKILL)  # the kernel ends the whole process, as it does for any fault in a thread
        assert server.wait_exit() == 1
        assert running.join().error is not None
        assert right.startswith(running.text)
        assert "ended by itself" in server.error
    assert list(Trace.open(tmp_path / "trace").steps()), "what was recorded before is still readable"


BROKEN = """
import sys
from moetier.kernels.cpu import CpuExperts
right = CpuExperts.finish
def finish(self, out):
    right(self, out)
    out[-1, -1] ^= 1
CpuExperts.finish = finish
"""
"""A machine whose steps that read from disk give one wrong bit; Python runs it at the start of every process."""


def test_kernel_with_a_wrong_bit_is_not_served(
    nano: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    with Server(nano, store, tmp_path / "out") as server:
        assert server.wait_exit() == 2
        assert "identity check: the paths 'DRAM/" in server.error
        assert "and 'DRAM and disk/" in server.error
        assert "Nothing is served" in server.error
