"""What kernels and layers say of memory, threads, paths and recordings; done as it says, and the layer computes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moetier.budget import Item, records_that_fit
from moetier.contract import Family, LayerGeometry
from moetier.engine import TieredModel
from moetier.engine.recording import Call, Recorder
from moetier.identity.long import Paths, random_calls
from moetier.identity.start import self_check
from moetier.kernels.cpu import ISA_VARIABLE, CpuExperts, ThreadPool, available_isas
from moetier.kernels.cuda import kept
from moetier.machine import limits as machine
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.store.store import Store
from tests.kernels.support import make_layer
from tests.remedies.commands import moetier
from tests.remedies.limited import with_little_memory
from tests.remedies.trouble import Trouble
from tests.store.checkpoints import write_checkpoint

remedy = pytest.mark.remedy
GEOMETRY = LayerGeometry(64, 64, 4, 2)


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    made = write_checkpoint(tmp_path / "model", experts=4, hidden=64, intermediate=64, top_k=2)
    build_store(made.path, tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "in-parts"])
@remedy("kernels/cpu/experts.py", "load their records first")
def test_records_are_loaded_first(trouble: Trouble, loaded: bool) -> None:
    layer = make_layer(np.random.default_rng(0), GEOMETRY)
    kernel = CpuExperts(GEOMETRY, Family(), ThreadPool(1), max_tokens=1)
    x, ids, weights = np.ones((1, 64), np.float32), np.array([[1, 2]], np.int32), np.ones((1, 2), np.float32)
    out = np.empty((1, 64), np.uint16)
    some = layer.addresses.copy()
    some[2] = 0
    with trouble:
        kernel.forward(x, ids, weights, some, out)
    expected = np.empty_like(out)
    kernel.forward(x, ids, weights, layer.addresses, expected)
    if not loaded:
        experts, _ = kernel.begin(x, ids, weights)
        for index, expert in enumerate(experts):
            kernel.gate_up(np.array([index], np.int32), layer.addresses[[expert]])
            kernel.down(index, layer.addresses[[expert]])
        kernel.finish(out)
        np.testing.assert_array_equal(out, expected)
    trouble.gone()


@remedy("kernels/cpu/isa.py", "choose one of those")
def test_a_kernel_set_of_this_machine(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "mmx")
    with trouble:
        available_isas()
    offered = trouble.text.partition("offer ")[2].partition(";")[0].split(", ")
    monkeypatch.setenv(ISA_VARIABLE, offered[-1])
    assert available_isas() == tuple(offered[-1:])
    trouble.gone()


@remedy("kernels/cpu/pool.py", "name some of those")
def test_cpus_of_this_process(trouble: Trouble) -> None:
    own = machine.allowed_cpus()
    with trouble:
        ThreadPool(1, [max(own) + 1])
    assert f"its own are {list(own)}" in trouble.text
    ThreadPool(1, own[:1]).close()
    trouble.gone()


@pytest.mark.parametrize("raised", [False, True], ids=["fewer", "raised"])
@remedy("kernels/cpu/pool.py", "set threads lower")
def test_fewer_threads(trouble: Trouble, raised: bool) -> None:
    imports, work = "from moetier.kernels.cpu import ThreadPool", "ThreadPool(number).close()"
    trouble.said(with_little_memory(imports, work, 256, 2, raised=raised))
    trouble.gone()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A machine with as much memory as a scenario says."""

    def available(size: int) -> None:
        monkeypatch.setattr(machine, "memory", lambda: replace(before, available=size, limit=1 << 40))

    before = machine.memory()
    return available


def _fit(path: Path, records: str, other: int) -> int:
    with Store.open(path) as store:
        return records_that_fit(Settings(store=path, dram_records=records), store, 2, (Item("engine", other),))


