"""A flipped bit is found, told apart and taken out of service, wherever it lies; and nothing else is ever told."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.contract import oracle
from moetier.engine.model import IntegrityError, TieredModel
from moetier.engine.recording import Call
from moetier.identity.calls import random_routing
from moetier.kernels.cpu import CpuExperts, available_isas
from moetier.sentinel.watch import Sentinel
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.store.store import Store
from tests.store.checkpoints import write_checkpoint

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 12, 3, 96, 64
PATIENCE = 60.0


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentinel")
    made = write_checkpoint(
        folder / "model", experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, top_k=TOP_K, scales=(118, 124)
    )
    build_store(made.path, folder / "store")
    return folder / "store"


class Served:
    """A model that computes random calls, with a sentinel that is not started: a test takes its turns."""

    def __init__(self, store_path: Path, records: int, halt: bool = False, cpus: Any = None) -> None:
        settings = Settings.parse({"store": store_path, "threads": 2, "dram_records": records, "cpus": cpus})
        self.model = TieredModel(settings, Store.open(store_path), records, max_tokens=16)
        self.layers = [self.model.attach(layer.number) for layer in self.model.store.manifest.layers]
        self.sentinel = Sentinel(self.model, 0.5, halt=halt, seed=1)
        self.model.context.sampler = self.sentinel
        self._rng = np.random.default_rng(2)

    def call(self, layer: int = 0, tokens: int = 4) -> tuple[Call, np.ndarray]:
        """A random call of a layer, and its result."""
        x = oracle.to_bf16(self._rng.standard_normal((tokens, HIDDEN)).astype(np.float32))
        ids, weights = random_routing(self.model.store.manifest.layer_geometry, tokens, self._rng)
        out = np.zeros((tokens, HIDDEN), np.uint16)
        call = Call(layer, x, ids, weights, out)
        self.again(call)
        return call, out.copy()

    def again(self, call: Call) -> np.ndarray:
        self.layers[call.layer].forward(call.x, call.ids, call.weights, call.out)
        return call.out

    def turn(self) -> None:
        """One turn of the sentinel's thread, and a step of the engine's."""
        self.sentinel._turn_of_checks(time.perf_counter())
        self.sentinel.settle()

    def until(self, found: Any) -> None:
        """Serve and check until `found()`."""
        deadline = time.monotonic() + PATIENCE
        while not found():
            assert time.monotonic() < deadline, "nothing was found"
            self.call(int(self._rng.integers(len(self.layers))))
            self.turn()

    def close(self) -> None:
        self.sentinel.close()
        self.model.close()
        self.model.store.close()


@pytest.fixture
def served(request: pytest.FixtureRequest, store_path: Path) -> Iterator[Served]:
    cpus = os.sched_getaffinity(0)
    served = Served(store_path, getattr(request, "param", EXPERTS))
    yield served
    os.sched_setaffinity(0, cpus)  # a test that takes the sentinel's turns goes where it does
    served.model.check_integrity()
    served.close()


@pytest.mark.parametrize("served", [EXPERTS, 3], indirect=True, ids=["all in DRAM", "a quarter"])
def test_what_is_right_is_never_told(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """With a quarter in DRAM records are evicted while they are looked at, by a thread of its own."""
    served.sentinel.start()
    served.sentinel.start()
    checks, deadline = served.model.checks, time.monotonic() + PATIENCE
    while checks.records < 300 or checks.calls < 30 or checks.rounds < 3:
        served.call(int(served._rng.integers(len(served.layers))))
        served.sentinel.settle()
        assert time.monotonic() < deadline, checks
    assert (checks.wrong_records, checks.wrong_calls) == (0, 0)
    assert checks.us > 0
    assert not caplog.records


def test_a_flip_in_dram_is_found_in_one_round_and_cured(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Every bit counts: each of many places in turn, until the layer has no room left that is trusted."""
    tier, checks = served.layers[1].tier, served.model.checks
    call, right = served.call(1, tokens=16)
    for number, place in enumerate(np.linspace(0, tier.record(0).size - 1, EXPERTS - 1).astype(int)):
        expert = int(tier.resident[number % tier.resident.size])
        tier.record(expert)[place] ^= 1 << (number % 8)
        for _ in range(sum(layer.tier.resident.size for layer in served.layers) + 1):
            served.sentinel._check_next_record()
        served.sentinel.settle()
        assert checks.wrong_records == number + 1
        assert tier.addresses[expert] == 0
        assert np.array_equal(served.again(call), right), "read anew from the store"
        assert tier.slots == EXPERTS - 1 - number
        served.model.check_integrity()
    assert "layer 2, expert" in caplog.text
    assert "the record in DRAM has checksum" in caplog.text


