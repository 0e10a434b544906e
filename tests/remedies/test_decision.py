"""What is said of checkpoints that are not served as they are; done as it says, and they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetier.decision.decide import Decision, decide
from moetier.decision.installed import Installed, installed
from moetier.decision.kinds import KINDS
from moetier.decision.row import AS_IT_IS, Here
from moetier.errors import StoreError
from moetier.plan.headers import folder_headers
from tests.decision import made
from tests.remedies.commands import moetier
from tests.remedies.trouble import Trouble

remedy = pytest.mark.remedy
MACHINE = ("--gpus", "none", "--ram", "64GB")
SPECULATION = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')


@pytest.fixture
def vllm() -> Installed:
    """The installed vLLM."""
    found = installed()
    if found is None:
        pytest.skip("the table asks the installed vLLM")
    return found


def decided(model: Path, here: Here | None = None) -> Decision:
    return decide(folder_headers(model).facts, here or Here(installed(), ("cpu",)))


def write(folder: Path, **config: Any) -> Path:
    return made.write(folder, made.floats(), **config)


def build(model: Path, *options: str) -> str:
    return moetier("store", "build", model, model.with_name("store"), *options)


def serve(model: Path, *options: str) -> None:
    """Serve a model that has no store: what is said of the model itself comes before that."""
    moetier("serve", model, "--store", model.with_name("none"), *options)


def serves(model: Path, *options: str) -> None:
    """Nothing is said of the model."""
    with pytest.raises(StoreError, match="there is no store"):
        serve(model, *options)


CONTRACT = ("dense", "names", "more-names", "keys", "sizes", "biases", "activation", "alpha", "unknown-keys", "clamp",
            "on-input", "zero", "latent", "router-scale")  # fmt: skip


@pytest.mark.parametrize("row", CONTRACT)
@remedy("decision/row.py", "serve it with vLLM as it is")
def test_vllm_has_what_moetier_does_not_serve(trouble: Trouble, row: str, vllm: Installed, tmp_path: Path) -> None:
    """The table of vLLM has the architecture, and nothing of moetier's is left in the checkpoint."""
    model = made.ROWS[row][0](tmp_path / "model")
    before = {path: path.read_bytes() for path in model.iterdir()}
    with trouble:
        build(model)
    assert AS_IT_IS in " ".join(trouble.text.split())
    assert vllm.knows(folder_headers(model).facts.architectures)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    trouble.gone()


def test_other_rows_have_advice_of_their_own() -> None:
    assert {*CONTRACT, "kind", "architecture", "support", "config-code", "tokenizer-code", "drafter"} == {*made.ROWS}


@pytest.mark.parametrize("kind", ["awq", "gptq", "fp8-other", "mxfp4-compressed-tensors"])
@pytest.mark.parametrize("release", made.READ)
@remedy("decision/kinds.py", "take this model's BF16")
def test_another_release_is_taken(trouble: Trouble, kind: str, release: str, tmp_path: Path) -> None:
    """Each that is named is read."""
    parts, quantization = made.UNREAD[kind]
    with trouble:
        decided(made.write(tmp_path / "a", made.of_parts(parts), quantization_config=quantization)).require()
    _, parts, quantization = made.READ[release]
    model = made.write(tmp_path / "b", made.of_parts(parts), quantization_config=quantization or None)
    decided(model).require()
    name = next(kind.name for kind in KINDS if kind.id == release)
    assert name.partition(",")[0].partition(" (")[0] in trouble.text
    trouble.gone()


