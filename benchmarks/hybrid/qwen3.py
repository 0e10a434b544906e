"""A checkpoint of Qwen3-235B's shape with random weights and few layers, its experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, VOCABULARY = 4096, 1536, 128, 8, 8192
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, layers: int, quantization: dict[str, object]) -> None:
    """quantization: the config's `quantization_config`, of a checkpoint whose experts are stored alike."""
    folder.mkdir(parents=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, device=device, generator=generator) * scale).bfloat16().cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    weights, index = {}, {}
    weights["model.embed_tokens.weight"] = normal(VOCABULARY, HIDDEN, scale=1.0)
    weights["lm_head.weight"] = normal(VOCABULARY, HIDDEN, scale=0.02)
    weights["model.norm.weight"] = ones(HIDDEN)
    for layer in range(layers + 1):
        name = f"model-{layer:05}.safetensors"
        save_file(weights, folder / name)
        index |= dict.fromkeys(weights, name)
        if layer == layers:
            break
        at = f"model.layers.{layer}"
        weights = {
            f"{at}.input_layernorm.weight": ones(HIDDEN),
            f"{at}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{at}.self_attn.q_norm.weight": ones(128),
            f"{at}.self_attn.k_norm.weight": ones(128),
            f"{at}.self_attn.q_proj.weight": normal(64 * 128, HIDDEN, scale=0.02),
            f"{at}.self_attn.k_proj.weight": normal(4 * 128, HIDDEN, scale=0.02),
            f"{at}.self_attn.v_proj.weight": normal(4 * 128, HIDDEN, scale=0.02),
            f"{at}.self_attn.o_proj.weight": normal(HIDDEN, 64 * 128, scale=0.02),
            f"{at}.mlp.gate.weight": normal(EXPERTS, HIDDEN, scale=0.05),
        }
        for expert in range(EXPERTS):
            for matrix, (n, k) in {
                "gate_proj": (INTERMEDIATE, HIDDEN),
                "up_proj": (INTERMEDIATE, HIDDEN),
                "down_proj": (HIDDEN, INTERMEDIATE),
            }.items():
                name = f"{at}.mlp.experts.{expert}.{matrix}"
                codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device, generator=generator)
                scales = torch.randint(116, 122, (n, k // 32), dtype=torch.uint8, device=device, generator=generator)
                weights[f"{name}.weight"] = codes.cpu().view(torch.int8)
                weights[f"{name}.scale"] = scales.cpu().view(torch.float8_e8m0fnu)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    state = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(state))
    config = CONFIG | {"num_hidden_layers": layers, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
