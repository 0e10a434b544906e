"""Sweeps: combinations, constraints, resuming after a kill, and that nothing is measured twice."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from moetier_bench import BenchError
from moetier_bench.documents import Recipe, Suite
from moetier_bench.probes import Decode, Prefill, Quality
from moetier_bench.samples import Cell, figure
from moetier_bench.sweep import (
    Constraint,
    Measured,
    Trial,
    combinations,
    not_told_apart,
    parse_axis,
    ranked,
    sweep,
    thinned,
    with_values,
)

ROOT = Path(__file__).resolve().parents[2]

RECIPE = Recipe.model_validate(
    {
        "id": "tiny/a",
        "summary": "x",
        "model": {"name": "tiny", "folder": "models/tiny", "identity": "0" * 64},
        "serve": {"engine": "moetier", "settings": {"threads": 2}, "vllm": ["--max-num-seqs", "8", "--enforce-eager"]},
    }
)
LIMIT_SECONDS = 480
"""Longer than any start or end takes, even on a busy machine."""
SUITE = Suite(id="small", summary="x", probes=(Decode(), Prefill(), Quality()))
AXES = [("dram_records", ["25%", 8]), ("disk_threads", [1, 8, 16])]


def test_axes() -> None:
    assert parse_axis("dram_records=25%,8,auto") == ("dram_records", ["25%", 8, "auto"])
    assert len(list(combinations(AXES))) == 6
    assert parse_axis("isa=" + "[" * 100_000) == ("isa", ["[" * 100_000])
    with pytest.raises(BenchError, match="expected NAME=VALUE"):
        parse_axis("dram_records")
    with pytest.raises(BenchError, match="given twice"):
        list(combinations([("a", [1]), ("a", [2])]))


def test_values_become_settings_and_flags() -> None:
    varied = with_values(RECIPE, {"dram_records": "25%", "vllm:--max-num-seqs": 32, "vllm:--block-size": 64})
    assert varied.serve.settings == {"threads": 2, "dram_records": "25%"}
    assert varied.serve.vllm == ("--enforce-eager", "--max-num-seqs", "32", "--block-size", "64")
    with pytest.raises(BenchError, match="unknown setting 'dram_record', did you mean 'dram_records'"):
        with_values(RECIPE, {"dram_record": 1})
    with pytest.raises(BenchError, match="share such as 25%"):
        with_values(RECIPE, {"dram_records": "lots"})
    with pytest.raises(BenchError, match="a zero byte cannot be given to a program"):
        with_values(RECIPE, {"vllm:--model": "a\0b"})


@pytest.mark.parametrize(
    ("before", "values", "after"),
    [
        ("--enforce-eager --max-num-seqs 8", {"--enforce-eager": True}, "--max-num-seqs 8 --enforce-eager"),
        ("--enforce-eager --max-num-seqs 8", {"--enforce-eager": False}, "--max-num-seqs 8"),
        ("--max-num-seqs=8 --enforce-eager", {"--max-num-seqs": 4}, "--enforce-eager --max-num-seqs 4"),
        ("--seed -1 --enforce-eager", {"--seed": 2}, "--enforce-eager --seed 2"),
        ("--seed 1 --seed 3 -O 0", {"--seed": 2}, "-O 0 --seed 2"),
    ],
)
def test_a_flag_takes_only_its_own_words(before: str, values: dict[str, Any], after: str) -> None:
    serve = RECIPE.serve.model_copy(update={"vllm": tuple(before.split())})
    varied = with_values(
        RECIPE.model_copy(update={"serve": serve}), {f"vllm:{flag}": value for flag, value in values.items()}
    )
    assert " ".join(varied.serve.vllm) == after


@pytest.mark.parametrize("text", ["ttft", "ttft.2048<", "<3", "ttft=3", "ttft.2048<nan", "ttft.2048<1e999", "a<b"])
def test_constraints_that_are_none(text: str) -> None:
    with pytest.raises(BenchError, match="expected a cell"):
        Constraint.parse(text)


def test_only_what_is_asked_is_measured() -> None:
    thin = thinned(SUITE, ["decode.C8", "ttft.2048"])
    assert [probe.probe for probe in thin.probes] == ["decode", "prefill"]
    assert thin.probes[0].levels == (8,)  # type: ignore[union-attr]
    with pytest.raises(BenchError, match="no probe for cells of fairness"):
        thinned(SUITE, ["fairness.gap_p99_during"])


def cells(speed: float, ttft: float | None) -> tuple[Cell, ...]:
    none = None if ttft is not None else "too long"
    return figure("decode.C1", "tok/s", "higher", [speed]), figure("ttft.2048", "s", "lower", [ttft or 0], none)


def test_ranking_leaves_out_null_cells_and_broken_constraints() -> None:
    trials = [
        Trial(key="1", values={"n": 1}, cells=cells(10, 1)),
        Trial(key="2", values={"n": 2}, cells=cells(30, 9)),
        Trial(key="3", values={"n": 3}, cells=cells(40, None)),
        Trial(key="4", values={"n": 4}, cells=cells(20, 2)),
        Trial(key="5", values={"n": 5}, failure="out of memory"),
    ]
    best = ranked(trials, "decode.C1", [Constraint.parse("ttft.2048 < 3")])
    assert [trial.values["n"] for trial in best] == [4, 1]
    assert [trial.values["n"] for trial in ranked(trials, "ttft.2048", [])] == [1, 4, 2]


def test_a_killed_sweep_resumes(tmp_path: Path) -> None:
    state, measured = tmp_path / "sweep.jsonl", []
    trials = [(values, with_values(RECIPE, values)) for values in combinations(AXES)]

    def measure(recipe: Recipe, suite: Suite) -> Measured:
        if len(measured) == 4:
            raise KeyboardInterrupt
        measured.append(recipe.serve.settings)
        return cells(float(len(measured)), 1.0), None, 0.5

    with pytest.raises(KeyboardInterrupt):
        sweep(trials, SUITE, state, measure, "commit", lambda _: None)
    with state.open("a") as file:
        file.write('{"key":"cut o')
    measured.clear()
    found = sweep(trials, SUITE, state, measure, "commit", lambda _: None)
    assert len(measured) == 2
    assert [trial.values for trial in found] == [values for values, _ in trials]
    measured.clear()
    assert sweep(trials, SUITE, state, measure, "commit", lambda _: None) == found
    assert measured == []
    sweep(trials[:1], SUITE, state, measure, "another commit", lambda _: None)
    assert len(measured) == 1


def test_another_file_is_no_state(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("hello\n")
    with pytest.raises(BenchError, match="no state of a sweep"):
        sweep([], SUITE, path, lambda *_: ((), None, None), "", lambda _: None)
    assert path.read_text() == "hello\n"


@pytest.mark.parametrize("text", ["a note, its last line not ended", "x\nlast", '{"format": 1}'])
def test_another_file_keeps_its_last_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(BenchError, match="no state of a sweep"):
        sweep([], SUITE, path, lambda *_: ((), None, None), "", lambda _: None)
    assert path.read_text() == text


def test_two_sweeps_do_not_write_the_same_state(tmp_path: Path) -> None:
    trials = [(values, with_values(RECIPE, values)) for values in combinations(AXES[:1])]
    state, refused = tmp_path / "state.jsonl", []

    def measure(recipe: Recipe, suite: Suite) -> Measured:
        with pytest.raises(BenchError, match="another sweep"):
            sweep(trials, SUITE, state, measure, "commit", lambda _: None)
        refused.append(recipe)
        return cells(1.0, 1.0), None, None

    assert len(sweep(trials, SUITE, state, measure, "commit", lambda _: None)) == len(refused) == 2


@pytest.mark.parametrize("place", ["no-such-folder/state.jsonl", "."], ids=["no folder", "a folder"])
def test_a_state_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path, place: str) -> None:
    def measure(recipe: Recipe, suite: Suite) -> Measured:
        raise AssertionError("measured")

    trials = [(values, with_values(RECIPE, values)) for values in combinations(AXES)]
    with pytest.raises(BenchError, match="name another --state"):
        sweep(trials, SUITE, tmp_path / place, measure, "commit", lambda _: None)


def test_what_the_ranges_do_not_tell_apart_is_said() -> None:
    def trial(name: str, *samples: float) -> Trial:
        return Trial(key=name, values={"n": name}, cells=(figure("decode.C1", "tok/s", "higher", samples),))

    best = ranked([trial("a", 90, 100, 110), trial("b", 80, 85, 91), trial("c", 70, 75, 89)], "decode.C1", [])
    assert [other.key for other in not_told_apart(best, "decode.C1")] == ["b"]
    assert not_told_apart(best[:1], "decode.C1") == []


def test_a_killed_sweep_leaves_no_server(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    state = tmp_path / "state.jsonl"
    command = [sys.executable, "-m", "moetier", "bench", "sweep", "nano/tiered-25", "--axis", "dram_records=25%"]
    with (tmp_path / "out").open("wb") as out:
        sweeping = subprocess.Popen(
            [*command, "--state", str(state), "--store", str(tmp_path / "store")], cwd=ROOT, stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (family := _servers(sweeping.pid)):
            assert sweeping.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        sweeping.kill()
        sweeping.wait()
    _, left = psutil.wait_procs(family, timeout=LIMIT_SECONDS)
    for process in left:
        process.kill()
    assert not left
    assert not state.read_text(), "a trial that was not measured to its end"


def _servers(pid: int) -> list[psutil.Process]:
    """What a sweep has started, once vLLM is among it."""
    family = psutil.Process(pid).children(recursive=True)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if "vllm.entrypoints.openai.api_server" in process.cmdline():
                return family
    return []
