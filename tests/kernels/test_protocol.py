"""Python sees protocol.h as the compiler laid it out, and nothing that both sides need is written down twice."""

import ctypes
from dataclasses import fields

import pytest

from moetier.kernels import protocol
from moetier.kernels.cpu import _native
from moetier.plan import kernels as planned

STRUCTS, NUMBERS, COUNTS = _native.protocol()


@pytest.mark.parametrize("name", STRUCTS)
def test_structures_are_the_compilers(name: str) -> None:
    size, members = STRUCTS[name]
    structure = getattr(protocol, name)
    assert ctypes.sizeof(structure) == size
    assert [getattr(structure, field).offset for field, *_ in members] == [offset for *_, offset in members]


@pytest.mark.parametrize("name", STRUCTS)
def test_no_field_is_left_out(name: str) -> None:
    size, members = STRUCTS[name]
    structure, end = getattr(protocol, name), 0
    for field, *_, offset in members:
        member = getattr(structure, field)
        assert 0 <= offset - end < member.size, f"bytes {end} to {offset} of {name}: list their field in protocol.cpp"
        end = offset + member.size
    assert size - end < 8


def test_counts_are_in_the_order_of_the_header() -> None:
    assert [COUNTS[name] for name in protocol.COUNTS] == list(range(COUNTS["COUNTS"]))


def test_the_device_polls_one_aligned_word() -> None:
    answered, refused = protocol.Box.answered.offset, protocol.Box.refused.offset
    assert (answered % 64, refused - answered, protocol.Box.posted.offset) == (0, 4, 0)


def test_costs_are_sent_in_the_order_of_the_header() -> None:
    hybrid = pytest.importorskip("moetier.kernels.cuda.hybrid", reason="the device tier wants torch")
    assert [field.name for field in fields(hybrid.Costs)] == [field for field, *_ in STRUCTS["Costs"][1]]


def test_the_planner_knows_the_same_limits() -> None:
    decode = pytest.importorskip("moetier.kernels.cuda.decode", reason="the device tier wants torch")
    assert (planned.FEW_PAIRS, planned.GROUP) == (protocol.MAX_PAIRS, decode.GROUP)
