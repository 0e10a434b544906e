"""What is said of routing traces and heat files; done as it says, and the trace is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moetier.tiers.heat import Heat
from moetier.tiers.step import Step
from moetier.trace.record import HEADER, MAGIC, Trace, TracedCall, TraceHeader, write_trace
from moetier.trace.simulate import Plan, simulate
from tests.remedies.commands import moetier
from tests.remedies.trouble import Trouble

remedy = pytest.mark.remedy
LAYERS, EXPERTS, TOP_K, IDENTITY = 2, 8, 2, "c3" * 32


def _record(path: Path, steps: int = 20) -> None:
    """Write a trace as a server that records does."""
    ids = np.array([[0, 1], [2, 3]], np.int32)
    calls = [TracedCall(layer, Step(2, step == 0), ids) for step in range(steps) for layer in range(LAYERS)]
    write_trace(path, TraceHeader(LAYERS, EXPERTS, TOP_K, IDENTITY), calls)


def _heat(path: Path, identity: str = IDENTITY) -> Path:
    heat = Heat(LAYERS, EXPERTS, identity)
    heat.add(0, np.array([0]), np.array([5], np.int32))
    heat.save(path)
    return path


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_text("hello"), marks=remedy("trace/record.py", "found another file")),
        pytest.param(
            lambda path: path.write_bytes(HEADER.pack(MAGIC, 99, LAYERS, EXPERTS, TOP_K, bytes(32))),
            marks=remedy("trace/record.py", "expected a trace of format"),
        ),
        pytest.param(lambda path: (_record(path), _flip(path)), marks=remedy("trace/record.py", "whole blocks")),
    ],
)
def test_a_trace_is_recorded_again(trouble: Trouble, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    path = tmp_path / "trace"
    damage(path)
    with trouble:
        moetier("trace", "show", path)
    path.unlink()
    _record(path)
    moetier("trace", "show", path)
    trouble.gone()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("trac", marks=remedy("trace/record.py", "expected a routing trace, found: {}")),
        pytest.param("/dev/null", marks=remedy("trace/record.py", "expected a routing trace, found no regular file")),
    ],
)
def test_the_name_of_a_trace(trouble: Trouble, tmp_path: Path, name: str) -> None:
    _record(tmp_path / "trace")
    with trouble:
        moetier("trace", "show", tmp_path / name)
    moetier("trace", "show", tmp_path / "trace")
    trouble.gone()


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("mine", marks=remedy("trace/record.py", "name a new file for the trace")),
        pytest.param("mine/trace", marks=remedy("trace/record.py", "cannot write the trace")),
    ],
)
def test_a_trace_is_a_new_file(trouble: Trouble, tmp_path: Path, place: str) -> None:
    (tmp_path / "mine").write_text("mine")
    with trouble:
        _record(tmp_path / place)
    _record(tmp_path / "new")
    trouble.gone()


@remedy("cli/trace.py", "expected a heat file of the model that was traced")
def test_heat_of_another_model(trouble: Trouble, tmp_path: Path) -> None:
    _record(tmp_path / "trace")
    simulated = ("trace", "simulate", tmp_path / "trace", "--heat")
    with trouble:
        moetier(*simulated, _heat(tmp_path / "other.json", "00" * 32))
    moetier(*simulated, _heat(tmp_path / "heat.json"))
    trouble.gone()


@remedy("trace/simulate.py", "name the heat file of the model that was traced")
def test_heat_of_another_shape(trouble: Trouble, tmp_path: Path) -> None:
    _record(tmp_path / "trace")
    trace = Trace.open(tmp_path / "trace")
    with trouble:
        simulate(trace, Plan(4), np.ones((LAYERS + 1, EXPERTS), np.uint64))
    simulate(trace, Plan(4), Heat.load(_heat(tmp_path / "heat.json"), LAYERS, EXPERTS, IDENTITY).counts)
    trouble.gone()


@pytest.mark.parametrize("longer", [True, False], ids=["longer", "heat"])
@remedy("trace/simulate.py", "record a longer trace, or give heat")
def test_a_trace_that_only_teaches(trouble: Trouble, tmp_path: Path, longer: bool) -> None:
    _record(tmp_path / "short", steps=1)
    with trouble:
        moetier("trace", "simulate", tmp_path / "short")
    _record(tmp_path / "long")
    heat = () if longer else ("--heat", _heat(tmp_path / "heat.json"))
    moetier("trace", "simulate", tmp_path / ("long" if longer else "short"), *heat)
    trouble.gone()


@remedy("trace/simulate.py", "expected resident <= slots")
def test_fewer_slots(trouble: Trouble, tmp_path: Path) -> None:
    _record(tmp_path / "trace")
    with trouble:
        simulate(Trace.open(tmp_path / "trace"), Plan(EXPERTS + 1, resident=2))
    simulate(Trace.open(tmp_path / "trace"), Plan(EXPERTS, resident=2))
    trouble.gone()
