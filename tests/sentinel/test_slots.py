"""Device slots: a wrong byte is found where it lies, a resident is written again, a spare slot leaves service.

On the CPU a slot is filled at once; the states and bytes are those of a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the device tier wants torch")

from moetier.engine.hybrid.layer import HybridLayer  # noqa: E402
from moetier.engine.model import IntegrityError, TieredModel  # noqa: E402
from moetier.sentinel.slots import WatchedSlots  # noqa: E402
from moetier.sentinel.watch import Sentinel  # noqa: E402
from moetier.settings import Settings  # noqa: E402
from moetier.store.build import build_store  # noqa: E402
from moetier.store.store import Store  # noqa: E402
from moetier.tiers.slots import DeviceSlots  # noqa: E402
from tests.engine.test_hybrid_help import Bench  # noqa: E402
from tests.store.checkpoints import write_checkpoint  # noqa: E402

EXPERTS, RESIDENT, SPARE = 8, [0, 3], [5, 6]


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slots")
    write_checkpoint(folder / "model", experts=EXPERTS, hidden=64, intermediate=32, top_k=3)
    build_store(folder / "model", folder / "store")
    return folder / "store"


class Held:
    """A layer with two resident and two spare experts in slots, one slot free, and a sentinel whose turns we take."""

    def __init__(self, path: Path) -> None:
        self.store = Store.open(path)
        self.tiers = TieredModel(Settings.parse({"store": path, "threads": 1}), self.store, 0, max_tokens=4)
        stride = self.store.layout.stride
        memory = torch.zeros((len(RESIDENT) + len(SPARE) + 1, stride), dtype=torch.uint8)
        self.slots = DeviceSlots(EXPERTS, RESIDENT, memory)
        bench = Bench(self.store, self.tiers.pool, 0, 1)
        bench.reader.close()
        self.layer: HybridLayer = bench.layer
        self.layer.slots = self.slots
        for expert in (*RESIDENT, *SPARE):
            self.slots.fill(expert, torch.from_numpy(self.record(expert)))
        self.slots.publish(wait=True)
        self.sentinel = Sentinel(self.tiers, 0.5, halt=False, seed=0)
        self.sentinel.watch(WatchedSlots(self.tiers, [self.layer], torch.device("cpu")))

    def record(self, expert: int) -> np.ndarray:
        out = np.zeros(self.store.layout.stride, np.uint8)
        self.store.read_record(0, expert, out)
        return out

    def round(self) -> None:
        for _ in range(len(RESIDENT) + len(SPARE) + 1):
            self.sentinel._check_next_record()

    def close(self) -> None:
        self.sentinel.close()
        self.tiers.close()
        self.store.close()


@pytest.fixture
def held(store_path: Path) -> Iterator[Held]:
    held = Held(store_path)
    yield held
    held.close()


def test_right_bytes_are_never_told(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        held.round()
    held.sentinel.settle()
    assert held.tiers.checks.records >= 20 * (len(RESIDENT) + len(SPARE))
    assert held.tiers.checks.wrong_records == 0
    assert not caplog.records


@pytest.mark.parametrize("expert", RESIDENT)
def test_a_resident_is_written_again(held: Held, expert: int, caplog: pytest.LogCaptureFixture) -> None:
    held.slots.slots[held.slots.mirror[expert], 77] ^= 16
    held.round()
    held.sentinel.settle()
    assert "the record in its device slot has checksum" in caplog.text
    assert "it was written again, and is right now" in caplog.text
    held.slots.check_integrity(held.record)
    assert held.tiers.checks.wrong_records == 1
    assert set(held.slots.live) == {*RESIDENT, *SPARE}


@pytest.mark.parametrize("expert", SPARE)
def test_a_spare_slot_leaves_service(held: Held, expert: int, caplog: pytest.LogCaptureFixture) -> None:
    slot = int(held.slots.mirror[expert])
    held.slots.slots[slot, -1] ^= 1
    held.round()
    held.sentinel.settle()
    assert "the slot is not used any more" in caplog.text
    held.slots.check_integrity(held.record)
    assert expert not in held.slots.live
    assert held.slots.free == 1
    assert held.slots.fill(expert, torch.from_numpy(held.record(expert))) != slot


def test_a_slot_that_is_refilled_while_it_is_looked_at_is_no_suspect(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is torn: half of one record, half of the next."""
    watched = WatchedSlots(held.tiers, [held.layer], torch.device("cpu"))
    another, copy = torch.from_numpy(held.record(7)), torch.Tensor.copy_

    def copied(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        monkeypatch.undo()
        held.slots.retire(5)
        held.slots.fill(7, another)
        return copy(self, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    assert watched.problem(0, 5) is None
    assert held.slots.publish() == [7]
    assert watched.problem(0, 7) == ""


def test_a_device_that_does_not_hold_what_is_written_ends_the_engine(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = int(held.slots.mirror[3])
    write = held.slots.rewrite

    def stuck(expert: int, record: torch.Tensor) -> None:
        write(expert, record)
        held.slots.slots[slot, 5] ^= 4

    monkeypatch.setattr(held.slots, "rewrite", stuck)
    held.slots.slots[slot, 5] ^= 4
    held.round()
    with pytest.raises(IntegrityError, match=r"expert 3: its device slot was written again and still has checksum"):
        held.sentinel.settle()
