"""What the tiers say of memory, threads, records and ranks; done as it says, and the records are read."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from moetier.contract import LayerGeometry
from moetier.store.build import build_store
from moetier.store.store import Store
from moetier.tiers.arena import Arena
from moetier.tiers.disk import DiskReader
from moetier.tiers.part import Part
from tests.conftest import ROOT
from tests.remedies.commands import moetier
from tests.remedies.limited import with_little_memory
from tests.remedies.trouble import Trouble
from tests.store.checkpoints import write_checkpoint

remedy = pytest.mark.remedy


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    made = write_checkpoint(tmp_path / "model", experts=4, hidden=64, intermediate=64, top_k=2)
    build_store(made.path, tmp_path / "store")
    return tmp_path / "store"


@remedy("tiers/arena.py", "set dram_records lower")
def test_fewer_records_in_dram(trouble: Trouble) -> None:
    with trouble:
        Arena(1 << 20, 1 << 40)
    Arena(1, 1 << 12)
    trouble.gone()


@pytest.mark.parametrize("raised", [False, True], ids=["fewer", "raised"])
@remedy("tiers/disk.py", "set disk_threads lower")
def test_fewer_reading_threads(trouble: Trouble, store_path: Path, raised: bool) -> None:
    imports = "from moetier.tiers.disk import DiskReader\nfrom moetier.store.store import Store"
    work = "with Store.open(sys.argv[1]) as store: DiskReader(store, number).close()"
    trouble.said(with_little_memory(imports, work, 256, 2, store_path, raised=raised))
    trouble.gone()


FORKED = """
import os, sys
from moetier.tiers.arena import Arena
from moetier.tiers.disk import DiskReader
from moetier.store.store import Store
with Store.open(sys.argv[1]) as store:
    reader, room = DiskReader(store, 2), Arena(1, store.layout.stride).view(0)
    if os.fork() == 0:
        try:
            reader.submit(0, 0, room)
        except RuntimeError as error:
            print(error, flush=True)
        DiskReader(store, 2).submit(0, 0, room).result()
        print("read", flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    reader.close()
"""


@remedy("tiers/disk.py", "open one in this process")
def test_a_reader_of_the_child(trouble: Trouble, store_path: Path) -> None:
    python = [sys.executable, *(["-S"] if sys.flags.no_site else []), "-c", FORKED, str(store_path)]
    done = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    trouble.said(done.stdout)
    assert done.stdout.endswith("read\n")
    trouble.gone()


def _read(path: Path) -> None:
    """Read every record of a store, as a server without its checkpoint does."""
    with Store.open(path) as store:
        reader = DiskReader(store, 2)
        try:
            room = Arena(1, store.layout.stride).view(0)
            for layer in range(len(store.manifest.layers)):
                for expert in range(store.manifest.layer_geometry.experts):
                    reader.submit(layer, expert, room).result()
        finally:
            reader.close()


@remedy("tiers/disk.py", "remove the file that was named, and run `moetier store build CHECKPOINT")
def test_a_record_that_went_bad(trouble: Trouble, store_path: Path) -> None:
    with Store.open(store_path) as store:
        path, offset = store.record_file(0), store.offset(1)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    with trouble:
        _read(store_path)
    with pytest.raises(SystemExit):
        moetier("store", "verify", store_path)
    assert str(path) in trouble.text
    path.unlink()
    moetier("store", "build", store_path.with_name("model"), store_path)
    moetier("store", "verify", store_path)
    _read(store_path)
    trouble.gone()


@remedy("tiers/part.py", "moetier store build CHECKPOINT OUT --slices")
def test_a_store_for_two_ranks(trouble: Trouble, store_path: Path) -> None:
    def ranks(path: Path) -> list[Part]:
        with Store.open(path) as store:
            return [Part(store.manifest.layer_geometry, rank, 2) for rank in range(2)]

    with trouble:
        ranks(store_path)
    another = store_path.with_name("another")
    moetier("store", "build", store_path.with_name("model"), another, "--slices", "2")
    ranks(another)
    trouble.gone()


@remedy("tiers/part.py", "choose a power of two")
def test_a_number_of_ranks(trouble: Trouble) -> None:
    geometry = LayerGeometry(64, 128, 4, 2, 4)
    with trouble:
        Part(geometry, 0, 3)
    Part(geometry, 0, 4)
    trouble.gone()


@remedy("contract/geometry.py", "use fewer slices")
def test_fewer_slices(trouble: Trouble, store_path: Path) -> None:
    built = ("store", "build", store_path.with_name("model"), store_path.with_name("another"), "--slices")
    with trouble:
        moetier(*built, "4")
    moetier(*built, "2")
    trouble.gone()


class Driver:
    """A device's driver as this process meets it: what it locks and copies is counted, and may be refused."""

    def __init__(self) -> None:
        self.sound = True

    def cudaHostRegister(self, _: int, size: int, __: int) -> int:
        """Refuse what goes beyond the limit on locked memory, as cudaErrorHostMemoryRegistrationFailed does."""
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return 0 if limit == resource.RLIM_INFINITY or size <= limit else 1

    def cuMemcpyHtoDAsync(self, *_: object) -> tuple[object]:
        """Refuse a copy where the device has a fault."""
        return (Status(0 if self.sound else 999),)


class Status(int):
    """A driver's answer."""

    name = "CUDA_ERROR_UNKNOWN"


@pytest.fixture
def locked_memory() -> Iterator[int]:
    """Bytes that this process may lock: a limit of 1 MiB, or a lower one that it has."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = 1 << 20 if before[1] == resource.RLIM_INFINITY else min(1 << 20, before[1])
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


@pytest.mark.parametrize("raised", [True, False], ids=["raised", "fewer-records"])
@remedy("tiers/registered.py", "raise the limit on locked memory")
def test_memory_that_may_be_locked(
    trouble: Trouble, locked_memory: int, raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="the device tier wants torch")
    from moetier.tiers.registered import Registered

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    size, hard = 4 * locked_memory, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    raised = raised and (hard == resource.RLIM_INFINITY or hard >= size)  # as far as this process may
    with trouble:
        Registered().add(0, size)
    if raised:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    Registered().add(0, size if raised else size // 8)
    trouble.gone()


@remedy("tiers/link.py", "look at `dmesg` and `moetier doctor`")
def test_a_copy_that_the_driver_refused(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the device tier wants torch")
    from moetier.tiers.link import copy_to_device

    driver, stream = Driver(), SimpleNamespace(cuda_stream=0)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    driver.sound = False
    with trouble:
        copy_to_device(0, 0, 1, stream)  # type: ignore[arg-type]
    driver.sound = True  # as after a restart
    copy_to_device(0, 0, 1, stream)  # type: ignore[arg-type]
    with suppress(SystemExit):  # what else it finds on this machine
        assert "moetier doctor" in trouble.text
        moetier("doctor")
    trouble.gone()
