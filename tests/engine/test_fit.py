"""What fits is decided before anything is loaded, and a refusal says what would fit."""

from dataclasses import replace

import pytest

from moetier.budget import GIB, Budget, Item, choose, reserve_of
from moetier.errors import SettingsError

MIB = 2**20
ROOM = Budget(100 * GIB, (Item("engine", 20 * GIB),), layers=40, experts=384, stride=18 * MIB, reserve=10 * GIB)


def test_auto_takes_what_the_reserve_leaves() -> None:
    assert choose(None, ROOM) == 70 * GIB // (40 * 18 * MIB) == 99


def test_auto_is_at_most_all() -> None:
    assert choose(None, replace(ROOM, experts=64)) == 64


def test_auto_may_be_none() -> None:
    assert choose(None, replace(ROOM, limit=30 * GIB)) == 0


def test_a_number_may_spend_the_reserve() -> None:
    assert choose(110, ROOM) == 110


def test_too_many_records_names_what_fits() -> None:
    with pytest.raises(SettingsError, match=r"too little memory for 384 of 384 records.*--dram-records 99 "):
        choose(384, ROOM)


@pytest.mark.parametrize("asked", [None, 0, 5])
def test_not_even_the_rest_fits(asked: int | None) -> None:
    with pytest.raises(SettingsError, match=r"too little memory: 20.00 GiB are needed before any expert"):
        choose(asked, replace(ROOM, limit=15 * GIB))


@pytest.mark.parametrize(("limit", "reserve"), [(16 * GIB, 2 * GIB), (160 * GIB, 20 * GIB), (512 * GIB, 20 * GIB)])
def test_reserve(limit: int, reserve: int) -> None:
    assert reserve_of(limit) == reserve
