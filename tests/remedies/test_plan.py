"""What `moetier plan` and `moetier calibrate` say of their arguments; put right as they say, and the plan is made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.machine.facts import Machine
from moetier.machine.probe.gpu import visible_devices
from moetier.plan.describe import describe
from moetier.tiers.step import Step
from moetier.trace.record import TracedCall, TraceHeader, write_trace
from tests.decision import made
from tests.doctor.machines import GIB, gpu, machine
from tests.plan.hub import serving
from tests.remedies.commands import moetier
from tests.remedies.trouble import Trouble

remedy = pytest.mark.remedy
RAM = ("--ram", "64GB")
FOUR = ("--gpus", "4x32GB", *RAM)
NONE = ("--gpus", "none", *RAM)
DRAFTING = ("deepseek-v4-flash", "--gpus", "4x32GB", "--ram", "256GB")

Words = tuple[str, ...]
ROWS: dict[str, tuple[str, str, Words, Words]] = {
    "disk-size": (
        *("plan/describe.py", "free space is --disk-size"),
        *((*FOUR, "--disk", "2TB"), (*FOUR, "--disk-size", "2TB")),
    ),
    "kinds": (
        *("plan/describe.py", "plan for the equal ones alone"),
        *((*RAM, "--gpus", "2x32GB,1x24GB"), (*RAM, "--gpus", "2x32GB")),
    ),
    "gpus": ("plan/describe.py", "expected such as 4x32GB", (*RAM, "--gpus", "four"), (*RAM, "--gpus", "1xRTX5090")),
    "card": (
        *("plan/describe.py", "nor a card that we know", (*RAM, "--gpus", "1xRTX7777")),
        (*RAM, "--gpus", "1x32GB", "--gpu-rate", "1792GB/s"),
    ),
    "card-size": ("plan/describe.py", "expected cards of", (*RAM, "--gpus", "1x1GB"), (*RAM, "--gpus", "1x24GB")),
    "pcie": ("plan/describe.py", "expected generation and width", (*FOUR, "--pcie", "16"), (*FOUR, "--pcie", "5x16")),
    "engine": ("plan/costs.py", "leave --engine out", (*FOUR, "--engine", "vllm-cpu"), FOUR),
    "slots-out": ("plan/placement.py", "leave --slots out", (*NONE, "--slots", "2"), NONE),
    "slots-gpus": ("plan/placement.py", "leave --slots out", (*NONE, "--slots", "2"), (*FOUR, "--slots", "2")),
    "residents": (
        *("plan/placement.py", "lower --residents", (*FOUR, "--slots", "2", "--residents", "3")),
        (*FOUR, "--slots", "2", "--residents", "2"),
    ),
    "drafter": ("plan/placement.py", "brings no drafter", (*FOUR, "--draft-tokens", "3"), FOUR),
    "records": (
        *("amounts.py", "give one of those", (*FOUR, "--dram-records", "-1")),
        (*FOUR, "--dram-records", "25%"),
    ),
    "records-auto": (
        *("amounts.py", "give one of those", (*FOUR, "--dram-records", "all")),
        (*FOUR, "--dram-records", "auto"),
    ),
    "workload": ("plan/workload.py", "is not known", (*FOUR, "--workload", "heavy"), (*FOUR, "--workload", "short")),
    "twice": ("cli/asked.py", "not both; leave one out", (*FOUR, "--machine", "x.json"), FOUR),
    "half": ("cli/asked.py", "needs at least --gpus", RAM, NONE),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint that is planned for in no time."""
    return made.write(tmp_path / "model", made.floats())


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        pytest.param(wrong, right, id=name, marks=remedy(path, part))
        for name, (path, part, wrong, right) in ROWS.items()
    ],
)
def test_the_words_are_put_right(trouble: Trouble, model: Path, wrong: Words, right: Words) -> None:
    with trouble:
        moetier("plan", model, *wrong)
    assert "tokens/s" in moetier("plan", model, *right)
    trouble.gone()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        pytest.param(
            ("--accepted", "2"),
            ("--accepted", "2", "--draft-tokens", "3"),
            marks=remedy("cli/asked.py", "say --draft-tokens too"),
            id="alone",
        ),
        pytest.param(
            ("--draft-tokens", "3", "--accepted", "9"),
            ("--draft-tokens", "3", "--accepted", "4"),
            marks=remedy("cli/asked.py", "drafted tokens brings at most"),
            id="most",
        ),
    ],
)
def test_speculation_is_put_right(trouble: Trouble, wrong: Words, right: Words) -> None:
    with trouble:
        moetier("plan", *DRAFTING, *wrong)
    assert "tokens/s" in moetier("plan", *DRAFTING, *right)
    trouble.gone()


def _machine(path: Path, found: Machine) -> Path:
    path.write_text(found.to_json())
    return path


@remedy("cli/plan.py", "leave --draft-tokens out")
def test_a_drafter_that_is_left_out_is_not_planned_with(trouble: Trouble, tmp_path: Path) -> None:
    """Its experts are of another geometry, so a server would refuse to speculate with it."""
    model = made.ROWS["drafter"][0](tmp_path / "model")
    with trouble:
        moetier("plan", model, *NONE, "--draft-tokens", "2")
    assert "tokens/s" in moetier("plan", model, *NONE)
    trouble.gone()


