"""Policies: what gives way for what, and what a long prompt must not push out."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from moetier.settings import PolicyName
from moetier.tiers.policy import POLICIES, Frequency, Lru, Policy, SecondTouch, Swap, refills
from moetier.tiers.step import Step

EXPERTS = 8


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int32)


def after(policy: Policy, *steps: tuple[int, ...]) -> Policy:
    for step in steps:
        policy.touch(ids(*step))
    return policy


@pytest.fixture(params=POLICIES, ids=str)
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param](EXPERTS)


def test_expert_of_the_step_never_gives_way(policy: Policy) -> None:
    after(policy, (0, 1, 5), (0, 1, 5))
    assert policy.victim(5, ids(0, 1)) is None
    assert policy.victim(5, ids()) is None


def test_prompt_pushes_out_neither_what_decode_used_nor_what_heat_placed(policy: Policy) -> None:
    policy.place(ids(3, 4))
    after(policy, (0, 1))
    for _ in range(5):
        policy.touch(ids(2, 5, 6), prefill=True)
        assert policy.victim(5, ids(0, 1, 3, 4)) is None
    assert policy.victim(5, ids(0, 7)) == 7, "nobody knows expert 7: it was read for a prompt"


def test_prompt_teaches_nothing(policy: Policy) -> None:
    """After a long prompt, decode finds the policy as it left it."""
    after(policy, (0,), (1,), (2,))
    for _ in range(9):
        policy.touch(ids(0, 5), prefill=True)
    after(policy, *[(6,)] * 5)
    assert policy.victim(6, ids(0, 1, 2)) == 0


def test_unknown_expert_gives_way_at_first_use(policy: Policy) -> None:
    after(policy, (1,))
    assert policy.victim(1, ids(7)) == 7


def test_heat_orders_what_was_not_used_yet(policy: Policy) -> None:
    policy.place(ids(2, 0, 1))
    after(policy, (6,), (6,), (6,))
    assert policy.victim(6, ids(0, 1, 2)) == 1, "the coldest of those that heat placed"


def test_lru() -> None:
    policy = after(Lru(EXPERTS), (0,), (1, 2), (0,), (5,))
    assert policy.victim(5, ids(0, 1, 2)) == 1


def test_second_touch_comes_in_only_when_it_was_used_twice_meanwhile() -> None:
    policy = after(SecondTouch(EXPERTS), (0, 1), (1,), (5,))
    assert policy.victim(5, ids(0, 1)) is None
    after(policy, (5,))
    assert policy.victim(5, ids(0, 1)) == 0
    after(policy, (0,), (6,))
    assert policy.victim(6, ids(0, 1)) is None


def test_frequency_prefers_the_common_to_the_recent() -> None:
    policy = after(Frequency(EXPERTS), *[(0,)] * 5, (1,), *[(2,)] * 4)
    assert policy.victim(2, ids(0, 1)) == 1
    assert policy.victim(2, ids(0)) is None
    after(policy, *[(2,)] * 4)
    assert policy.victim(2, ids(0)) == 0


def test_frequency_forgets() -> None:
    policy = after(Frequency(EXPERTS), *[(0,)] * 20, *[(3,)] * 1000, (2,), (2,), (2,))
    assert policy.victim(2, ids(0, 3)) == 0


def test_refills_take_free_slots_then_victims_up_to_the_limit() -> None:
    policy = after(Lru(EXPERTS), (0,), (1,), (4, 5, 6))
    missed, spares = ids(4, 5, 6), ids(0, 1)
    assert refills(policy, missed, spares, free=1, limit=9) == [Swap(4, None), Swap(5, 0), Swap(6, 1)]
    assert refills(policy, missed, spares, free=1, limit=2) == [Swap(4, None), Swap(5, 0)]
    assert refills(policy, missed, spares, free=0, limit=9) == [Swap(4, 0), Swap(5, 1)], "no victim twice"
    assert refills(policy, missed, spares, free=0, limit=0) == []


def test_refills_ask_for_all_as_for_one_after_the_other(policy: Policy) -> None:
    rng = np.random.default_rng(4)
    held, swapped = ids(0, 1, 2), 0
    policy.place(held)
    for _ in range(400):
        used = np.unique(rng.zipf(1.6, 5).clip(max=EXPERTS) - 1).astype(np.int32)
        policy.touch(rng.permutation(EXPERTS)[used], prefill=bool(rng.random() < 0.2))
        missed = np.setdiff1d(np.flatnonzero(policy._current), held).astype(np.int32)
        free, limit = (int(n) for n in rng.integers(0, 3, 2))
        expected: list[Swap] = []
        left = held
        for expert in missed.tolist():
            victim = None if len(expected) < free else policy.victim(expert, left)
            if len(expected) < limit and (len(expected) < free or victim is not None):
                expected.append(Swap(expert, victim))
                left = left[left != victim]
        assert refills(policy, missed, held, free, limit) == expected
        swapped += sum(swap.victim is not None for swap in expected)
        held = np.union1d(left, [swap.expert for swap in expected]).astype(np.int32)[-4:]
    assert swapped > 20


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([], Step(0, False)),
        ([(1, 0)] * 3, Step(3, False)),
        ([(1, 0), (4, 3)], Step(2, False)),
        ([(1, 0), (5, 3)], Step(2, True)),
        ([(512, 0)], Step(1, True)),
    ],
    ids=["empty", "decode", "verify", "more-than-its-drafts", "prompt"],
)
def test_step_of_requests(requests: list[tuple[int, int]], expected: Step) -> None:
    assert Step.of(requests) == expected


def test_settings_know_every_policy() -> None:
    assert set(get_args(PolicyName)) == set(POLICIES)
