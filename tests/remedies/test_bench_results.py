"""What `moetier bench` says of results, states and this machine's memory; done as it says."""

from __future__ import annotations

import fcntl
import gzip
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from moetier.doctor.measure import kernel
from moetier_bench.corpus import Prompts
from moetier_bench.documents import Recipe, Suite
from moetier_bench.endpoint import connect
from moetier_bench.meter import Meter
from moetier_bench.probes import Decode
from moetier_bench.probes.base import Target
from moetier_bench.prove import write_proof
from moetier_bench.result import Result, to_text, write_result
from moetier_bench.samples import Cell
from moetier_bench.sweep import Measured, sweep
from tests.bench.made import checkout, commit_all, git, made, recipe
from tests.bench.scripted import Script
from tests.bench.simulated import simulated
from tests.remedies.commands import moetier
from tests.remedies.trouble import Trouble

remedy = pytest.mark.remedy


@pytest.fixture
def results(tmp_path: Path) -> tuple[Path, Path]:
    """A checkout with one committed result, and the result's file."""
    root = tmp_path / "checkout"
    root.mkdir()
    commit = checkout(root)
    path = write_result(root / "results", made(commit=commit))
    commit_all(root)
    return root, path


def _restore(root: Path, path: Path) -> None:
    git(root, "checkout", "HEAD", "--", str(path))


def _copied(path: Path) -> None:
    path.with_name("copy.json").write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    ("damage", "cure"),
    [
        pytest.param(
            lambda path: path.unlink(),
            _restore,
            marks=remedy("moetier_bench/check.py", "but gone: restore it"),
            id="gone",
        ),
        pytest.param(
            lambda path: path.write_bytes(path.read_bytes() + b"\n"),
            _restore,
            marks=remedy("moetier_bench/check.py", "not the file that was listed"),
            id="edited",
        ),
        pytest.param(
            _copied,
            lambda _, path: path.with_name("copy.json").unlink(),
            marks=remedy("moetier_bench/check.py", "not listed in"),
            id="copied",
        ),
    ],
)
def test_results_are_restored(
    trouble: Trouble,
    results: tuple[Path, Path],
    damage: Callable[[Path], object],
    cure: Callable[[Path, Path], object],
) -> None:
    root, path = results
    moetier("bench", "check", "--root", root)
    damage(path)
    with trouble:
        moetier("bench", "check", "--root", root)
    cure(root, path)
    moetier("bench", "check", "--root", root)
    trouble.gone()


@remedy("moetier_bench/result.py", "expected a result of `moetier bench run`")
def test_what_is_no_result(trouble: Trouble, results: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with trouble:
        moetier("bench", "report", tmp_path / "x.json", tmp_path / "x.html")
    moetier("bench", "report", results[1], tmp_path / "x.html")
    trouble.gone()


@remedy("moetier_bench/cli/results.py", "--only {}: expected")
def test_a_part_that_is_compared(trouble: Trouble, results: tuple[Path, Path]) -> None:
    with trouble:
        moetier("bench", "compare", *results[1:], *results[1:], "--only", "size")
    assert "one of quality, speed" in trouble.text
    with pytest.raises(SystemExit, match="unproven"):  # so few samples prove nothing
        moetier("bench", "compare", *results[1:], *results[1:], "--only", "speed")
    trouble.gone()


def _proof() -> Result:
    """A result as `moetier prove` marks it."""
    extra = {"identity": {"calls": 1, "differ": 0}}
    return made().model_copy(update={"origin": "prove", "extra": extra}).sealed()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(
            b"{}", marks=remedy("moetier_bench/prove.py", "expected a file that `moetier prove` wrote"), id="other"
        ),
        pytest.param(
            gzip.compress(b"half")[:9],
            marks=remedy("moetier_bench/prove.py", "expected a file that `moetier prove` wrote"),
            id="cut",
        ),
        pytest.param(
            None, marks=remedy("moetier_bench/prove.py", "not written by `moetier prove MODEL OUT`"), id="result-of-run"
        ),
    ],
)
def test_what_is_no_proof(trouble: Trouble, results: tuple[Path, Path], tmp_path: Path, data: bytes | None) -> None:
    root, path = results
    wrong, right = tmp_path / "wrong.json", tmp_path / "right.json"
    wrong.write_bytes(path.read_bytes() if data is None else data)
    with trouble:
        moetier("bench", "import", wrong, "--root", root)
    write_proof(_proof(), right)
    moetier("bench", "import", right, "--root", root)
    moetier("bench", "check", "--root", root)
    trouble.gone()


