"""What is said of rates and what measures them; done as it says, and they are measured, kept and read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moetier.cli import app
from moetier.decision.installed import installed
from moetier.doctor import cache, judge_rates
from moetier.doctor.cache import load_rates, rates_file
from moetier.doctor.measure import cpu as cpu_measure
from moetier.doctor.measure import kernel as bench
from moetier.kernels.cpu import ThreadPool, integer_peak
from moetier.machine.facts import DramRate, KernelRate, Rates
from tests.decision import made
from tests.doctor.measuring import little_to_measure
from tests.remedies.commands import moetier
from tests.remedies.trouble import Trouble

remedy = pytest.mark.remedy
IDENTITY = "1" * 16
SHAPE = ("--shape", "64,64,8,2")


PEAKS: dict[str, float] = {}


def _peak(pool: ThreadPool, isa: str) -> float:
    """The peak of an instruction set, which takes long, measured once for all tests."""
    return PEAKS.get(isa) or PEAKS.setdefault(isa, integer_peak(pool, isa))


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that we are in: a small disk's; rates are kept in one of its own."""
    little_to_measure(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr("moetier.doctor.examine.hardware_identity", lambda *_: IDENTITY)  # a VM's memory grows
    monkeypatch.setattr(cpu_measure, "READS", 1)
    monkeypatch.setattr(cpu_measure, "TOKENS", (1,))
    monkeypatch.setattr(bench, "integer_peak", _peak)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def doctor(*arguments: str | Path) -> str:
    """What it prints, whatever else is wrong with this machine; its errors are raised."""
    done = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def measure() -> None:
    doctor("--measure", *SHAPE)


def plan(folder: Path) -> None:
    """Plan a model for this machine, by the rates that are kept."""
    moetier("plan", made.write(folder / "model", made.floats()), "--skip-support-check")


def kept(**changes: Any) -> Path:
    """Keep rates for this machine, as another version, or a copied folder, left them."""
    rates = Rates(identity=IDENTITY, dram_read=(DramRate(threads=1, bytes_per_s=4e9),))
    path = rates_file(rates.identity)
    path.parent.mkdir(parents=True)
    path.write_text(rates.model_copy(update=changes).model_dump_json())
    return path


IMPOSSIBLE = KernelRate(
    isa="avx2", threads=1, hidden=4096, intermediate=2048, tokens=512, experts=128.0, seconds=0.1,
    bytes_per_s=8.1e9, ops_per_s=1e9, peak_ops_per_s=1e12,
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"identity": "0" * 16}, marks=remedy("doctor/cache.py", "these are rates of"), id="other"),
        pytest.param(
            {"kernel": (IMPOSSIBLE,)}, marks=remedy("doctor/judge_rates.py", "measured wrongly"), id="impossible"
        ),
    ],
)
def test_rates_are_measured_anew(trouble: Trouble, folder: Path, changes: dict[str, Any]) -> None:
    path = kept(**changes)
    with trouble:
        plan(folder)
    said = re.search(r"moetier doctor --measure", trouble.text)
    assert said is not None
    measure()
    assert load_rates(IDENTITY) is not None
    plan(folder)
    assert json.loads(path.read_text())["measured_at"]
    trouble.gone()


@remedy("doctor/examine.py", "writes them anew")
def test_a_damaged_file_of_rates(trouble: Trouble) -> None:
    kept().write_text("{}")
    trouble.said(doctor())
    measure()
    assert "writes them anew" not in doctor()
    trouble.gone()


@remedy("doctor/judge_rates.py", "not measured here yet")
def test_rates_of_a_machine_that_was_not_measured(trouble: Trouble) -> None:
    trouble.said(doctor())
    measure()
    said = doctor()
    assert "not measured here yet" not in said
    assert "GB/s read by threads" in said
    trouble.gone()


