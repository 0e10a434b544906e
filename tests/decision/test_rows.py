"""Each row of the table has a checkpoint that provokes it, and the four verbs say the same of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moetier.cli import app
from moetier.decision.decide import Answer, Drafter, decide
from moetier.decision.installed import installed
from moetier.decision.kinds import KINDS
from moetier.decision.row import Here, Level
from moetier.decision.rows import ROWS
from moetier.errors import MoetierError, RefusedError
from moetier.plan.headers import folder_headers
from moetier.store.build import build_store
from tests.decision import made

MACHINE = ("--gpus", "none", "--ram", "64GB")
BY_ID = {row.id: row for row in ROWS}
ON_THE_CPU = Here(installed(), ("cpu",))


def run(*arguments: object) -> tuple[int, str]:
    """Exit code and all that a verb says, in one line."""
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    said, code = done.output, done.exit_code
    if isinstance(done.exception, MoetierError):
        said, code = f"{said}{done.exception}", done.exception.exit_code
    elif done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return code, " ".join(said.split())


def verbs(model: Path, store: Path) -> dict[str, tuple[int, str]]:
    """What each verb that begins with a checkpoint says of it. Nothing is started: the port cannot be listened on."""
    return {
        "plan": run("plan", model, *MACHINE),
        "store build": run("store", "build", model, store),
        "doctor": run("doctor", model),
        "serve": run("serve", model, "--store", store, "--host", "192.0.2.1", "--api-key", "x"),
    }


def decided(model: Path, here: Here = ON_THE_CPU):
    return decide(folder_headers(model).facts, here)


def test_every_row_has_a_checkpoint():
    assert set(made.ROWS) | {"speculation"} == set(BY_ID), "speculation: below, as it wants an argument"
    assert {*made.UNREAD, *made.FUSED_UNREAD} == {kind.id for kind in KINDS if not kind.read}
    assert {*made.READ, "gpt-oss", "float-fused"} == {kind.id for kind in KINDS if kind.read}


REFUSING = [name for name in made.ROWS if BY_ID[name].level is Level.REFUSES]


@pytest.mark.parametrize("row", REFUSING)
def test_the_four_verbs_refuse_alike(row, tmp_path):
    pytest.importorskip("vllm", reason="the table asks the installed vLLM")
    make, text = made.ROWS[row]
    model = make(tmp_path / "model")
    found = decided(model)
    assert found.answer is Answer.REFUSED
    assert found.refusals()[0].row == row
    first = " ".join(f"{model} {found.refusals()[0]}".split())
    assert re.search(text, first)
    for verb, (code, said) in verbs(model, tmp_path / "store").items():
        assert code == 2, (verb, said)
        assert first in said, verb
        assert "tokens/s" not in said, verb
        assert "download" not in said, verb
    assert not (tmp_path / "store").exists()
    assert run("plan", model, *MACHINE)[1].startswith(f"cannot be served: {model} ")
    code, said = run("plan", model, *MACHINE, "--json")
    assert code == 2
    assert json.loads(said)["decision"]["answer"] == "refused"
    assert list(tmp_path.iterdir()) == [model], "nothing was written"


@pytest.mark.parametrize("row", [name for name in REFUSING if BY_ID[name].overridable])
def test_what_can_be_overridden_is(row, tmp_path):
    pytest.importorskip("vllm", reason="the table asks the installed vLLM")
    model = made.ROWS[row][0](tmp_path / "model")
    assert "--skip-support-check" in str(decided(model).refusals()[0])
    code, said = run("plan", model, *MACHINE, "--skip-support-check")
    assert code == 0, said
    assert "tokens/s" in said
    code, said = run("store", "build", model, tmp_path / "store", "--skip-support-check")
    assert code == 0, said
    code, said = run("serve", model, "--store", tmp_path / "none", "--skip-support-check")
    assert "there is no store" in said


@pytest.mark.parametrize("row", [name for name in REFUSING if not BY_ID[name].overridable])
def test_the_rest_cannot(row, tmp_path):
    model = made.ROWS[row][0](tmp_path / "model")
    code, _ = run("store", "build", model, tmp_path / "store", "--skip-support-check")
    assert code == 2
    with pytest.raises(RefusedError):
        build_store(model, tmp_path / "store")


@pytest.mark.parametrize("row", [name for name in made.ROWS if BY_ID[name].level is Level.CONDITION])
def test_code_of_the_checkpoint_is_said_before_the_store_is_built(row, tmp_path):
    pytest.importorskip("vllm", reason="the table asks the installed vLLM")
    make, text = made.ROWS[row]
    model, store = make(tmp_path / "model"), tmp_path / "store"
    for verb, (code, said) in verbs(model, store).items():
        assert re.search(text, said), (verb, said)
        assert "serve with `-- --trust-remote-code`" in said, verb
        assert code == (2 if verb == "serve" else 0) or verb == "doctor", (verb, said)
    code, said = run("serve", model, "--store", tmp_path / "none", "--", "--trust-remote-code")
    assert "there is no store" in said, "what was asked for gets past it"


@pytest.mark.parametrize(
    ("model_type", "files", "needed"),
    [
        ("glm4_moe", ["tokenizer.json"], False),
        ("glm4_moe", ["tiktoken.model"], True),
        ("kimi_k25", ["tiktoken.model"], False),
        ("x_moe", ["tokenizer.json"], True),
    ],
)
def test_code_is_needed_where_transformers_has_no_tokenizer_for_the_files(model_type, files, needed, tmp_path):
    pytest.importorskip("vllm", reason="the table asks the installed vLLM")
    model = made.ROWS["tokenizer-code"][0](tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    for name in files:
        (model / name).touch()
    assert ("tokenizer-code" in [reason.row for reason in decided(model).conditions()]) is needed


def test_a_tokenizer_class_that_transformers_has_needs_no_code(tmp_path):
    pytest.importorskip("vllm", reason="the table asks the installed vLLM")
    model = made.ROWS["tokenizer-code"][0](tmp_path / "model")
    told = json.loads((model / "tokenizer_config.json").read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}
    (model / "tokenizer_config.json").write_text(json.dumps(told))
    assert not decided(model).conditions()


def test_a_drafter_of_another_geometry_is_said_and_never_speculated_with(tmp_path):
    model = made.ROWS["drafter"][0](tmp_path / "model")
    found = decided(model)
    assert (found.answer, found.drafter) == (Answer.REQUANTIZED, Drafter.LEFT_OUT)
    code, said = run("plan", model, *MACHINE)
    assert code == 0
    assert said.startswith("served without its drafter: ")
    asked = Here(installed(), ("cpu",), ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'))
    refused = decided(model, asked).refusals()[0]
    assert refused.row == "speculation"
    assert "leave --speculative-config out" in str(refused)
    by_words = Here(installed(), ("cpu",), ("--speculative-config", '{"method": "ngram"}'))
    assert not decided(model, by_words).refusals()


def test_a_drafter_that_is_announced_and_missing_is_said(tmp_path):
    model = made.write(tmp_path / "missing", made.floats(), num_nextn_predict_layers=1)
    assert decided(model).drafter is Drafter.LEFT_OUT
    assert "1 layers by config.json, and none among the tensors" in decided(model).reasons[0].text
    dense = {f"model.layers.{made.LAYERS}.mlp.gate_proj.weight": made.zeros("BF16", 32, 64)}
    model = made.write(tmp_path / "dense", {**made.floats(), **dense}, num_nextn_predict_layers=1)
    assert decided(model).drafter is Drafter.NONE, "it has no experts of its own, so it is vLLM's alone"
    assert not decided(model).reasons


@pytest.mark.parametrize("kind", made.UNREAD)
def test_a_format_that_is_not_read_is_told_by_name_with_what_to_take(kind, tmp_path):
    parts, quantization = made.UNREAD[kind]
    model = made.write(tmp_path / "model", made.of_parts(parts), quantization_config=quantization or None)
    _refused_as(kind, model)


@pytest.mark.parametrize("kind", made.FUSED_UNREAD)
def test_a_fused_format_that_is_not_read_is_told_by_name(kind, tmp_path):
    _refused_as(kind, made.write(tmp_path / "model", made.FUSED_UNREAD[kind]))


def _refused_as(kind: str, model: Path) -> None:
    reason = decided(model).refusals()[0]
    name = next(one.name for one in KINDS if one.id == kind)
    assert (reason.row, name in reason.text) == ("kind", True), reason
    assert "BF16, FP8 (E4M3), NVFP4 (modelopt), INT4" in reason.remedy
    assert "download" not in str(reason)
    with pytest.raises(RefusedError, match=re.escape(str(reason))):
        build_store(model, model.with_name("store"))


def test_an_expert_in_another_format_than_the_first_is_not_told_to_be_missing(tmp_path):
    odd = {n: t for n, t in made.of_parts(made.UNREAD["awq"][0]).items() if ".layers.1." in n and ".experts.3." in n}
    rest = {n: t for n, t in made.floats().items() if not (".layers.1." in n and ".experts.3." in n)}
    reason = decided(made.write(tmp_path / "model", {**rest, **odd})).refusals()[0]
    assert reason.row == "kind"
    assert (
        "BF16, FP16 or FP32 and others in another format (model.layers.1.mlp.experts.3.gate_proj.qweight I32)"
        in str(reason)
    )


def test_int4_of_a_model_twice_as_wide_inside_is_not_taken_for_int8(tmp_path):
    """Its down projection has as many words a row as a gate of 8 bits would have."""
    parts, inner = made.READ["int4"][1], 2 * made.HIDDEN
    tensors = {}
    for name in made.of_parts(parts):
        rows, columns = (made.HIDDEN, inner) if "down" in name else (inner, made.HIDDEN)
        dtype, shape = parts[name.rpartition(".")[2]](rows, columns)
        tensors[name] = made.zeros(dtype, *shape)
    model = made.write(tmp_path / "model", tensors, moe_intermediate_size=inner)
    assert dict(decided(model).formats) == {"model": "int4"}
    assert not decided(model).refusals()


@pytest.mark.parametrize("kind", made.READ)
def test_a_format_that_is_read_is_named_as_the_store_names_it(kind, tmp_path):
    name, parts, quantization = made.READ[kind]
    model = made.write(tmp_path / "model", made.of_parts(parts), quantization_config=quantization or None)
    found = decided(model)
    assert not found.refusals()
    assert dict(found.formats) == {"model": name}
    assert found.answer is (Answer.EXACTLY if name == "mxfp4" else Answer.REQUANTIZED)
    assert build_store(model, tmp_path / "store").source_format == name
    code, said = run("doctor", model)
    assert f"can be {found.answer}: experts model {name}" in said, code