CORRECTED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "two-clamps": (
        *("decision/activation.py", "which is what vLLM reads"),
        {"swiglu_limit": 7.0, "text_config": made.config()},
        {"text_config": made.config()},
    ),
    "to-nothing": (
        *("decision/activation.py", "would clamp all to nothing"),
        {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "swiglu_limit": 0},
        {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "swiglu_limit": 10.0},
    ),
    "not-clamped": ("decision/experts.py", "correct config.json by the model's card", {"swiglu_limit": 7.0}, {}),
}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        pytest.param(wrong, right, id=name, marks=remedy(path, part))
        for name, (path, part, wrong, right) in CORRECTED.items()
    ],
)
def test_a_configuration_is_corrected(
    trouble: Trouble, wrong: dict[str, Any], right: dict[str, Any], vllm: Installed, tmp_path: Path
) -> None:
    model = write(tmp_path / "model", **wrong)
    with trouble:
        build(model, "--skip-support-check")
    write(model, **right)
    build(model, "--skip-support-check")
    trouble.gone()


@remedy("decision/experts.py", "take a vLLM that clamps it")
def test_a_vllm_that_clamps(trouble: Trouble, vllm: Installed, tmp_path: Path) -> None:
    model = write(tmp_path / "model", swiglu_limit=7.0)
    with trouble:
        build(model)
    another = replace(vllm, clamping=frozenset({"Qwen3MoeForCausalLM"}))
    decided(model, Here(another, ("cpu",))).require()
    trouble.gone()


def _with_a_plugin(vllm: Installed) -> Here:
    return Here(replace(vllm, architectures=frozenset({"XForCausalLM"})), ("cpu",))


ELSEWHERE: dict[str, tuple[str, str, str, Callable[[Installed], Here]]] = {
    "architecture": ("architecture", "decision/serving.py", "take a vLLM that has it", _with_a_plugin),
    "support-vllm": (
        *("support", "decision/serving.py", "take another vLLM or device"),
        lambda vllm: Here(replace(vllm, version="99.0"), ("cpu",)),
    ),
    "support-device": (
        *("support", "decision/serving.py", "take another vLLM or device"),
        lambda vllm: Here(vllm, ("9.0",)),
    ),
}


@pytest.mark.parametrize(
    ("row", "there"),
    [
        pytest.param(row, there, id=name, marks=remedy(path, part))
        for name, (row, path, part, there) in ELSEWHERE.items()
    ],
)
def test_another_vllm_or_device(
    trouble: Trouble, row: str, there: Callable[[Installed], Here], vllm: Installed, tmp_path: Path
) -> None:
    model = made.ROWS[row][0](tmp_path / "model")
    with trouble:
        build(model)
    decided(model, there(vllm)).require()
    trouble.gone()


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("architecture", marks=remedy("decision/serving.py", "where a plugin of yours brings it")),
        pytest.param("support", marks=remedy("decision/serving.py", "if this one is mended")),
        pytest.param("unknown-keys", marks=remedy("decision/experts.py", "does not concern the routed experts, go on")),
    ],
)
def test_the_check_is_skipped(trouble: Trouble, row: str, vllm: Installed, tmp_path: Path) -> None:
    model = made.ROWS[row][0](tmp_path / "model")
    with trouble:
        build(model)
    build(model, "--skip-support-check")
    serves(model, "--skip-support-check")
    assert "tokens/s" in moetier("plan", model, *MACHINE, "--skip-support-check")
    trouble.gone()


@pytest.mark.parametrize("row", ["config-code", "tokenizer-code"])
@remedy("decision/serving.py", "if you trust it, serve with")
def test_code_of_the_checkpoint_is_trusted(trouble: Trouble, row: str, vllm: Installed, tmp_path: Path) -> None:
    model = made.ROWS[row][0](tmp_path / "model")
    with trouble:
        serve(model)
    serves(model, *trouble.text.rpartition("serve with `")[2].partition("`")[0].split())
    trouble.gone()


@remedy("decision/serving.py", "serve without --speculative-config")
@remedy("decision/serving.py", "leave {} out")
def test_a_drafter_is_not_asked(trouble: Trouble, vllm: Installed, tmp_path: Path) -> None:
    model = made.ROWS["drafter"][0](tmp_path / "model")
    trouble.said(moetier("plan", model, *MACHINE))
    with trouble:
        serve(model, "--", *SPECULATION)
    serves(model)
    trouble.gone()
