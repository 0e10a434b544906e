"""Models that people run at home, late 2026: names, config keys and formats as released, and the answer for each."""

from __future__ import annotations

import pytest

from moetier.decision.decide import Answer, Drafter, decide
from moetier.decision.installed import installed
from moetier.decision.row import Here
from moetier.plan.headers import folder_headers
from tests.decision import made

MULTIMODAL = "model.language_model.layers.{layer}.mlp.experts"
KIMI = "language_model.model.layers.{layer}.mlp.experts"
V4 = "layers.{layer}.ffn.experts"
W123 = ("w1", "w3", "w2")
H200 = Here(installed(), ("9.0",))


def parts(kind, template=made.KNOWN, names=made.PROJECTIONS):
    return made.of_parts((made.READ[kind][1] if kind in made.READ else made.UNREAD[kind][0]), template, names)


def nested(whole, architecture, **text):
    """A config of a multimodal model, whose language model's part stands inside."""
    return {
        "model_type": whole, "architectures": [architecture],
        "text_config": made.config(architectures=None, **text), "num_experts": None, "num_experts_per_tok": None,
        "num_hidden_layers": None, "hidden_size": None, "moe_intermediate_size": None, "hidden_act": None,
    }  # fmt: skip


def fused_bf16(template):
    shape = {"gate_up_proj": (2 * made.INNER, made.HIDDEN), "down_proj": (made.HIDDEN, made.INNER)}
    found = {}
    for name, size in shape.items():
        found |= made.fused(template, name, "BF16", made.EXPERTS, *size)
    return found


QWEN35 = nested("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe_text")
KIMI25 = nested(
    "kimi_k25", "KimiK25ForConditionalGeneration", model_type="kimi_k2", num_experts=None, n_routed_experts=made.EXPERTS
)
V4_FLASH = {
    "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "swiglu_limit": 10.0,
    "num_experts": None, "n_routed_experts": made.EXPERTS,
}  # fmt: skip
DSPARK = {"dspark_n_routed_experts": 2, "dspark_num_experts_per_tok": 1, "num_nextn_predict_layers": 3}
GLM5_NEXT = nested(
    "glm5_next", "Glm5NextForConditionalGeneration", model_type="glm5_next_text", num_experts=None,
    n_routed_experts=made.EXPERTS, swiglu_limit=10.0,
)  # fmt: skip
GEMMA4 = nested(
    "gemma4", "Gemma4ForConditionalGeneration", model_type="gemma4_text", hidden_activation="gelu_pytorch_tanh",
    hidden_act=None,
)  # fmt: skip
AWQ = {"quantization_config": {"quant_method": "awq"}}
GLM_DSA = {"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"]}
GLM_AIR = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}
MINIMAX_M2 = {
    "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "num_experts": None,
    "num_local_experts": made.EXPERTS, "moe_intermediate_size": None, "intermediate_size": made.INNER,
}  # fmt: skip
MINIMAX = "model.layers.{layer}.block_sparse_moe.experts"

