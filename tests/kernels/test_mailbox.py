"""The mailbox, with this test in the device's place: what it posts is answered by the kernel's bits, or by help."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from moetier.contract import Family, LayerGeometry, oracle
from moetier.kernels.cpu import CpuExperts, ThreadPool
from moetier.kernels.cpu.mailbox import MailArrays, Mailbox
from moetier.kernels.protocol import word
from tests.kernels.support import Layer, make_inputs, make_layer

GEOMETRY, TOKENS, LAYERS = LayerGeometry(64, 32, 8, 3), 16, 2
PATIENCE_MS = 300_000
"""A limit of what hangs, not of what is slow."""
POSTED, LAYER, COUNT, STREAMED, ANSWERED, REFUSED = map(
    word, ("posted", "layer", "tokens", "streamed", "answered", "refused")
)


class Device:
    """What a device does: fill the arrays, then raise the flag."""

    def __init__(self, seed: int = 0) -> None:
        g, self.rng = GEOMETRY, np.random.default_rng(seed)
        shape = (TOKENS, g.top_k)
        self.mail = MailArrays(
            np.zeros(32, np.int32),
            np.full(shape, -1, np.int32),
            np.zeros(shape, np.float32),
            np.zeros((TOKENS, g.hidden), np.uint16),
            np.zeros(64, np.int32),
            np.zeros((*shape, g.hidden), np.float32),
        )

    def post(self, layer: int, tokens: int) -> int:
        """A random request; its number."""
        mail, g = self.mail, GEOMETRY
        mail.x[:tokens] = oracle.to_bf16(make_inputs(self.rng, g, tokens)[0])
        mail.ids[:tokens] = self.rng.integers(-1, g.experts, (tokens, g.top_k))
        mail.weights[:tokens] = self.rng.random((tokens, g.top_k), np.float32)
        mail.rows[:] = -1
        mail.box[LAYER], mail.box[COUNT], mail.box[STREAMED] = layer, tokens, 0
        mail.box[POSTED] += 2 if mail.box[POSTED] == -1 else 1  # 0 is no request's number
        return int(mail.box[POSTED])

    def wait(self, number: int, word: int = ANSWERED) -> None:
        """Until the request is answered; a hang fails."""
        end = time.monotonic() + 300
        while self.mail.box[word] != number:
            assert time.monotonic() < end, f"request {number} was not answered"


@pytest.fixture
def kernel() -> Iterator[tuple[CpuExperts, ThreadPool, list[Layer]]]:
    """A kernel, its pool, and layers of records."""
    pool, rng = ThreadPool(2), np.random.default_rng(1)
    layers = [make_layer(rng, GEOMETRY) for _ in range(LAYERS)]
    yield CpuExperts(GEOMETRY, Family(), pool, max_tokens=TOKENS), pool, layers
    pool.close()


def expected(pool: ThreadPool, device: Device, addresses: np.ndarray, tokens: int) -> np.ndarray:
    """Rows by a kernel object of its own."""
    other = CpuExperts(GEOMETRY, Family(), pool, max_tokens=TOKENS)
    out, mail = np.full((tokens, GEOMETRY.top_k, GEOMETRY.hidden), -1, np.float32), device.mail
    other.rows(mail.x[:tokens], mail.ids[:tokens], mail.weights[:tokens], addresses, out)
    return out


def test_requests_are_answered_with_the_kernels_rows(kernel) -> None:
    experts, pool, layers = kernel
    tables = [layer.addresses for layer in layers]
    device = Device()
    box = Mailbox(experts, pool, device.mail, tables)
    try:
        for i, tokens in enumerate([1, 16, 3, 1, 7] * 20):
            if i % 10 == 0:
                box.wake()
            device.wait(device.post(i % LAYERS, tokens))
            rows = device.mail.rows.copy()
            assert np.array_equal(rows[:tokens], expected(pool, device, tables[i % LAYERS], tokens))
            assert (rows[tokens:] == -1).all(), "rows beyond the request were written"
    finally:
        box.close()
    calls, nanoseconds, helps, _ = box.counts()  # a request is counted after it was answered
    assert (calls, helps) == (100, 0)
    assert nanoseconds > 0


def test_request_numbers_go_round_without_naming_none(kernel) -> None:
    experts, pool, layers = kernel
    tables = [layer.addresses for layer in layers]
    device = Device()
    device.mail.box[[POSTED, ANSWERED]] = -3  # 2^32 - 3
    box = Mailbox(experts, pool, device.mail, tables)
    try:
        for _ in range(6):
            device.wait(device.post(0, 2))
            assert np.array_equal(device.mail.rows[:2], expected(pool, device, tables[0], 2))
        assert device.mail.box[POSTED] > 0
    finally:
        box.close()


def test_a_record_that_is_not_in_dram_is_the_helpers(kernel) -> None:
    experts, pool, layers = kernel
    tables = [layer.addresses for layer in layers]
    device, full = Device(), tables[0].copy()
    tables[0][::2] = 0
    box = Mailbox(experts, pool, device.mail, tables)
    seen = []

    def help_one() -> None:
        while (request := box.await_help(PATIENCE_MS)) is not None:
            seen.append(request.number)
            experts.rows(request.x, request.ids, request.weights, full, request.rows)
            assert box.answer(request)
            if len(seen) == 10:
                return

    helper = threading.Thread(target=help_one)
    helper.start()
    try:
        for _ in range(10):
            device.wait(device.post(0, 16))
            rows = device.mail.rows.copy()
            assert np.array_equal(rows, expected(pool, device, full, 16))
    finally:
        helper.join()
        box.close()
    assert seen == list(range(1, 11))
    assert box.counts()[2] == 10


def test_a_refusal_reaches_the_device_and_nothing_is_answered(kernel) -> None:
    experts, pool, layers = kernel
    tables = [layer.addresses for layer in layers]
    tables[1][:] = 0
    device = Device(3)
    box = Mailbox(experts, pool, device.mail, tables)
    try:
        number = device.post(1, 4)
        request = box.await_help(PATIENCE_MS)
        assert request is not None
        assert (request.number, request.layer, request.x.shape[0]) == (number, 1, 4)
        assert box.refuse(request)
        device.wait(number, REFUSED)
        assert device.mail.box[ANSWERED] == 0
        assert box.await_help(1) is None
    finally:
        box.close()


def test_it_closes_while_asleep_and_while_help_is_awaited(kernel) -> None:
    experts, pool, layers = kernel
    tables = [layer.addresses for layer in layers]
    Mailbox(experts, pool, Device().mail, tables).close()
    tables[0][:] = 0
    device = Device()
    box = Mailbox(experts, pool, device.mail, tables)
    device.mail.ids[:] = 0
    device.post(0, 16)
    assert box.await_help(PATIENCE_MS) is not None
    box.close()
