"""Work on threads: results in order, the first error, and Ctrl-C at any moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from moetier.store.work import Meter, Progress, Workers

SCRIPT = """
import signal, sys, time
from moetier.store.work import Workers
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
with Workers(2, "work") as workers:
    print("begun", flush=True)
    for _ in range(1_000_000):
        workers.map(lambda item: time.sleep(0.0001), range(4))
"""


def test_results_come_in_the_order_of_the_items_and_are_counted() -> None:
    told: list[Progress] = []
    with Workers(3, "work") as workers:
        meter = Meter("work", 20, told.append)
        assert workers.map(lambda item: time.sleep(0.001 * (20 - item)) or item * item, range(20), meter) == [
            item * item for item in range(20)
        ]
    assert [step.done for step in told] == list(range(21))


def test_after_the_first_error_the_others_are_not_started() -> None:
    begun: list[int] = []

    def job(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise ValueError("one")
        time.sleep(0.01)

    with Workers(1, "work") as workers, pytest.raises(ValueError, match="one"):
        workers.map(job, range(100))
    assert len(begun) < 10


def test_ctrl_c_is_heard_between_items_and_every_item_ends() -> None:
    ended: list[int] = []

    def job(item: int) -> None:
        time.sleep(0.05)
        ended.append(item)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
        with pytest.raises(KeyboardInterrupt), Workers(2, "work") as workers:
            workers.map(job, range(10_000))
        assert 0 < len(ended) < 1000
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt), Workers(1, "work"):
            signal.raise_signal(signal.SIGINT)  # heard where the context ends
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.029, 0.041, 0.067])
def test_ctrl_c_amid_a_lock_of_pythons_own_never_hangs(delay: float) -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in said
