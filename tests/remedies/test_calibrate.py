"""What is said of measurements and corrections; done as it says, and the plan is corrected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.decision import made
from tests.doctor.machines import machine
from tests.remedies.commands import moetier
from tests.remedies.trouble import Trouble

remedy = pytest.mark.remedy
WORDS = ("--gpus", "none", "--ram", "64GB")
MEASURED = ("--measured", "decode_tok_s=100")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return made.write(tmp_path / "model", made.floats())


def _expected(model: Path, *more: str | Path, metric: str = "decode_tok_s") -> float:
    """What is planned on a machine in words."""
    found = json.loads(moetier("plan", model, *WORDS, *more, "--json"))
    return float(found[metric]["value"])


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        pytest.param(
            (*WORDS, *MEASURED),
            (*WORDS, *MEASURED, "--out", "c.json"),
            marks=remedy("cli/calibrate.py", "name a file for them with --out"),
            id="words",
        ),
        pytest.param(
            (*WORDS, "--out", "c.json", "--measured", "decode_tok_s"),
            (*WORDS, "--out", "c.json", *MEASURED),
            marks=remedy("cli/calibrate.py", "expected METRIC=VALUE"),
            id="pair",
        ),
        pytest.param(
            (*WORDS, "--out", "c.json"),
            (*WORDS, "--out", "c.json", *MEASURED),
            marks=remedy("cli/calibrate.py", "expected what was measured"),
            id="nothing",
        ),
        pytest.param(
            (*WORDS, "--out", "c.json"),
            (*WORDS, "--out", "c.json", "--results", "r.json"),
            marks=remedy("cli/calibrate.py", "expected what was measured"),
            id="nothing-results",
        ),
        pytest.param(
            (*WORDS, *MEASURED, "--out", "/dev/null/c.json"),
            (*WORDS, *MEASURED, "--out", "c.json"),
            marks=remedy("plan/calibration.py", "name another with --out"),
            id="not-kept",
        ),
    ],
)
def test_the_words_are_put_right(
    trouble: Trouble, model: Path, wrong: Any, right: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.json").write_text('{"decode_tok_s": 100}')
    with trouble:
        moetier("calibrate", model, *wrong)
    moetier("calibrate", model, *right)
    assert _expected(model, "--calibration", "c.json") == pytest.approx(100, rel=0.01)
    trouble.gone()


@remedy("cli/calibrate.py", "kept in {}; `moetier plan` uses it")
def test_kept_corrections_are_used(trouble: Trouble, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --calibration those of a file, without it those of the machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(model / "state"))
    file = model / "machine.json"
    file.write_text(machine(gpus=()).to_json())
    trouble.said(moetier("calibrate", model, "--machine", file, *MEASURED))
    found = json.loads(moetier("plan", model, "--machine", file, "--json"))
    assert found["decode_tok_s"]["value"] == pytest.approx(100, rel=0.01)
    out = model / "c.json"
    trouble.said(moetier("calibrate", model, *WORDS, *MEASURED, "--out", out))
    assert f"with --calibration {out}" in " ".join(trouble.text.split())
    assert _expected(model, "--calibration", out) == pytest.approx(100, rel=0.01)
    trouble.gone()


def _no_corrections(path: Path) -> None:
    path.write_text("[]")


def _unknown_cost(path: Path) -> None:
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "factors": {"luck": 1.5}}))


def _of_another(path: Path) -> None:
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "identity": "0" * 16}))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(_no_corrections, marks=remedy("plan/calibration.py", "expected corrections of `moetier"), id="[]"),
        pytest.param(_unknown_cost, marks=remedy("plan/calibration.py", "costs that this version has"), id="cost"),
    ],
)
def test_damaged_corrections_are_removed_and_made_again(
    trouble: Trouble, model: Path, damage: Callable[[Path], None]
) -> None:
    out = model / "c.json"
    learn = ("calibrate", model, *WORDS, *MEASURED, "--out", out)
    moetier(*learn)
    damage(out)
    with trouble:
        _expected(model, "--calibration", out)
    out.unlink()
    moetier(*learn)
    assert _expected(model, "--calibration", out) == pytest.approx(100, rel=0.01)
    trouble.gone()


@remedy("cli/calibrate.py", "name another file with --out")
def test_corrections_of_another_machine_stay(trouble: Trouble, model: Path) -> None:
    out = model / "c.json"
    learn = ("calibrate", model, *WORDS, *MEASURED, "--out")
    moetier(*learn, out)
    _of_another(out)
    before = out.read_bytes()
    with trouble:
        moetier(*learn, out)
    moetier(*learn, model / "d.json")
    assert out.read_bytes() == before
    assert _expected(model, "--calibration", model / "d.json") == pytest.approx(100, rel=0.01)
    trouble.gone()


@pytest.mark.parametrize("way", ["blame", "settings"])
@remedy("plan/calibration.py", "name another with --blame")
def test_a_measurement_that_a_cost_cannot_explain(trouble: Trouble, model: Path, way: str) -> None:
    """Another cost can; or it was measured with fewer experts in DRAM, where the disk is read."""
    out, from_disk = model / "c.json", _expected(model, "--dram-records", "2")
    learn = ("calibrate", model, *WORDS, "--measured", f"decode_tok_s={from_disk}", "--out", out)
    with trouble:
        moetier(*learn, "--blame", "disk_rate")
    more = ("--blame", "layer") if way == "blame" else ("--blame", "disk_rate", "--dram-records", "2")
    moetier(*learn, *more)
    trouble.gone()