@pytest.mark.parametrize("way", ["hidden", "in-words"])
@remedy("plan/hardware.py", "expected GPUs of one size")
def test_cards_of_two_sizes(trouble: Trouble, model: Path, way: str) -> None:
    cards = gpu(), gpu(index=1, memory_bytes=24 * GIB)
    with trouble:
        moetier("plan", model, "--machine", _machine(model / "m.json", machine(gpus=cards)))
    seen = visible_devices(["GPU-0", "GPU-1"], {"CUDA_VISIBLE_DEVICES": "0"})
    file = _machine(model / "m.json", machine(gpus=tuple(cards[at] for at in seen)))
    assert "tokens/s" in moetier("plan", model, *(("--machine", file) if way == "hidden" else FOUR))
    trouble.gone()


@remedy("plan/kv.py", "the KV cache has no known size")
def test_a_kv_cache_of_unknown_size(trouble: Trouble, tmp_path: Path) -> None:
    model = made.write(tmp_path / "model", made.floats(), num_attention_heads=None)
    with trouble:
        moetier("plan", model, *FOUR)
    assert "tokens/s" in moetier("plan", model, *FOUR, "--kv-bytes-per-token", "4096")
    trouble.gone()


@remedy("plan/placement.py", "what fits is --dram-records")
def test_the_nearest_settings_that_fit(trouble: Trouble) -> None:
    words = ("glm-4.5-air", "--gpus", "1x32GB", "--ram", "32GB", "--skip-support-check")
    with pytest.raises(SystemExit, match="exit code 1") as error:
        moetier("plan", *words, "--dram-records", "128")
    trouble.said(str(error.value))
    nearest = trouble.text.partition("the nearest settings that fit: ")[2].partition("\n")[0]
    fits = trouble.text.partition("what fits is ")[2].partition("\n")[0]
    for options in (nearest, fits):
        assert "does not fit" not in moetier("plan", *words, *options.split())
    trouble.gone()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a repository on a hub of our own."""
    pytest.importorskip("huggingface_hub", reason="a repository is read with it")
    (tmp_path / "repository").mkdir()
    with serving(tmp_path / "repository") as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        yield hub.folder


@remedy("plan/headers.py", "give a repository of whole safetensors weights")
def test_a_repository_of_weights(trouble: Trouble, hub: Path) -> None:
    made.write(hub, made.floats())
    (hub / "model.safetensors").rename(hub / "pytorch_model.bin")
    with trouble:
        moetier("plan", "hf://org/model", *NONE)
    (hub / "pytorch_model.bin").rename(hub / "model.safetensors")
    assert "tokens/s" in moetier("plan", "hf://org/model", *NONE)
    trouble.gone()


def _trace(path: Path, top_k: int = made.TOP_K, prompts: bool = False) -> Path:
    """Write a trace as a server of the model that records does."""
    path.unlink(missing_ok=True)
    ids = np.arange(top_k, dtype=np.int32)[None]
    calls = [TracedCall(layer, Step(1, prompts), ids) for _ in range(20) for layer in range(made.LAYERS)]
    write_trace(path, TraceHeader(made.LAYERS, made.EXPERTS, top_k, "c3" * 32), calls)
    return path


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"top_k": 1}, marks=remedy("plan/workload.py", "record one of this model"), id="another-model"),
        pytest.param({"prompts": True}, marks=remedy("plan/workload.py", "record a trace while"), id="only-prompts"),
    ],
)
def test_a_trace_is_recorded_again(trouble: Trouble, model: Path, wrong: dict[str, Any]) -> None:
    path = model / "trace"
    with trouble:
        moetier("plan", model, *FOUR, "--workload", _trace(path, **wrong))
    assert "tokens/s" in moetier("plan", model, *FOUR, "--workload", _trace(path))
    trouble.gone()


@remedy("plan/workload.py", "or a trace file of")
def test_a_workload_of_a_trace(trouble: Trouble, model: Path) -> None:
    with trouble:
        moetier("plan", model, *FOUR, "--workload", model / "trace")
    assert "tokens/s" in moetier("plan", model, *FOUR, "--workload", _trace(model / "trace"))
    trouble.gone()


@remedy("cli/plan.py", "leave --machine and its words out")
def test_two_machines_to_compare(trouble: Trouble, model: Path) -> None:
    files = [_machine(model / f"{name}.json", describe("1x32GB", "64GB")) for name in "ab"]
    with trouble:
        moetier("plan", model, *FOUR, "--compare", *files)
    moetier("plan", model, "--compare", *files)
    trouble.gone()


@remedy("cli/plan.py", "name another file")
def test_a_picture_elsewhere(trouble: Trouble, model: Path) -> None:
    with trouble:
        moetier("plan", model, *FOUR, "--plot", "/dev/null/x.svg")
    moetier("plan", model, *FOUR, "--plot", model / "x.svg")
    assert (model / "x.svg").read_text()
    trouble.gone()
