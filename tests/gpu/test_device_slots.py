"""The table logic of DeviceSlots, on CPU tensors; benchmarks/gpu/run.py stresses the streams on a GPU."""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the device tier wants torch")

from moetier.tiers.slots import ABSENT, DeviceSlots  # noqa: E402

EXPERTS, STRIDE, FIRST = 12, 64, 40


def record(expert: int, version: int = 0) -> "torch.Tensor":
    return torch.from_numpy(np.random.default_rng([expert, version]).integers(0, 256, STRIDE, np.uint8))


def bytes_of(expert: int) -> np.ndarray:
    return record(expert).numpy()


@pytest.fixture
def slots() -> DeviceSlots:
    """Two resident experts in place, three spare slots free."""
    slots = DeviceSlots(EXPERTS, [3, 7], torch.zeros((5, STRIDE), dtype=torch.uint8), first=FIRST)
    for expert in (3, 7):
        slots.fill(expert, record(expert))
    assert slots.publish() == [3, 7]
    return slots


def test_an_expert_is_in_the_table_only_after_publish(slots: DeviceSlots) -> None:
    slot = slots.fill(5, record(5))
    slots.check_integrity(bytes_of)
    assert slots.table[5] == ABSENT
    assert slots.publish() == [5]
    assert slots.table[5] == FIRST + slot
    assert slots.live.tolist() == [3, 5, 7]
    slots.check_integrity(bytes_of)


def test_a_retired_slot_is_filled_again(slots: DeviceSlots) -> None:
    for expert in (0, 1, 2):
        slots.fill(expert, record(expert))
    slots.publish()
    assert slots.free == 0
    old = int(slots.mirror[1])
    slots.retire(1)
    assert slots.table[1] == ABSENT
    assert slots.fill(9, record(9)) == old
    slots.publish()
    slots.check_integrity(bytes_of)
    assert slots.spares.tolist() == [0, 2, 9]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: s.retire(3), "resident"),
        (lambda s: s.retire(11), "no slot"),
        (lambda s: s.fill(7, record(7)), "already"),
        (lambda s: [s.fill(5, record(5)), s.fill(5, record(5))], "on its way"),
        (lambda s: [s.fill(e, record(e)) for e in (0, 1, 2, 4)], "no free slot"),
    ],
    ids=["retire resident", "retire absent", "fill live", "fill twice", "fill without room"],
)
def test_what_would_break_the_table_is_refused(slots: DeviceSlots, act, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        act(slots)


@pytest.mark.parametrize("damage", ["table", "owner", "free", "bytes"])
def test_check_integrity_finds_damage(slots: DeviceSlots, damage: str) -> None:
    if damage == "table":
        slots.table[4] = 1
    elif damage == "owner":
        slots._owner[slots.mirror[3]] = 4
    elif damage == "free":
        slots._free.append(int(slots.mirror[3]))
    else:
        slots.slots[int(slots.mirror[7]), 5] ^= 1
    with pytest.raises(AssertionError):
        slots.check_integrity(bytes_of)


def test_random_fills_and_retirements_keep_every_invariant() -> None:
    pick = random.Random(0)
    slots = DeviceSlots(EXPERTS, [], torch.zeros((4, STRIDE), dtype=torch.uint8))
    for _ in range(400):
        on_their_way = {filling.expert for filling in slots._filling.values()}
        absent = [e for e in range(EXPERTS) if slots.mirror[e] == ABSENT and e not in on_their_way]
        kind = pick.randrange(3)
        if kind == 0 and slots.free:
            expert = pick.choice(absent)
            slots.fill(expert, record(expert))
        elif kind == 1 and slots.live.size:
            slots.retire(int(pick.choice(slots.live.tolist())))
        else:
            slots.publish()
        slots.check_integrity(bytes_of)
