"""`python -m tests.kernels.forks CASE`: children do one thing with a pool, kernel and mailbox of their parent.

Another thread of the parent computes on the pool all the time, so that many children come to be amid a call.
"""

from __future__ import annotations

import gc
import sys
import threading
from types import SimpleNamespace

import numpy as np

from moetier.contract import Family, LayerGeometry
from moetier.kernels.cpu import CpuExperts, ThreadPool, integer_peak, read_bandwidth, start_time
from moetier.kernels.cpu.mailbox import MailArrays, Mailbox
from tests.forking import in_children
from tests.kernels.support import assert_same_bits, expected, make_inputs, make_layer, run_forward

GEOMETRY, TOKENS = LayerGeometry(64, 64, experts=4, top_k=2), 8
LAYER = make_layer(np.random.default_rng(0), GEOMETRY)
STEP = make_inputs(np.random.default_rng(1), GEOMETRY, 3)
WANTED = expected(LAYER, *STEP, Family())


def make_kernel(pool: ThreadPool) -> CpuExperts:
    return CpuExperts(GEOMETRY, Family(), pool, max_tokens=TOKENS)


def make_mailbox(pool: ThreadPool) -> Mailbox:
    shape = (TOKENS, GEOMETRY.top_k)
    mail = MailArrays(
        np.zeros(32, np.int32),
        np.full(shape, -1, np.int32),
        np.zeros(shape, np.float32),
        np.zeros((TOKENS, GEOMETRY.hidden), np.uint16),
        np.zeros(GEOMETRY.experts, np.int32),
        np.zeros((*shape, GEOMETRY.hidden), np.float32),
    )
    return Mailbox(make_kernel(pool), pool, mail, [LAYER.addresses])


def compute(kernel: CpuExperts) -> None:
    assert_same_bits(run_forward(kernel, LAYER, *STEP), WANTED)


def compute_until(stop: threading.Event, kernel: CpuExperts) -> None:
    while not stop.is_set():
        compute(kernel)


def own_objects() -> None:
    pool = ThreadPool(2)
    compute(make_kernel(pool))
    assert start_time(pool) >= 0
    make_mailbox(pool).close()


def drop(made: SimpleNamespace) -> None:
    vars(made).clear()
    gc.collect()


REFUSED = {
    "compute": lambda made: compute(made.kernel),
    "start_time": lambda made: start_time(made.pool),
    "integer_peak": lambda made: integer_peak(made.pool),
    "read_bandwidth": lambda made: read_bandwidth(made.pool, np.zeros(1 << 20, np.uint8)),
    "make_mailbox": lambda made: make_mailbox(made.pool),
    "wake": lambda made: made.mailbox.wake(),
    "await_help": lambda made: made.mailbox.await_help(1),
}
ALLOWED = {
    "own": lambda _: own_objects(),
    "close": lambda made: (made.mailbox.close(), made.pool.close()),
    "drop": drop,
}


def main() -> None:
    case = {**REFUSED, **ALLOWED}[sys.argv[1]]
    pool = ThreadPool(2)
    made = SimpleNamespace(pool=pool, kernel=make_kernel(pool), mailbox=make_mailbox(pool))
    compute(made.kernel)
    stop = threading.Event()
    other = threading.Thread(target=compute_until, args=(stop, make_kernel(pool)))
    other.start()
    try:
        in_children(lambda: case(made))
    finally:
        stop.set()
        other.join()


if __name__ == "__main__":
    main()
