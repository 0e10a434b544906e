"""The table of what runs where: well-formed, sourced, and asked by `moetier serve`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moetier.decision.support import Entry, check, devices_of, known_model_types, minor_of, table
from moetier.machine.facts import Answer
from tests.doctor.machines import gpu

COMMAND = str(Path(sys.executable).with_name("moetier"))
SOURCE = re.compile(
    r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+|vLLM [\d.]+(, [\d.]+)*: [\w/.]+(, [\w/.]+)*|"
    r"run: .+|moetier: [\w/.]+"
)


@pytest.mark.parametrize("entry", table(), ids=lambda entry: f"{entry.models[0]}-{entry.devices[0]}-{entry.since}")
def test_entries(entry: Entry) -> None:
    assert all(SOURCE.fullmatch(source) for source in entry.sources), entry.sources
    assert (0, 26) <= minor_of(entry.since) < minor_of(entry.before) <= (0, 34), "what vLLM's sources were read for"
    assert all(re.fullmatch(r"\*|cpu|\d+(\.\d+)?", device) for device in entry.devices)
    assert entry.because


def test_no_entry_is_hidden_by_those_before() -> None:
    """Each one is the answer to some question."""
    devices = ("cpu", "6.1", "7.5", "8.0", "9.0", "10.0", "12.0")
    reached = set()
    for model in known_model_types():
        for minor in range(26, 34):
            for device in devices:
                found = next((at for at, e in enumerate(table()) if e.matches(model, (0, minor), device)), None)
                reached.add(found)
    assert reached - {None} == set(range(len(table())))


@pytest.mark.parametrize(
    ("model", "vllm", "device", "answer"),
    [
        ("deepseek_v41", "0.26.0", "9.0", Answer.FAILS),
        ("deepseek_v41", "0.29.1rc1.dev9", "12.0", Answer.FAILS),
        ("deepseek_v41", "0.33.0", "12.0", Answer.UNKNOWN),
        ("deepseek_v41", "0.33.0", "9.0", Answer.WORKS),
        ("deepseek_v4", "0.26.0", "12.0", Answer.WORKS),
        ("deepseek_v4", "0.33.0+cu130", "8.9", Answer.FAILS),
        ("glm_moe_dsa", "0.28.0", "12.1", Answer.FAILS),
        ("glm_moe_dsa", "0.32.0", "cpu", Answer.FAILS),
        ("glm4_moe", "0.32.0", "cpu", Answer.WORKS),
        ("glm4_moe", "0.33.0", "12.0", Answer.WORKS),
        ("glm4_moe", "0.33.0", "7.5", Answer.FAILS),
        ("glm4_moe", "0.34.0", "12.0", Answer.UNKNOWN),
        ("glm4_moe", "0.25.9", "12.0", Answer.UNKNOWN),
        ("glm4_moe", "dev", "12.0", Answer.UNKNOWN),
        ("gpt_oss", "0.33.0", "9.0", Answer.FAILS),
        ("never_heard_of", "0.33.0", "9.0", Answer.UNKNOWN),
        ("", "0.33.0", "9.0", Answer.UNKNOWN),
        ("glm4_moe", None, "9.0", Answer.UNKNOWN),
        ("glm4_moe", "0.33.0", None, Answer.UNKNOWN),
    ],
)
def test_answers(model: str, vllm: str | None, device: str | None, answer: Answer) -> None:
    found = check(model, vllm, device)
    assert found.answer is answer
    assert bool(found.sources) == (found.because not in ("nothing is known to us",) and None not in (vllm, device))
    assert "\n" not in str(found)


def test_a_known_failure_has_its_issue() -> None:
    assert "issues/56837" in str(check("deepseek_v41", "0.29.0", "12.0"))


def test_without_gpus_the_device_is_the_cpu() -> None:
    assert devices_of(()) == ("cpu",)
    assert devices_of((gpu(), gpu(index=1, compute_capability="9.0"))) == ("12.0", "9.0")


# -- through the command --------------------------------------------------------------------------------------------


@pytest.fixture
def known_to_fail(nano: Path, tmp_path: Path) -> Path:
    """Nano under the name of an architecture that vLLM does not run on the CPU."""
    pytest.importorskip("vllm", reason="wants vLLM")
    path = Path(shutil.copytree(nano, tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "glm_moe_dsa"}))
    return path


def serve(model: Path, *options: str) -> str:
    done = subprocess.run(
        [COMMAND, "serve", model, "--store", model / "none", *options],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    return done.stderr


def test_serve_refuses_a_known_failure(known_to_fail: Path) -> None:
    said = serve(known_to_fail)
    assert re.search(r"moetier: error: .* is known to fail here: glm_moe_dsa under vLLM", said)
    assert "issues/54018" in said


def test_serve_can_be_told_to_try(known_to_fail: Path) -> None:
    assert "there is no store" in serve(known_to_fail, "--skip-support-check")


def test_serve_says_what_is_unknown(known_to_fail: Path) -> None:
    config = json.loads((known_to_fail / "config.json").read_text())
    (known_to_fail / "config.json").write_text(json.dumps(config | {"model_type": "never_heard_of"}))
    said = serve(known_to_fail)
    assert said.count("support: never_heard_of under vLLM") == 1
    assert "unknown" in said
    assert "there is no store" in said