def test_a_record_that_was_evicted_is_no_suspect_any_more(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    tier = served.layers[0].tier
    tier.record(5)[0] ^= 1
    while not served.sentinel._suspects:
        served.sentinel._turn_of_checks(time.perf_counter())
    tier.record(5)[0] ^= 1
    served.sentinel.settle()
    assert served.model.checks.wrong_records == 0
    assert not caplog.records


class Faulty:
    """A kernel that flips one bit of what it computes, as long as `when` says so."""

    def __init__(self, kernel: CpuExperts, when: Any = lambda: True) -> None:
        self._kernel, self._when = kernel, when

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def try_forward(self, x: Any, ids: Any, weights: Any, addresses: Any, out: np.ndarray) -> Any:
        done = self._kernel.try_forward(x, ids, weights, addresses, out)
        if self._when():
            out[:, 7] ^= 1
        return done

    def finish(self, out: np.ndarray) -> None:
        self._kernel.finish(out)
        if self._when():
            out[:, 7] ^= 1


def test_a_result_that_was_wrong_once_is_told_from_bytes(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for layer in served.layers:
        layer._kernel = Faulty(layer._kernel)  # type: ignore[assignment]
    served.until(lambda: served.model.checks.wrong_calls)
    assert "1 of 96 values of a row that was served differ" in caplog.text
    assert "once, for the same row is right on every CPU now and the bytes are right" in caplog.text


def test_bytes_are_told_from_arithmetic(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """By a call alone, before the records have had their turn."""
    call, right = served.call(0)
    expert = int(call.ids[0, 0])
    served.layers[0].tier.record(expert)[:2000] ^= 0x44
    served.sentinel.wanted = True
    served.sentinel._skip = 0
    served.sentinel._rng = np.random.default_rng(0)
    while served.sentinel._row is None or expert not in served.sentinel._row.ids:
        served.sentinel.wanted = True
        wrong = served.again(call).copy()
    assert not np.array_equal(wrong, right)
    served.sentinel._check_row(served.sentinel._row)
    served.sentinel._row = None
    assert f"bytes were wrong, expert {expert} has checksum" in caplog.text
    served.sentinel.settle()
    assert np.array_equal(served.again(call), right)
    assert (served.model.checks.wrong_calls, served.model.checks.wrong_records) == (1, 1)


@pytest.mark.skipif(len(available_isas()) < 2, reason="one instruction set")
def test_instruction_sets_that_differ_are_named(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, isa = served.model.make_kernel, served.model.kernel.isa
    monkeypatch.setattr(
        served.model, "make_kernel", lambda i, p, t: Faulty(make(i, p, t)) if i == isa else make(i, p, t)
    )
    for layer in served.layers:
        layer._kernel = Faulty(layer._kernel)  # type: ignore[assignment]
    served.until(lambda: served.model.checks.wrong_calls)
    assert f"arithmetic, {isa} and {served.sentinel.isa} differ from each other on every CPU" in caplog.text


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_a_core_that_computes_wrongly_is_named(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, cpus = served.model.make_kernel, sorted(os.sched_getaffinity(0))
    bad = cpus[-1]

    def on_it() -> bool:
        return os.sched_getaffinity(threading.get_native_id()) == {bad}

    monkeypatch.setattr(
        served.model,
        "make_kernel",
        lambda i, p, t: Faulty(make(i, p, t), on_it) if i == served.model.kernel.isa else make(i, p, t),
    )
    for layer in served.layers:
        layer._kernel = Faulty(layer._kernel)  # type: ignore[assignment]
    found = threading.Thread(target=served.until, args=(lambda: served.model.checks.wrong_calls,))
    found.start()  # it keeps to the CPUs that it looks at
    found.join()
    others = ",".join(map(str, cpus[:-1]))
    assert f"still is on CPU {bad}; serve without it: `--set cpus={others}`" in caplog.text


def test_the_engine_ends_before_its_next_step_where_that_is_asked_for(store_path: Path) -> None:
    served = Served(store_path, EXPERTS, halt=True)
    served.layers[0].tier.record(3)[9] ^= 2
    with pytest.raises(IntegrityError, match=r"corruption found: layer 1, expert 3: .* as halt_on_corruption asks"):
        served.until(lambda: False)
    with pytest.raises(IntegrityError, match="corruption found"):
        served.sentinel.settle()
    served.close()


def test_a_check_that_cannot_be_made_costs_that_check(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.sentinel, "_turn_of_checks", lambda begun: 1 / 0)
    with caplog.at_level(logging.ERROR):
        served.sentinel.start()
        deadline = time.monotonic() + PATIENCE
        while "it goes on" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    served.call()
    served.sentinel.settle()