SERVED = {
    "Qwen3.6-35B-A3B BF16, fused": (fused_bf16(MULTIMODAL), QWEN35, Answer.REQUANTIZED),
    "Qwen3.6-35B-A3B FP8": (parts("fp8", MULTIMODAL), QWEN35, Answer.REQUANTIZED),
    "Qwen3.6-35B-A3B NVFP4 (modelopt)": (parts("nvfp4", MULTIMODAL), QWEN35, Answer.REQUANTIZED),
    "DeepSeek-V4-Flash": (parts("mxfp4", V4, W123), V4_FLASH, Answer.EXACTLY),
    "GLM-5.3-Flash FP8": (parts("fp8", MULTIMODAL), GLM5_NEXT, Answer.REQUANTIZED),
    "GLM-5.2 MXFP4": (parts("mxfp4"), GLM_DSA, Answer.EXACTLY),
    "GLM-4.5-Air BF16": (parts("float"), GLM_AIR, Answer.REQUANTIZED),
    "Kimi-K2.6 INT4": (parts("int4", KIMI), KIMI25, Answer.REQUANTIZED),
    "MiniMax-M2.7 FP8": (parts("fp8", MINIMAX, W123), MINIMAX_M2, Answer.REQUANTIZED),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served(name, tmp_path):
    pytest.importorskip("vllm", reason="the table asks the installed vLLM")
    tensors, config, answer = SERVED[name]
    model = made.write(tmp_path / "model", tensors, **config)
    found = decide(folder_headers(model).facts, H200)
    assert [str(reason) for reason in found.reasons] == []
    assert found.answer is answer


REFUSED = {
    "Qwen3.6-35B-A3B AWQ": (parts("awq", MULTIMODAL), {**QWEN35, **AWQ}, "kind"),
    "Qwen3.6-35B-A3B NVFP4 (compressed-tensors)": (
        parts("nvfp4-compressed-tensors", MULTIMODAL), QWEN35, "kind",
    ),
    "GLM-4.5-Air AWQ": (parts("awq"), {**GLM_AIR, **AWQ}, "kind"),
    "Kimi-K3": (
        parts("mxfp4-compressed-tensors", "model.layers.{layer}.block_sparse_moe.experts", W123),
        {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "hidden_act": "situ",
         "routed_expert_hidden_size": 32},
        "kind activation latent",
    ),
    "MiniMax-M3": (
        parts("fp8", "language_model.model.layers.{layer}.block_sparse_moe.experts", W123),
        nested("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", model_type="minimax_m3",
               hidden_act="swigluoai", swiglu_alpha=1.702, swiglu_limit=7.0),
        "activation alpha",
    ),
    "Gemma-4-26B-A4B": (fused_bf16("model.language_model.layers.{layer}.experts"), GEMMA4, "names activation"),
    "Nemotron-3-Nano": (
        made.floats("backbone.layers.{layer}.mixer.experts", names=("up_proj", "down_proj")),
        {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hidden_act": None,
         "mlp_hidden_act": "relu2"},
        "names activation",
    ),
    "Nemotron-3-Super": (
        made.floats("backbone.layers.{layer}.mixer.experts", names=("up_proj", "down_proj")),
        {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hidden_act": None,
         "mlp_hidden_act": "relu2", "moe_latent_size": 32},
        "names activation latent",
    ),
    "Step-3.5-Flash": (
        made.fused("model.layers.{layer}.moe", "gate_proj.weight", "BF16", made.EXPERTS, made.INNER, made.HIDDEN),
        {"model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"], "num_experts": None,
         "moe_num_experts": made.EXPERTS, "swiglu_limits": [None, 7.0]},
        "names clamp",
    ),
    "LongCat-Flash": (
        made.floats(),
        {"model_type": "longcat_flash", "architectures": ["LongcatFlashForCausalLM"], "num_hidden_layers": None,
         "num_layers": made.LAYERS, "num_experts": None, "n_routed_experts": made.EXPERTS, "zero_expert_num": 4,
         "zero_expert_type": "identity", "num_experts_per_tok": None, "moe_topk": 2, "moe_intermediate_size": None,
         "expert_ffn_hidden_size": made.INNER},
        "zero",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_told_why(name, tmp_path):
    pytest.importorskip("vllm", reason="the table asks the installed vLLM")
    tensors, config, rows = REFUSED[name]
    model = made.write(tmp_path / "model", tensors, **config)
    found = decide(folder_headers(model).facts, H200)
    assert found.answer is Answer.REFUSED
    assert set(rows.split()) <= {reason.row for reason in found.refusals()}
    assert not {"dense", "keys", "architecture"} & {reason.row for reason in found.reasons}


def test_gpt_oss_is_refused_for_its_biases(tmp_path):
    pytest.importorskip("vllm", reason="the table asks the installed vLLM")
    model = made.ROWS["biases"][0](tmp_path / "model")
    assert {"biases", "support"} <= {reason.row for reason in decide(folder_headers(model).facts, H200).refusals()}


def test_v41_flash_is_served_without_its_drafter(tmp_path):
    pytest.importorskip("vllm", reason="the table asks the installed vLLM")
    more = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"]}
    model = made.write(tmp_path / "model", parts("mxfp4", V4, W123), **{**V4_FLASH, **DSPARK, **more})
    found = decide(folder_headers(model).facts, H200)
    assert (found.answer, found.drafter) == (Answer.EXACTLY, Drafter.LEFT_OUT)
    assert [reason.row for reason in found.reasons] == ["drafter"]
    assert "2 experts, top-1, and the model 4, top-2" in found.reasons[0].text