@remedy("doctor/cache.py", "measured rates cannot be read")
def test_a_cache_that_cannot_be_read(trouble: Trouble, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with trouble:
        plan(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    plan(folder)
    trouble.gone()


@pytest.mark.parametrize("way", ["folder", "json", "space"])
@remedy("doctor/cache.py", "measured rates cannot be kept")
def test_rates_that_cannot_be_kept(trouble: Trouble, folder: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = cache.write_durably
    monkeypatch.setattr(cache, "write_durably", lambda _, *more, **named: writes(Path("/dev/full/x"), *more, **named))
    printed = CliRunner().invoke(app, ["doctor", "--measure", "--json", *SHAPE])
    trouble.said(str(printed.exception))
    if way == "json":
        (folder / "machine.json").write_text(printed.stdout)
        assert "not measured here yet" not in doctor("--rates", folder / "machine.json")
        trouble.gone()
        return
    monkeypatch.setattr(cache, "write_durably", writes)
    if way == "folder":
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "another"))
    measure()
    assert "not measured here yet" not in doctor()
    trouble.gone()


@pytest.mark.parametrize("way", ["quiet", "as-they-are"])
@remedy("doctor/examine.py", "expected a quiet machine")
def test_a_busy_machine(trouble: Trouble, folder: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_rates, "MOST_OTHERS", -1.0)  # nothing is quiet enough
    printed = CliRunner().invoke(app, ["doctor", "--measure", "--json", *SHAPE])
    trouble.said(str(printed.exception))
    if way == "quiet":
        monkeypatch.setattr(judge_rates, "MOST_OTHERS", 1e9)
        measure()
        assert load_rates(IDENTITY) is not None
    else:
        (folder / "machine.json").write_text(printed.stdout)
        assert "not measured here yet" not in doctor("--rates", folder / "machine.json")
    trouble.gone()


@pytest.mark.parametrize("content", ["{}", "hello", '{"identity": 3}'])
@remedy("machine/file.py", "write it anew")
@remedy("machine/file.py", "moetier doctor --json")
def test_a_machine_is_described_anew(trouble: Trouble, folder: Path, content: str) -> None:
    model, path = made.write(folder / "model", made.floats()), folder / "machine.json"
    path.write_text(content)
    with trouble:
        moetier("plan", model, "--machine", path)
    path.write_text(doctor(*_advised(trouble.text)))
    moetier("plan", model, "--machine", path)
    trouble.gone()


@pytest.mark.parametrize("content", ["{}", "a machine"])
@remedy("machine/file.py", "write it anew")
@remedy("machine/file.py", "moetier doctor --measure --json")
def test_rates_of_a_file_are_measured(trouble: Trouble, folder: Path, content: str) -> None:
    """A machine's facts have none where it was not measured."""
    path = folder / "machine.json"
    path.write_text(doctor("--json") if content == "a machine" else content)
    with trouble:
        doctor("--rates", path)
    path.write_text(doctor(*_advised(trouble.text), *SHAPE))
    assert "not measured here yet" not in doctor("--rates", path)
    trouble.gone()


def _advised(text: str) -> list[str]:
    """The arguments of doctor that a text advises."""
    said = re.search(r"`moetier doctor ([-\w ]+)`", " ".join(text.split()))
    assert said is not None
    return said[1].split()


@pytest.mark.parametrize("right", [("--measure", *SHAPE), ("--rates", "rates.json")], ids=["measure", "rates"])
@remedy("cli/doctor.py", "leave one out")
def test_measured_or_from_a_file(trouble: Trouble, folder: Path, right: tuple[str, ...]) -> None:
    (folder / "rates.json").write_text(Rates(identity="x").model_dump_json())
    with trouble:
        doctor("--measure", "--rates", "rates.json")
    doctor(*right)
    trouble.gone()


@remedy("cli/doctor.py", "--json has the sources")
def test_sources_of_what_is_supported(trouble: Trouble) -> None:
    if installed() is None:
        pytest.skip("the table is of the installed vLLM")
    trouble.said(doctor())
    assert any(support["sources"] for support in json.loads(doctor("--json"))["support"])
    trouble.gone()


@remedy("machine/probe/disk.py", "name the one that the expert store is in")
def test_the_folder_of_the_store(trouble: Trouble, folder: Path) -> None:
    with trouble:
        doctor("--disk", folder / "store")
    (folder / "store").mkdir()
    assert str(folder / "store") in doctor("--disk", folder / "store")
    trouble.gone()
