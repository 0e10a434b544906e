"""The guard alone: the server is a process that is deaf to SIGTERM, the launcher a short script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.serve.server import runs

DEAF = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
LAUNCHER = """
import os, signal, subprocess, sys
from moetier.serve.guard import guarded
server = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True, stdout=subprocess.PIPE)
server.stdout.readline()  # deaf from now on
with guarded(server.pid, 60 if sys.argv[3] == "drain" else 0.1, 0.1 if sys.argv[3] == "abandon" else 60) as ready:
    if sys.argv[3] != "abandon":
        ready()
    print(server.pid, flush=True)
    {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "raise": lambda: 1 / 0, "end": lambda: None}[sys.argv[2]]()
"""


def server_of_launcher(end: str, patience: str) -> psutil.Process:
    """The server that a launcher left when it ended that way; patience: which of the two is endless, or served."""
    command = [sys.executable, "-c", LAUNCHER, DEAF, end, patience]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as launcher:
        assert launcher.stdout is not None
        server = psutil.Process(int(launcher.stdout.readline()))
        launcher.wait(60)
    return server


def kill(process: psutil.Process) -> None:
    if runs(process):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("patience", ["served", "abandon"])
@pytest.mark.parametrize("end", ["kill", "raise"])
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
