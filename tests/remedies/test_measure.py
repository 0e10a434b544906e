"""What is said where something cannot be measured; done as it says, and it is measured."""

from __future__ import annotations

import resource
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from moetier.doctor.measure import cpu as cpu_measure
from moetier.doctor.measure import disk as disk_measure
from moetier.doctor.measure.cpu import measure_dram
from moetier.doctor.measure.disk import measure_disk
from moetier.doctor.measure.gpu import measure_links
from moetier.machine.probe.cpu import probe_cpu
from moetier.machine.probe.disk import probe_disk
from moetier.machine.probe.gpu import visible_devices
from tests.conftest import ROOT
from tests.doctor.machines import gpu
from tests.doctor.measuring import little_to_measure
from tests.remedies.trouble import Trouble

remedy = pytest.mark.remedy
RECORD = 64 << 10


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small disk's."""
    little_to_measure(monkeypatch, tmp_path / "cache")
    return tmp_path


@remedy("doctor/measure/cpu.py", "stop other processes")
def test_memory_to_measure_with(trouble: Trouble, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = SimpleNamespace(available=16 << 20)
    monkeypatch.setattr(cpu_measure, "machine", SimpleNamespace(memory=lambda: little))
    with trouble:
        measure_dram(probe_cpu())
    little.available = 60 << 30  # as the others end
    assert measure_dram(probe_cpu())
    trouble.gone()


def _store(folder: Path) -> Path:
    """A folder that has what there is to read."""
    (folder / "store").mkdir()
    (folder / "store/records").write_bytes(bytes(disk_measure.SPAN))
    return folder / "store"


@pytest.fixture
def full() -> Iterator[Callable[[], None]]:
    """No file of this process grows; until it is called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    restore = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)  # noqa: E731
    yield restore
    restore()
    signal.signal(signal.SIGXFSZ, handler)


@remedy("doctor/measure/disk.py", "the disk cannot be measured")
def test_a_disk_that_cannot_be_written(trouble: Trouble, folder: Path, full: Callable[[], None]) -> None:
    """A store is only read; another folder is written to."""
    with trouble:
        measure_disk(probe_disk(folder), RECORD)
    full()
    store = _store(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    assert measure_disk(probe_disk(store), RECORD)
    full()
    assert measure_disk(probe_disk(folder), RECORD)
    trouble.gone()


@remedy("doctor/measure/disk.py", "expected room for two records")
def test_a_disk_without_room(trouble: Trouble, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_measure, "FREE_SHARE", 1e-12)
    with trouble:
        measure_disk(probe_disk(folder), RECORD)
    assert measure_disk(probe_disk(_store(folder)), RECORD)
    monkeypatch.setattr(disk_measure, "FREE_SHARE", 0.1)  # as once some is freed
    assert measure_disk(probe_disk(folder), RECORD)
    trouble.gone()


class FakeTorch(SimpleNamespace):
    """torch as far as devices are measured; `left` bytes can be had on the device, and `pinned` on the host."""

    uint8 = 1
    __version__ = "2.13.0"

    def __init__(self, cuda: bool = True, left: int = 1 << 40, pinned: int = 1 << 40) -> None:
        super().__init__(left=left, pinned=pinned)
        event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 1.0)
        self.cuda = SimpleNamespace(
            is_available=lambda: cuda,
            device_count=lambda: 1,
            get_device_properties=lambda _: SimpleNamespace(uuid="0"),
            Event=lambda enable_timing: event,
            Stream=lambda _: None,
            device=lambda _: nullcontext(),
            stream=lambda _: nullcontext(),
            synchronize=lambda _: None,
        )

    def device(self, _: str, number: int) -> int:
        return number

    def ones(self, size: int, dtype: int, device: int | None = None, pin_memory: bool = False) -> SimpleNamespace:
        """Memory of the device, or pinned; RuntimeError where there is not so much, as torch has it."""
        if size > (self.pinned if pin_memory else self.left):
            raise RuntimeError("CUDA out of memory." if not pin_memory else "CUDA error: out of memory")
        return SimpleNamespace(copy_=lambda _, non_blocking=False: None)


@pytest.mark.parametrize("short", ["left", "pinned"])
@remedy("doctor/measure/gpu.py", "stop what uses them (nvidia-smi lists it)")
def test_memory_to_copy(trouble: Trouble, short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch(**{short: 1 << 20})
    monkeypatch.setitem(sys.modules, "torch", torch)
    with trouble:
        measure_links((gpu(),))
    setattr(torch, short, 1 << 40)  # stopped, or raised
    assert measure_links((gpu(),)).host_to_device
    trouble.gone()


@remedy("doctor/measure/gpu.py", "pip install 'moetier[gpu]'")
def test_torch_is_installed(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    monkeypatch.setitem(sys.modules, "torch", None)
    with trouble:
        measure_links((gpu(),))
    assert any(one.startswith("torch") for one in extras["gpu"])
    monkeypatch.setitem(sys.modules, "torch", FakeTorch())  # as it is then
    assert measure_links((gpu(),)).host_to_device
    trouble.gone()


@pytest.mark.parametrize("way", ["build", "hidden"])
@remedy("doctor/measure/gpu.py", "install one, or hide the devices")
def test_a_build_of_torch_that_uses_devices(trouble: Trouble, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(cuda=False))
    with trouble:
        measure_links((gpu(),))
    if way == "build":
        monkeypatch.setitem(sys.modules, "torch", FakeTorch())
        assert measure_links((gpu(),)).host_to_device
    else:
        seen = visible_devices(["GPU-0"], {"CUDA_VISIBLE_DEVICES": ""})
        assert measure_links(tuple(gpu(index=at) for at in seen)).host_to_device == ()
    trouble.gone()