@pytest.mark.parametrize("lower", [True, False], ids=["less-kv-cache", "others-stopped"])
@remedy("budget.py", "lower --kv-cache-gib or stop other processes")
def test_room_for_what_is_no_record(trouble: Trouble, store_path: Path, memory: Any, lower: bool) -> None:
    memory(2 << 30)
    with trouble:
        _fit(store_path, "100%", 4 << 30)
    if not lower:
        memory(8 << 30)
    assert _fit(store_path, "100%", 1 << 30 if lower else 4 << 30) == 4
    trouble.gone()


@pytest.mark.parametrize("auto", [True, False])
@remedy("budget.py", "what fits is --dram-records")
def test_records_that_fit(trouble: Trouble, store_path: Path, memory: Any, auto: bool) -> None:
    with Store.open(store_path) as store:
        stride = store.layout.stride
    memory((8 + 2 * 3) * stride)  # staging, and three records of each of two layers
    with trouble:
        _fit(store_path, "100%", 0)
    told = trouble.text.partition("--dram-records ")[2].split()[0]
    memory((8 + 2 * 3) * stride if not auto else 1 << 40)
    assert _fit(store_path, "auto" if auto else told, 0) == (4 if auto else int(told))
    trouble.gone()


def _calls(path: Path) -> list[Call]:
    """Calls of a store's first layer, as a server records them."""
    with Store.open(path) as store:
        paths = Paths(store, (1,), ("portable",), 64)
        layer, found = next(iter(paths.of_layer(0).values())), []
        for call, _ in zip(random_calls(store, 0, np.random.default_rng(0)), range(2), strict=False):
            out = np.empty(call.x.shape, np.uint16)
            layer.forward(call.x, call.ids, call.weights, out)
            found.append(Call(0, call.x, call.ids, call.weights, out))
        paths.close()
    return found


def _record(folder: Path, calls: list[Call]) -> None:
    recorder = Recorder(folder)
    for call in calls:
        recorder.add(call)
    recorder.close()


@remedy("identity/long.py", "name the store that it was recorded with")
def test_the_store_of_a_recording(trouble: Trouble, store_path: Path, tmp_path: Path) -> None:
    _record(tmp_path / "calls", _calls(store_path))
    other = write_checkpoint(tmp_path / "other", experts=4, hidden=96, intermediate=64, top_k=2)
    build_store(other.path, tmp_path / "other-store")
    with trouble:
        moetier("identity", "--store", tmp_path / "other-store", "--replay", tmp_path / "calls")
    moetier("identity", "--store", store_path, "--replay", tmp_path / "calls")
    trouble.gone()


@remedy("engine/recording.py", "record again")
def test_an_empty_recording(trouble: Trouble, store_path: Path, tmp_path: Path) -> None:
    _record(tmp_path / "calls", [])
    with trouble:
        moetier("identity", "--store", store_path, "--replay", tmp_path / "calls")
    _record(tmp_path / "again", _calls(store_path))
    moetier("identity", "--store", store_path, "--replay", tmp_path / "again")
    trouble.gone()


@remedy("engine/recording.py", "name a new folder")
def test_a_recording_is_a_new_folder(trouble: Trouble, tmp_path: Path) -> None:
    with trouble:
        Recorder(tmp_path)
    Recorder(tmp_path / "new").close()
    trouble.gone()


@remedy("identity/start.py", "run `moetier identity --store")
def test_a_path_that_differs(trouble: Trouble, store_path: Path) -> None:
    def device(call: Call) -> np.ndarray:
        return np.zeros(call.x.shape, np.uint16)

    settings = Settings(store=store_path, threads=1)
    with Store.open(store_path) as store, TieredModel(settings, store, records=2, max_tokens=16) as model:
        with trouble:
            self_check(model, 2, {"a faulty device": device})
        assert f"moetier identity --store {store_path}" in trouble.text
        assert "values that differ: 0" in moetier("identity", "--store", store_path, "--calls", "10")
        self_check(model, 2)  # without the part that is at fault
    trouble.gone()


