"""Messages between vLLM's processes: all arrive, in order, although nobody waits in a loop without sleep."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm")

from vllm.distributed.device_communicators import shm_broadcast

from moetier.vllm.resting import rest_while_waiting


@pytest.fixture
def queues(monkeypatch):
    """A writer and its reader, whose process rests; and the threads that yield, as vLLM's own loops do."""
    yields = []

    def sched_yield():
        yields.append(threading.get_ident())
        time.sleep(0)

    monkeypatch.setattr(shm_broadcast, "sched_yield", sched_yield)
    monkeypatch.setattr(shm_broadcast.SpinCondition, "wait", shm_broadcast.SpinCondition.wait)
    rest_while_waiting()
    writer = shm_broadcast.MessageQueue(1, 1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    with ThreadPoolExecutor(2) as pool:
        for ready in [pool.submit(one.wait_until_ready) for one in (writer, reader)]:
            ready.result(300)
    yield writer, reader, yields
    for one in (reader, writer):
        one.shutdown()


@pytest.mark.parametrize("pause", [0.0, 0.002, 1.2], ids=["at once", "a step apart", "idle in between"])
def test_every_message_arrives_in_order_without_a_loop_of_yields(queues, pause):
    writer, reader, yields = queues
    count = 3 if pause > 1 else 200

    def write():
        for number in range(count):
            time.sleep(pause)
            writer.enqueue(number, timeout=300)

    thread = threading.Thread(target=write)
    thread.start()
    found = [reader.dequeue(timeout=300) for _ in range(count)]
    thread.join()
    assert found == list(range(count))
    assert threading.get_ident() not in yields  # a writer whose ring is full may yield
