"""DeepSeek V4 under vLLM's CPU build: a small checkpoint, and a program that runs engines on it.

    python -m tests.serve.deepseek_v4 JOB

JOB: a JSON file with "engines" (arguments of vllm.LLM, one engine after the other, each a fork of this process),
"prompts", "max_tokens" and "out", a folder for their results.

vLLM 0.32 has the model for CPUs, but cannot run it as installed here: its metadata is made by Triton kernels, for which
x86 wants the triton-cpu fork (Triton's interpreter stands in for it), and its CPU builder forgets two kinds of layers
that came with V4.1 (KeyError 'c1a'). Dense layers are bf16, since FP8 wants AMX there. Experts, routing by token id,
clamped SwiGLU and the route weight before the down projection are the released model's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from moetier.contract.oracle import to_bf16
from tests.plan import released
from tests.serve.engine import ENVIRONMENT, IMPORTED, _result
from tests.store.checkpoints import write_shards

CONFIG: dict[str, Any] = released.V4_FLASH | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_hash_layers": 2,
    "compress_ratios": [0, 4, 128, 4, 0],
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "expert_dtype": "fp4",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
}
HASHED = range(CONFIG["num_hash_layers"])
"""Layers that route by token id."""


def write(folder: Path) -> Path:
    """A checkpoint of random weights with the released model's names, its dense layers in bf16."""
    rng = np.random.default_rng(0)
    made: dict[str, tuple[str, tuple[int, ...], np.ndarray]] = {}
    for name, dtype, shape in released.tensors(CONFIG):
        expert = ".experts." in name
        if dtype == "F8_E8M0" and not expert:
            continue  # scales of dense FP8
        if dtype == "I8":
            data = rng.integers(-128, 128, shape, np.int8)
        elif dtype == "F8_E8M0":
            data = rng.integers(117, 121, shape, np.uint8)
        elif dtype == "I32":
            data = np.argsort(rng.random((shape[0], CONFIG["n_routed_experts"])), axis=1)[:, : shape[1]].astype(
                np.int32
            )
        else:
            around, spread = (1.0, 0.05) if "norm" in name else (0.0, 1.0 if name == "embed.weight" else 0.05)
            data = (around + spread * rng.standard_normal(shape)).astype(np.float32)
            if dtype != "F32":
                dtype, data = "BF16", to_bf16(data)
        made[name] = (dtype, tuple(shape), data)
    write_shards(folder, made)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def main(job: dict[str, Any]) -> None:
    """Engine after engine; their results are OUT/0.json and so on."""
    import triton.backends

    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    for name in IMPORTED:
        __import__(name)
    import vllm.models.deepseek_v4.cpu.cpu_mla as cpu

    builder = cpu.DeepseekV4CPUSparseSWAMetadataBuilder
    made = builder.build_tile_scheduler
    builder.build_tile_scheduler = lambda self, number: {"c1a": None, "c2a": None, **made(self, number)}
    for number, engine in enumerate(job["engines"]):
        one = {**job, "engine": engine, "prompt_logprobs": False}
        process = multiprocessing.get_context("fork").Process(
            target=_save, args=(one, Path(job["out"], f"{number}.json"))
        )
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"engine {number} failed")


def _save(job: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(_result(job)))


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    os.environ["TRITON_INTERPRET"] = "1"
    main(json.loads(Path(sys.argv[1]).read_text()))