class _Device:
    """What the check at start sees of a device: ways to compute a call. fault: the CPU's way gives another bit."""

    def __init__(self) -> None:
        import torch

        self.fault = False
        self.tokens, self.device, self.staging = 4, torch.device("cpu"), range(0)
        self.live = torch.zeros(1, dtype=torch.int32)
        self.sizes = SimpleNamespace(geometry=GEOMETRY)
        self._calls = 0

    def set_costs(self, _: object) -> None:
        """The plan's costs do not matter here."""

    def forward(self, _: object, x: Any, *__: object) -> Any:
        self._calls += 1
        return x + 1 if self.fault and self._calls % 2 == 0 else x


@remedy("identity/device.py", "check the memory of the machine and of the GPU")
def test_a_device_that_differs(trouble: Trouble) -> None:
    torch = pytest.importorskip("torch", reason="the device tier wants torch")
    from moetier.identity.device import check_paths
    from moetier.kernels.cuda.hybrid import LayerTables

    table = torch.full((GEOMETRY.experts,), -1, dtype=torch.int32)
    layer: Any = SimpleNamespace(
        index=0,
        tables=LayerTables(0, table, table, table, table),
        tier=SimpleNamespace(slots=0),
        slots=SimpleNamespace(mirror=np.full(GEOMETRY.experts, -1)),
        forget_ahead=lambda: None,
    )
    device: Any = _Device()
    device.fault = True
    with trouble:
        check_paths([layer], device, False, 2)
    assert '"cpu"' in moetier("doctor", "--json")
    device.fault = False  # as with the memory that was at fault replaced
    assert check_paths([layer], device, False, 2).comparisons == 2
    trouble.gone()


@remedy("engine/hybrid/helper.py", "--set threads=N")
def test_a_cpu_that_does_not_answer(trouble: Trouble, store_path: Path) -> None:
    pytest.importorskip("torch", reason="the device tier wants torch")
    from moetier.cli.serve import _assignments
    from moetier.engine.hybrid.helper import Helper

    failed: list[Exception] = []
    mail = SimpleNamespace(late=3, refused=0)
    late: Any = SimpleNamespace(_mail=mail, _failed=False, _patience=60.0, _fail=failed.append)
    Helper.tell_if_late(late)
    trouble.said(str(failed.pop()))
    told = Settings.parse({"store": store_path, **_assignments(["threads=1", "patience_seconds=600"])})
    assert (told.threads, told.patience_seconds) == (1, 600)
    mail.late = 0  # in time
    Helper.tell_if_late(late)
    assert failed == []
    trouble.gone()


@remedy("kernels/cuda/kept.py", "set XDG_CACHE_HOME to a folder of your own")
def test_compiled_kernels_in_a_folder_of_your_own(
    trouble: Trouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user than the folder's, into which everybody can write."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept.folder().mkdir(parents=True)
    kept.folder().chmod(0o777)
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: kept.folder().stat().st_uid + 1)
        assert kept.kept("one", "key", lambda: b"code") == b"code"
    trouble.said(caplog.text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    kept.kept("one", "key", lambda: b"code")
    assert kept.kept("one", "key", lambda: b"compiled again") == b"code"
    trouble.gone()


@remedy("engine/model.py", "start without --speculative-config")
def test_a_drafter_whose_modules_count_from_zero(trouble: Trouble, store_path: Path) -> None:
    settings = Settings(store=store_path, threads=1)
    with Store.open(store_path) as store, TieredModel(settings, store, records=2, max_tokens=16) as model:
        model.claim(1, "model.layers.1.mlp.experts")
        with trouble:
            model.claim(1, "draft.layers.1.mlp.experts")
    with Store.open(store_path) as store, TieredModel(settings, store, records=2, max_tokens=16) as model:
        for number in (1, 2):
            model.claim(number, f"model.layers.{number}.mlp.experts")
    trouble.gone()
