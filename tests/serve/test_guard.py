"""The guard alone: the server is a process that is deaf to SIGTERM, the launcher a short script."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from moetier.launch import guard
from moetier.launch.guard import end_group, guarded
from tests.serve.server import runs

DEAF = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
LAUNCHER = """
import os, signal, subprocess, sys
from moetier.launch import guard
from moetier.launch.guard import guarded
server = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True, stdout=subprocess.PIPE)
server.stdout.readline()  # deaf from now on
with guarded(server.pid, 0.1 if sys.argv[3] == "served" else 60) as started:
    if sys.argv[3] != "abandon":
        started.tell_ready()
    print(server.pid, flush=True)
    {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "raise": lambda: 1 / 0, "end": lambda: None}[sys.argv[2]]()
"""


def server_of_launcher(end: str, patience: str) -> psutil.Process:
    """The server that a launcher left when it ended that way. patience: it did not answer yet, served, or may drain."""
    command = [sys.executable, "-c", LAUNCHER, DEAF, end, patience]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as launcher:
        assert launcher.stdout is not None
        server = psutil.Process(int(launcher.stdout.readline()))
        launcher.wait(60)
    return server


def kill(process: psutil.Process) -> None:
    if runs(process):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "END_SECONDS", 1)


@pytest.mark.parametrize(("end", "patience"), [("kill", "served"), ("raise", "abandon")])
def test_a_server_that_lost_its_launcher_is_ended(end: str, patience: str) -> None:
    server = server_of_launcher(end, patience)
    try:
        deadline = time.monotonic() + 60
        while runs(server) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not runs(server)
    finally:
        kill(server)


@pytest.mark.parametrize(("end", "patience"), [("end", "served"), ("kill", "drain")], ids=["ended-well", "draining"])
def test_a_server_is_left_alone(end: str, patience: str) -> None:
    """By a launcher that ends its block as it should, and as long as requests in flight may take."""
    server = server_of_launcher(end, patience)
    try:
        time.sleep(1)
        assert runs(server)
    finally:
        kill(server)


@pytest.mark.usefixtures("impatient")
def test_a_server_without_a_guard_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], start_new_session=True, stdout=subprocess.PIPE) as server:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(FileNotFoundError), guarded(server.pid, 60):
            pass
        assert server.wait(60) < 0


RESTING = "import os, time\nif os.fork() == 0: {child}\ntime.sleep(600)"
CHILDREN = {
    "obeys": "held = bytearray(1 << 30); print(flush=True); time.sleep(600)",  # takes the kernel some time to free
    "deaf": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)",
    "forks-and-exits": """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(flush=True)
    while True:
        if os.fork(): os._exit(0)
""",
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("child", CHILDREN.values(), ids=CHILDREN)
@pytest.mark.parametrize("first", ["leader-alive", "leader-dead"])
def test_what_was_ended_is_gone(first: str, child: str) -> None:
    command = [sys.executable, "-c", RESTING.format(child=child)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as server:
        assert server.stdout is not None
        try:
            server.stdout.readline()
            if first == "leader-dead":
                server.kill()
                server.wait()
            assert end_group(server.pid) == []
            assert select.select([server.stdout], [], [], 0)[0], "a process has it open"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


SHARING = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=1)
print(memory.name, flush=True)
time.sleep(600)
"""


def test_shared_memory_of_what_was_ended_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", SHARING], stdout=subprocess.PIPE, start_new_session=True) as server:
        assert server.stdout is not None
        memory = Path("/dev/shm", server.stdout.readline().decode().strip())
        assert memory.exists()
        assert end_group(server.pid) == []
        assert not memory.exists()
