"""Clamps and activations: one number, a list for each layer, and what vLLM's own layer will have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moetier.decision.activation import DEFAULT_LIMIT, activation_of, family, limit_of, under_unknown_keys
from moetier.decision.decide import decide
from moetier.decision.installed import installed, read
from moetier.decision.row import Here
from moetier.errors import CheckpointError, UnsupportedModelError
from moetier.plan.headers import folder_headers
from moetier.store.checkpoint import Checkpoint
from tests.decision import made

CLAMPING = {"model_type": "exaone_moe", "architectures": ["ExaoneMoeForCausalLM"]}
PLAIN = {"model_type": "qwen3_moe"}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (PLAIN, None),
        ({**PLAIN, "swiglu_limit": None}, None),
        ({**PLAIN, "swiglu_limit": 0}, None),
        ({**PLAIN, "swiglu_limit": 7}, 7.0),
        ({**CLAMPING, "swiglu_limits": [7.0, 7.0, 7.0]}, 7.0),
        ({**CLAMPING, "swiglu_limits": [0, 7.0, 7.0]}, 7.0),
        ({**CLAMPING, "swiglu_limits": [None, None, None]}, None),
        ({**CLAMPING, "swiglu_limits": {"1": 7.0, "2": 7.0}}, 7.0),
        ({**CLAMPING, "swiglu_limits": []}, None),
        ({**PLAIN, "moe_router_clip": False, "swiglu_clamp": None, "moe_clamp": {"gate": None}}, None),
        ({**PLAIN, "swiglu_limits_shared": [None, 16.0], "share_expert_swiglu_limit_list": [0, 7]}, None),
        ({"model_type": "step3p5", "swiglu_limits": [None, None, 0]}, None),
        ({"model_type": "deepseek_v4", "swiglu_limit": 7.5}, 7.5),
        ({"model_type": "deepseek_v4"}, 10.0),
        ({"model_type": "deepseek_v41", "text_config": {"model_type": "deepseek_v41_text", "swiglu_limit": 9}}, 9.0),
        ({"model_type": "hy_v4", "swiglu_limit": 0}, None),
        ({"swiglu_limit": 7.0, "text_config": {"model_type": "glm5_next_text", "swiglu_limit": 7.0}}, 7.0),
    ],
    ids=str,
)
def test_one_number_describes_it(config, limit):
    """The MoE layers are 1 and 2: what is listed for the dense layer 0 does not count."""
    assert limit_of(config, (1, 2)) == limit
    assert family(config, (1, 2)).swiglu_limit == limit


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CLAMPING, "swiglu_limits": [7.0, 0, 7.0]}, "differs by layer"),
        ({**CLAMPING, "swiglu_limits": [7.0, 7.0]}, "differs by layer"),
        ({**CLAMPING, "swiglu_limit": [7.0, 7.0, 8.0]}, "differs by layer"),
        ({**CLAMPING, "swiglu_limits": {"2": 7.0}}, "differs by layer"),
        ({**CLAMPING, "swiglu_limit": 7.0, "swiglu_limits": [8, 8, 8]}, "differs by layer"),
        ({"model_type": "step3p5", "swiglu_limits": [7.0, 7.0, 7.0]}, "after SiLU"),
        ({"model_type": "bailing_moe_v3", "expert_swiglu_limit_list": [0, 7.0, 7.0]}, "after SiLU"),
        ({**PLAIN, "moe_clamp": {"gate": 7.0, "up": 7.0}}, "does not know"),
        ({"model_type": "deepseek_v4", "swiglu_limit": 0}, "clamp all to nothing"),
        ({**PLAIN, "swiglu_clamp": True}, "does not know"),
        ({**PLAIN, "expert_clamp": "tanh"}, "does not know"),
        ({"moe_clamp": 3, "text_config": {"model_type": "glm5_next_text"}}, "which is what vLLM reads"),
        ({"swiglu_limit": 7.0, "text_config": {"model_type": "glm5_next_text"}}, "which is what vLLM reads"),
    ],
    ids=str,
)
def test_what_one_number_does_not_describe_is_refused(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        limit_of(config, (1, 2))


@pytest.mark.parametrize("value", ["7", True, -1, 1e40, float("inf"), float("nan"), [7, "x"], [[7]]])
def test_what_is_no_clamp_is_an_error(value):
    with pytest.raises(CheckpointError, match="expected a positive number for swiglu_limit"):
        limit_of({**PLAIN, "swiglu_limit": value})


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, None),
        ({"hidden_act": "silu"}, "silu"),
        ({"hidden_act": "SiLU", "hidden_activation": "gelu"}, "gelu"),
        ({"mlp_hidden_act": "relu2"}, "relu2"),
        ({"ffn_config": {"ffn_act_fn": {"name": "silu"}}}, "silu"),
        ({"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "gelu"),
        ({"mamba_hidden_act": "gelu", "vision_config": {"hidden_act": "gelu"}}, None),
    ],
    ids=str,
)
def test_the_activation_is_that_of_the_experts(config, name):
    assert activation_of(config) == name


def test_a_clamp_that_vllms_layer_lacks_is_said_before_the_store_is_built(tmp_path):
    pytest.importorskip("vllm", reason="the table asks the installed vLLM")
    here = Here(installed(), ("cpu",))
    lacks = made.write(tmp_path / "a", made.floats(), swiglu_limit=7.0)
    reason = decide(folder_headers(lacks).facts, here).refusals()[0]
    assert re.search(r"clamped at 7 by config.json, and vLLM .* computes Qwen3MoeForCausalLM without one", reason.text)
    has = made.write(tmp_path / "b", made.floats(), **CLAMPING, swiglu_limits=[7.0, 7.0])
    found = decide(folder_headers(has).facts, here)
    assert (found.refusals(), found.clamp) == ((), 7.0)
    assert Checkpoint.open(has).family.swiglu_limit == 7.0


def test_the_defaults_are_those_of_the_config_classes():
    """Of the transformers and vLLM that are installed: a number that moves there must move here."""
    folders = [Path(pytest.importorskip(name).__file__).parent for name in ("transformers", "vllm")]
    files = [file for folder in folders for file in folder.rglob("configuration_*.py")]
    files += (folders[1] / "transformers_utils" / "configs").glob("*.py")
    found = {}
    for file in files:
        match = re.search(r"swiglu_limit: float = ([\d.]+)", file.read_text(errors="replace"))
        if match:
            found[file.stem.removeprefix("configuration_")] = float(match[1])
    ours = {name: limit for name, limit in found.items() if name.startswith(tuple(DEFAULT_LIMIT))}
    assert len({name for kind in DEFAULT_LIMIT for name in ours if name.startswith(kind)}) >= len(DEFAULT_LIMIT)
    assert all(limit == next(v for k, v in DEFAULT_LIMIT.items() if name.startswith(k)) for name, limit in ours.items())


def test_nothing_is_known_of_a_vllm_whose_tables_cannot_be_read(tmp_path):
    found = read("9.9", tmp_path, None)
    assert found.knows(("XForCausalLM",)) is None
    assert found.clamps(("XForCausalLM",)) is None
    model = made.write(tmp_path / "m", made.floats(), architectures=["XForCausalLM"], swiglu_limit=7.0)
    assert not decide(folder_headers(model).facts, Here(found, ("cpu",))).refusals()


def test_the_installed_tables_are_those_that_vllm_has():
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    tables = [getattr(registry, name) for name in dir(registry) if re.fullmatch(r"_[A-Z_]+_MODELS", name)]
    theirs = {
        name for table in tables if isinstance(table, dict) for name, at in table.items() if isinstance(at, tuple)
    }
    found = installed()
    assert found is not None
    missing = {name for name in theirs if "MoE" in name or "Moe" in name} - (found.architectures or set())
    assert not missing
    assert found.knows(("Qwen3MoeModel",)), "vLLM takes it for the model with a head"
    assert found.knows(("XForCausalLM",)) is False


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"expert_act_fn": "gelu"}, "expert_act_fn 'gelu'"),
        ({"ffnActivation": "relu2"}, "ffnActivation 'relu2'"),
        ({"routed_activations": ["silu", "gelu"]}, "routed_activations ['silu', 'gelu']"),
        ({"activation": {"type": "gelu"}}, "activation 'gelu'"),
        ({"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_config.ffn_act_fn 'gelu'"),
        ({"moe_gate_limit": 7.0}, "moe_gate_limit 7.0"),
        ({"moe_output_cap": 5}, "moe_output_cap 5"),
        ({"experts": {"limits": [7, 7]}}, "experts.limits [7, 7]"),
        ({"expert_alpha": 1.702}, "expert_alpha 1.702"),
        ({"mlp_beta": 1.0}, "mlp_beta 1.0"),
        ({"glu_clip": 3.0, "text_config": {"model_type": "qwen3_moe"}}, "glu_clip 3.0"),
    ],
    ids=str,
)
def test_a_key_that_nobody_knows_is_judged_by_its_words(config, said):
    assert [*under_unknown_keys({**PLAIN, **config})] == [said]


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_limits_shared": [16.0]},
        {"expert_act_fn": "swiglu", "ffn_activation": {"name": "silu"}, "mlp_activation": None, "moe_clamp": None},
        {"moe_gate_limit": False, "moe_output_cap": None, "glu_alpha": 1, "glu_beta": 0},
        {"vision_config": {"hidden_act": "gelu"}, "projector_hidden_act": "gelu", "audio_activation": "relu"},
        {"attn_logit_softcapping": 50.0, "attention_clip": 5, "clip_qkv": 8.0, "rope_parameters": {"beta_fast": 32}},
        {"quantization_config": {"activation_scheme": "dynamic"}, "activation_checkpointing": True},
        {"lora_alpha": 16, "router_aux_loss_alpha": 0.1, "time_step_limit": [0, 1], "ssm_act": "gelu"},
    ],
    ids=str,
)
def test_keys_about_other_parts_say_nothing_of_the_experts(config):
    assert [*under_unknown_keys({**PLAIN, **config})] == []
