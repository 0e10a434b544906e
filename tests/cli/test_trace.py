"""`moetier trace` on a small trace: the figures that it prints, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from moetier.cli import main
from moetier.tiers.heat import Heat
from moetier.tiers.step import Step
from moetier.trace.record import TracedCall, TraceHeader, write_trace

LAYERS, EXPERTS, TOP_K = 3, 16, 2
IDENTITY = "c3" * 32


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Skewed routing: the first experts are the hot ones."""
    generator, path = np.random.default_rng(0), tmp_path / "trace"
    chances = 1.0 / np.arange(1, EXPERTS + 1)
    chances /= chances.sum()

    def ids(tokens: int) -> np.ndarray:
        rows = [generator.choice(EXPERTS, TOP_K, replace=False, p=chances) for _ in range(tokens)]
        return np.array(rows, np.int32)

    calls = [
        TracedCall(layer, Step(2, step % 10 == 0), ids(40 if step % 10 == 0 else 2))
        for step in range(100)
        for layer in range(LAYERS)
    ]
    write_trace(path, TraceHeader(LAYERS, EXPERTS, TOP_K, IDENTITY), calls)
    return path


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: importing it anew each time takes longer than all that it does."""

    def run(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["moetier", "trace", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


def test_show(run: Run, trace: Path) -> None:
    report = json.loads(run("show", trace, "--json").stdout)
    assert report == {
        "layers": LAYERS,
        "experts": EXPERTS,
        "top_k": TOP_K,
        "identity": IDENTITY,
        "steps": 100,
        "steps_with_a_prompt": 10,
        "layer_calls": 300,
        "tokens": 10 * 40 + 90 * 2,
        "bytes": trace.stat().st_size,
    }


def test_simulate_more_slots_hit_more(run: Run, trace: Path) -> None:
    done = run("simulate", trace, "--slots", "4", "--slots", "50%", "--policy", "lru", "--resident", "50%", "--json")
    assert done.returncode == 0, done.stderr
    four, eight = json.loads(done.stdout)["runs"]
    assert (four["slots"], four["resident"], eight["slots"], eight["resident"]) == (4, 2, 8, 4)
    assert 0 < four["decode"]["hit_rate"] < eight["decode"]["hit_rate"] < 1
    assert four["decode"]["steps"] == 72
    assert four["prefill"]["steps"] == 8
    assert len(four["decode"]["layer_hit_rates"]) == LAYERS


def test_simulate_prints_a_table(run: Run, trace: Path) -> None:
    out = run("simulate", trace).stdout
    assert "4 of 16" in out
    assert out.count("%") >= 6


def test_simulate_with_a_heat_file(run: Run, trace: Path, tmp_path: Path) -> None:
    heat = Heat(LAYERS, EXPERTS, IDENTITY)
    heat.add(0, np.array([0], np.int32), np.array([5], np.int32))
    heat.save(tmp_path / "heat.json")
    done = run("simulate", trace, "--heat", tmp_path / "heat.json", "--policy", "lru", "--json")
    assert json.loads(done.stdout)["runs"][0]["decode"]["steps"] == 90, "nothing of the trace only teaches"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slots", "17"], "from 0 to 16"),
        (["--slots", "auto"], "from 0 to 16"),
        (["--slots", "x"], "found 'x'"),
        (["--slots", "200%"], "found '200%'"),
        (["--slots", "4", "--resident", "5"], "--resident"),
        (["--policy", "mru"], "expected one of lru, second-touch, frequency"),
        (["--learn", "1"], "learn"),
        (["--heat", "absent.json"], "expected a heat file"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_simulate_refuses(run: Run, trace: Path, arguments: list[str], message: str) -> None:
    done = run("simulate", trace, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_another_file_is_no_trace(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello")
    for verb in ("show", "simulate"):
        done = run(verb, tmp_path / "x")
        assert done.returncode == 2
        assert "expected a routing trace" in done.stderr


def test_record_refuses_before_anything_starts(run: Run, trace: Path, tmp_path: Path, nano: Path) -> None:
    (tmp_path / "sets").mkdir()
    done = run("record", nano, tmp_path / "new", "--store", tmp_path / "s", "--sets", tmp_path / "sets")
    assert done.returncode == 2
    assert "expected evaluation sets" in done.stderr
    assert not (tmp_path / "new").exists()