@remedy("moetier_bench/prove.py", "is there already; name another file")
def test_a_proof_is_a_new_file(trouble: Trouble, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("mine")
    with trouble:
        moetier("prove", tmp_path, tmp_path / "mine.json")
    write_proof(_proof(), tmp_path / "another.json")
    assert (tmp_path / "another.json").read_text() == to_text(_proof())
    trouble.gone()


def _measured(_: Recipe, __: Suite) -> Measured:
    return (Cell(name="decode.C1", unit="tok/s", value=1.0, samples=(1.0,), better="higher"),), None, 0.0


def _sweep(state: Path) -> None:
    suite = Suite(id="small", summary="for tests", probes=(Decode(),))
    found = sweep([({"threads": n}, recipe(f"tiny/{n}")) for n in (1, 2)], suite, state, _measured, "here", print)
    assert len(found) == 2


@contextmanager
def _held(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _written(name: str, data: bytes) -> Callable[[Path], Path]:
    def state(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return state


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(
            lambda folder: folder, marks=remedy("moetier_bench/sweep.py", "is no file; name another"), id="folder"
        ),
        pytest.param(
            lambda folder: folder / "no" / "x",
            marks=remedy("moetier_bench/sweep.py", "cannot be written"),
            id="no-folder",
        ),
        pytest.param(_written("x", b"a\nb\n"), marks=remedy("moetier_bench/sweep.py", "is no state of a sweep (")),
        pytest.param(_written("x", b"mine"), marks=remedy("moetier_bench/sweep.py", "is no state of a sweep: found")),
    ],
)
def test_a_sweep_writes_another_state(trouble: Trouble, tmp_path: Path, state: Callable[[Path], Path]) -> None:
    with trouble:
        _sweep(state(tmp_path))
    _sweep(tmp_path / "another.jsonl")
    trouble.gone()


@pytest.mark.parametrize("waited", [True, False])
@remedy("moetier_bench/sweep.py", "another sweep is writing")
def test_one_sweep_at_a_time(trouble: Trouble, tmp_path: Path, waited: bool) -> None:
    with _held(tmp_path / "x"):
        with trouble:
            _sweep(tmp_path / "x")
        if not waited:
            _sweep(tmp_path / "another")
    if waited:
        _sweep(tmp_path / "x")
    trouble.gone()


@pytest.mark.parametrize("shorter", [True, False], ids=["shorter", "more-positions"])
@remedy("moetier_bench/probes/decode.py", "shorten it, or give the model more positions")
def test_a_window_that_the_streams_fill(trouble: Trouble, shorter: bool) -> None:
    def cell(seconds: float, positions: int) -> Cell:
        probe = Decode(levels=(1,), repeats=1, seconds=seconds, warmup_seconds=0.02)

        async def run(url: str) -> Cell:
            async with connect(url, None, None) as endpoint:
                import psutil

                raw = await probe.measure(Target(endpoint, Prompts(endpoint), Meter(psutil.Process()), url))
                return next(cell for cell in probe.cells(raw) if cell.name == "decode.C1")

        return simulated(Script(first=0.02, gap=0.01, stop_after=positions), run)

    found = cell(0.5, 20)
    assert found.value is None
    trouble.said(str(found.reason))
    assert (cell(0.1, 20) if shorter else cell(0.5, 100)).value
    trouble.gone()


@remedy("doctor/measure/kernel.py", "choose a smaller shape")
def test_a_shape_that_memory_has_no_room_for(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SECONDS_PER_ROW", 0.0)
    one = ("bench", "kernel", "-M", "1", "--threads", "1", "--shape")
    with trouble:
        moetier(*one, "65536,65536,4096,4096")
    moetier(*one, "64,64,8,2")
    trouble.gone()


@pytest.mark.parametrize(
    ("package", "project"), [("aiohttp", "aiohttp"), ("psutil", "psutil"), ("scipy", "scipy"), ("yaml", "PyYAML")]
)
@remedy("moetier_bench/cli/common.py", "pip install 'moetier[bench]'")
def test_the_packages_of_the_extra(
    trouble: Trouble, package: str, project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, package, None)
        with trouble:
            moetier("bench", "list")
    wanted = map(Requirement, importlib.metadata.requires("moetier") or ())
    extra = {one.name.lower() for one in wanted if one.marker is not None and one.marker.evaluate({"extra": "bench"})}
    assert project.lower() in extra, f"moetier[bench] does not install {package}"
    moetier("bench", "list")
    trouble.gone()
