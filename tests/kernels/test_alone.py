"""Requests that get no help are answered from disk alone, with the same bits, while nobody gets Python's lock."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from moetier.contract import oracle
from moetier.errors import RecordReadError
from moetier.kernels.cpu import CpuExperts, ThreadPool, _native
from moetier.kernels.cpu.mailbox import MailArrays, Mailbox, OvertakenError, Request
from moetier.kernels.protocol import word
from moetier.store.build import build_store
from moetier.store.store import Store
from moetier.tiers.disk import DiskReader
from moetier.tiers.part import Part
from tests.kernels.support import make_inputs
from tests.store.checkpoints import write_checkpoint

TOKENS, STUCK_MS = 4, 200
KEPT_SECONDS = 3
"""For which a thread keeps Python's lock: much longer than STUCK_MS, so that only who needs no lock can answer."""


class Bench:
    """A store of one rank's part, all of it on disk, its mailbox, and this test in the device's place."""

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        write_checkpoint(folder / "model", experts=8, hidden=64, intermediate=128, top_k=3, layers=(1, 2))
        build_store(folder / "model", folder / "store", slices=ranks)
        self.store = Store.open(folder / "store")
        self.part = Part(self.store.manifest.layer_geometry, rank, ranks)
        self.g, self.rng = self.part.narrow, np.random.default_rng(3)
        self.reader = DiskReader(self.store, 1, part=self.part)
        self.pool = ThreadPool(1)
        self.family = self.store.manifest.layer_family
        self.kernel = CpuExperts(self.g, self.family, self.pool, max_tokens=TOKENS)
        shape = (TOKENS, self.g.top_k)
        self.mail = MailArrays(
            np.zeros(32, np.int32),
            np.full(shape, -1, np.int32),
            np.zeros(shape, np.float32),
            np.zeros((TOKENS, self.g.hidden), np.uint16),
            np.zeros(64, np.int32),
            np.zeros((*shape, self.g.hidden), np.float32),
        )
        self.tables = [np.zeros(self.g.experts, np.uint64) for _ in range(2)]
        self.mailbox = Mailbox(self.kernel, self.pool, self.mail, self.tables, self.reader.alone(STUCK_MS))

    def post(self, layer: int = 1) -> int:
        """A random request; its number."""
        mail, box = self.mail, self.mail.box
        mail.x[:] = oracle.to_bf16(make_inputs(self.rng, self.g, TOKENS)[0])
        mail.ids[:] = self.rng.integers(-1, self.g.experts, mail.ids.shape)
        mail.weights[:] = self.rng.random(mail.weights.shape, np.float32)
        mail.rows[:] = -1
        box[word("layer")], box[word("tokens")] = layer, TOKENS
        box[word("posted")] += 1
        return int(box[word("posted")])

    def expected(self, layer: int = 1) -> np.ndarray:
        """The rows by the kernel, over records that Python reads."""
        room = np.zeros((self.g.experts, self.part.room + 4096), np.uint8)
        here = np.zeros(self.g.experts, np.uint64)
        for expert in range(self.g.experts):
            shift = -room[expert].ctypes.data % 4096
            self.reader.read(layer, expert, room[expert, shift : shift + self.part.room])
            here[expert] = room[expert].ctypes.data + shift + self.part.shift
        rows = np.full_like(self.mail.rows, -1)
        kernel = CpuExperts(self.g, self.family, self.pool, max_tokens=TOKENS)
        kernel.rows(self.mail.x, self.mail.ids, self.mail.weights, here, rows)
        return rows

    def wait(self, number: int, field: str = "answered") -> None:
        end = time.monotonic() + 300
        while self.mail.box[word(field)] != number:
            assert time.monotonic() < end, f"request {number} was not {field}"
            time.sleep(0.001)

    def close(self) -> None:
        self.mailbox.close()
        self.pool.close()
        self.reader.close()
        self.store.close()


@pytest.fixture(params=[(0, 1), (1, 2)], ids=["one rank", "second of two"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, *request.param)
    yield made
    made.close()


def keep_pythons_lock(seconds: int) -> None:
    """As a call of CUDA that waits for the device does where its caller keeps the lock."""
    ctypes.PyDLL(None).sleep(seconds)


def test_a_request_is_answered_while_pythons_lock_is_kept(bench: Bench) -> None:
    number = bench.post()
    keep_pythons_lock(KEPT_SECONDS)
    assert bench.mail.box[word("answered")] == number, "nobody answered without Python's lock"
    np.testing.assert_array_equal(bench.mail.rows, bench.expected())
    bench.mailbox.close()  # the request is counted
    assert bench.mailbox.counts()[3] == 1


def helper(bench: Bench, work: threading.Event, taken: list[Request]) -> threading.Thread:
    """A helper that takes a request, stops in the middle of its work, and answers wrongly too late."""

    def run() -> None:
        while (request := bench.mailbox.await_help(100)) is None:
            pass
        taken.append(request)
        work.wait(300)
        request.rows[:] = 7
        taken.append(bench.mailbox.answer(request))  # type: ignore[arg-type]

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_help_that_comes_too_late_changes_nothing(bench: Bench) -> None:
    work, taken = threading.Event(), list[Request]()
    thread = helper(bench, work, taken)
    number = bench.post()
    expected = bench.expected()
    bench.wait(number)
    np.testing.assert_array_equal(bench.mail.rows, expected)
    with pytest.raises(OvertakenError):
        bench.mailbox.forget(taken[0], 0)
    bench.tables[1][:] = 1  # what is in DRAM may be on its way out while the helper is at work: nobody looks there
    number = bench.post()
    expected = bench.expected()
    bench.wait(number)
    np.testing.assert_array_equal(bench.mail.rows, expected)
    bench.tables[1][:] = 0
    work.set()
    thread.join()
    assert taken[1] is False
    np.testing.assert_array_equal(bench.mail.rows, expected)
    bench.mailbox.close()  # the requests are counted
    assert bench.mailbox.counts()[2:] == (2, 2)


def test_help_in_time_is_used(bench: Bench) -> None:
    number = bench.post()
    while (request := bench.mailbox.await_help(100)) is None:
        pass
    bench.tables[1][5] = 99
    bench.mailbox.forget(request, 5)
    assert bench.tables[1][5] == 0
    for _ in range(5):  # longer than STUCK_MS in all, and at work
        time.sleep(STUCK_MS / 2e3)
        bench.mailbox.progress()
    request.rows[:] = 7
    assert bench.mailbox.answer(request)
    bench.wait(number)
    assert (bench.mail.rows == np.where(bench.mail.ids >= 0, 7, -1)[..., None]).all()
    bench.mailbox.close()  # the request is counted
    assert bench.mailbox.counts()[2:] == (1, 0)


def test_damaged_records_are_refused(bench: Bench) -> None:
    path = bench.store.record_file(1)
    with path.open("r+b") as file:
        for expert in range(bench.g.experts):
            file.seek(bench.store.offset(expert) + bench.part.begin + 40)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(RecordReadError):
        bench.expected()
    number = bench.post()
    bench.wait(number, "refused")


@pytest.mark.parametrize("size", [241, 255, 256, 1023, 1024, 1025, 2048, 2049, 5000, 100_003])
def test_checksums_are_xxh3(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert _native.xxh3_64(data) == xxhash.xxh3_64_intdigest(data.data)
