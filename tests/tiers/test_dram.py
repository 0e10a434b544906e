"""Slots, table, free list and policy of one layer's DRAM tier agree at every moment."""

import numpy as np
import pytest

from moetier.tiers.dram import DramTier
from moetier.tiers.policy import Lru

EXPERTS, SLOTS, STRIDE = 12, 4, 4096
NOTHING_PINNED = np.zeros(EXPERTS, np.bool_)


@pytest.fixture
def tier() -> DramTier:
    return DramTier(EXPERTS, SLOTS, STRIDE, Lru(EXPERTS))


def fill(tier: DramTier, *experts: int) -> None:
    for expert in experts:
        slot = tier.take(expert, NOTHING_PINNED)
        assert slot is not None
        tier.publish(expert, slot)


def touch(tier: DramTier, *experts: int) -> None:
    tier.policy.touch(np.array(experts, np.int32))


def test_expert_is_mapped_only_once_its_bytes_are_whole(tier: DramTier) -> None:
    slot = tier.take(9, NOTHING_PINNED)
    assert slot is not None
    assert not tier.addresses.any()
    tier.publish(7, slot)
    assert tier.addresses[7] == tier.arena.address(slot)
    assert tier.addresses[7] % 4096 == 0
    tier.check_integrity()


def test_least_recently_used_gives_way(tier: DramTier) -> None:
    fill(tier, 0, 1, 2, 3)
    touch(tier, 0)
    touch(tier, 1, 2, 3)
    touch(tier, 9)
    slot = tier.take(9, NOTHING_PINNED)
    assert slot is not None
    assert tier.addresses[0] == 0, "expert 0 was unmapped before its slot is rewritten"
    tier.publish(9, slot)
    assert tier.resident.tolist() == [1, 2, 3, 9]
    tier.check_integrity()


def test_expert_of_the_same_step_is_never_given_up(tier: DramTier) -> None:
    fill(tier, 0, 1, 2, 3)
    touch(tier, 0, 1, 2, 3, 9)
    assert tier.take(9, NOTHING_PINNED) is None
    assert tier.resident.tolist() == [0, 1, 2, 3]


def test_pinned_expert_is_never_given_up(tier: DramTier) -> None:
    fill(tier, 0, 1, 2, 3)
    touch(tier, 9)
    pinned = np.zeros(EXPERTS, np.bool_)
    pinned[[0, 1, 3]] = True
    slot = tier.take(9, pinned)
    assert slot is not None
    tier.publish(9, slot)
    assert tier.resident.tolist() == [0, 1, 3, 9]


def test_failed_read_gives_its_slot_back(tier: DramTier) -> None:
    slot = tier.take(9, NOTHING_PINNED)
    assert slot is not None
    tier.give_back(slot)
    tier.check_integrity()
    fill(tier, 0, 1, 2, 3)
    tier.check_integrity()


def test_no_slots_at_all() -> None:
    tier = DramTier(EXPERTS, 0, STRIDE, Lru(EXPERTS))
    assert tier.take(9, NOTHING_PINNED) is None
    tier.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_random_history_keeps_the_invariants(seed: int) -> None:
    tier = DramTier(EXPERTS, SLOTS, STRIDE, Lru(EXPERTS))
    generator = np.random.default_rng(seed)
    for _ in range(300):
        step = generator.choice(EXPERTS, generator.integers(1, 5), replace=False).astype(np.int32)
        tier.policy.touch(step)
        pinned = np.isin(np.arange(EXPERTS), step)
        for expert in step[tier.addresses[step] == 0]:
            slot = tier.take(int(expert), pinned)
            if slot is None:
                continue
            if generator.random() < 0.2:
                tier.give_back(slot)
            else:
                tier.publish(int(expert), slot)
        tier.check_integrity()
        assert (tier.addresses[step] != 0).sum() <= SLOTS


def test_broken_table_is_found(tier: DramTier) -> None:
    fill(tier, 3)
    tier.addresses[5] = tier.addresses[3]
    with pytest.raises(AssertionError, match="expert 5"):
        tier.check_integrity()
