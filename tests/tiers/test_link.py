"""Records that are copied by their addresses, to a device without streams: these bytes go there, and no others."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the device tier wants torch")

from moetier.tiers.link import copy_to_device  # noqa: E402
from moetier.tiers.slots import DeviceSlots  # noqa: E402

STRIDE, NOTHING = 64, 0xA5


def record(size: int) -> "torch.Tensor":
    return torch.from_numpy(np.random.default_rng(size).integers(0, 128, size, np.uint8))


@pytest.fixture
def memory() -> "torch.Tensor":
    return torch.full((6, STRIDE), NOTHING, dtype=torch.uint8)


@pytest.mark.parametrize("size", [0, 1, 7, STRIDE - 5])
def test_a_copy_is_of_so_many_bytes(memory: Any, size: int) -> None:
    source = record(STRIDE)
    copy_to_device(memory[2].data_ptr() + 5, source.data_ptr() + 3, size, None)
    expected = torch.full((6, STRIDE), NOTHING, dtype=torch.uint8)
    expected[2, 5 : 5 + size] = record(STRIDE)[3 : 3 + size]
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("size", [1, STRIDE - 1, STRIDE])
def test_a_record_fills_its_slot_of_shared_memory_and_leaves_the_bytes_behind_it(memory: Any, size: int) -> None:
    slots = DeviceSlots(9, [], memory[2:5], first=2)
    filled = {slots.fill(expert, record(size)) for expert in (8, 3)}
    expected = torch.full((6, STRIDE), NOTHING, dtype=torch.uint8)
    expected[[2 + slot for slot in filled], :size] = record(size)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (record(STRIDE + 1), "longer"),
        (record(STRIDE)[::2], "one after the other"),
        (record(STRIDE)[:8].to(torch.int32), "bytes"),
    ],
    ids=["too long", "not contiguous", "no bytes"],
)
def test_what_is_no_record_is_refused_and_takes_no_slot(memory: Any, wrong: "torch.Tensor", message: str) -> None:
    slots = DeviceSlots(9, [], memory[:1])
    with pytest.raises(AssertionError, match=message):
        slots.fill(4, wrong)
    slots.check_integrity()
    assert slots.free == 1
    assert bool((memory == NOTHING).all())
