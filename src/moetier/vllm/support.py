"""Refuse at load what cannot be served exactly, in one sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moetier.errors import UnsupportedModelError
from moetier.launch.refused import pipeline_refused
from moetier.settings import Settings
from moetier.store.store import Store
from moetier.vllm.plugin import NAME

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def check_supported(layer: RoutedExperts, store: Store, vllm_config: Any, settings: Settings) -> None:
    """UnsupportedModelError if `layer` asks for arithmetic or a placement that moetier does not have."""
    for problem in (*_arithmetic(layer, store), *_parallelism(layer), *_engine(vllm_config, settings)):
        raise UnsupportedModelError(f"{layer.layer_name}: {problem}")


def check_engine(vllm_config: Any) -> None:
    """UnsupportedModelError, before anything is opened, where the engine as a whole is none of ours."""
    stages = getattr(getattr(vllm_config, "parallel_config", None), "pipeline_parallel_size", 1)
    if stages > 1:
        raise UnsupportedModelError(pipeline_refused(stages))
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise UnsupportedModelError(
            "weight transfer is not served: the experts are those of the store; start without --weight-transfer-config"
        )


def _arithmetic(layer: RoutedExperts, store: Store) -> list[str]:
    moe, geometry, problems = layer.moe_config, store.manifest.layer_geometry, []
    if moe.has_bias:
        problems.append("its experts have biases, which the contract does not define")
    if moe.activation.value not in ("silu", "swiglu"):
        problems.append(f"its experts' activation is {moe.activation.value!r}; only SwiGLU (silu) is served")
    if layer.swiglu_alpha not in (None, 1.0) or layer.swiglu_beta not in (None, 0.0):
        problems.append("its SwiGLU has an alpha or beta of its own, which the contract does not define")
    if layer.apply_router_weight_on_input:
        problems.append("the router's weight multiplies the experts' input, which the contract does not define")
    if moe.is_lora_enabled:
        problems.append("LoRA on routed experts is not served; start without --enable-lora")
    if moe.in_dtype not in (torch.bfloat16, torch.float32):
        problems.append(f"the model runs in {moe.in_dtype}; the contract takes bf16: start with --dtype bfloat16")
    if layer.swiglu_limit != store.manifest.layer_family.swiglu_limit:
        problems.append(
            f"vLLM clamps SwiGLU at {layer.swiglu_limit}, the store at {store.manifest.layer_family.swiglu_limit}"
        )
    found = (moe.hidden_dim, moe.intermediate_size, moe.num_experts, moe.experts_per_token)
    expected = (geometry.hidden, geometry.intermediate, geometry.experts, geometry.top_k)
    if found != expected:
        problems.append(
            f"the model has (hidden, intermediate, experts, top-k) = {found}, the store {expected}; "
            "it was built from another checkpoint"
        )
    return problems


def _parallelism(layer: RoutedExperts) -> list[str]:
    parallel, problems = layer.moe_config.moe_parallel_config, []
    if parallel.use_ep:
        problems.append("expert parallelism is not served: moetier places experts itself")
    if getattr(parallel, "enable_eplb", False):
        problems.append("EPLB is not served: moetier places experts itself")
    if parallel.dp_size > 1:
        problems.append("data parallelism is not served: start one server a replica")
    return problems


def _engine(vllm_config: Any, settings: Settings) -> list[str]:
    problems, slots, planned = [], settings.slots, settings.planned_tokens
    if vllm_config.load_config.load_format != NAME:
        problems.append(f"the checkpoint's experts would be read needlessly; start with --load-format {NAME}")
    cuda = vllm_config.device_config.device_type == "cuda"
    if cuda and not slots and not vllm_config.model_config.enforce_eager:
        problems.append(
            "without device slots the CPU computes every expert, which CUDA graphs cannot hold; give --slots"
        )
    if slots and not cuda:
        problems.append(f"slots {slots}: there is no CUDA device; leave --slots out")
    if slots and getattr(vllm_config.model_config, "enable_sleep_mode", False):
        problems.append("sleep mode would discard the device slots; start without --enable-sleep-mode")
    graphs = 0
    if slots and not vllm_config.model_config.enforce_eager:
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    if graphs > planned:
        problems.append(
            f"CUDA graphs are captured up to {graphs} tokens, and the device plans steps of up to {planned}; start "
            f"with --max-cudagraph-capture-size {planned}, or more planned_tokens"
        )
    return problems
