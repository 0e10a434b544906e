"""What vLLM does with batches changes nothing about tiers: the same tokens with all experts in DRAM and with none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.store.build import build_store
from tests.serve.engine import moetier, run_engine

pytest.importorskip("vllm", reason="vLLM is not installed")

MODES: dict[str, dict[str, Any]] = {
    "prefix-caching": {"enable_prefix_caching": True, "block_size": 32},
    "chunked-prefill": {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    "ngram-speculation": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    },
    "mtp-speculation": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    "preemption": {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 256, "block_size": 32},
}


@pytest.fixture(scope="module")
def store(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "nano"
    build_store(nano, path)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """12 prompts of 24 to 120 tokens that share a prefix and repeat themselves."""
    generator = np.random.default_rng(5)
    prefix = generator.integers(100, 4000, 32).tolist()
    return [
        prefix[: 24 + length] + (generator.integers(100, 4000, 8).tolist() * 12)[:length] for length in range(0, 96, 8)
    ]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_do_not_depend_on_the_tier(nano: Path, store: Path, prompts: list[list[int]], mode: str) -> None:
    everything, nothing = (
        run_engine(prompts, 24, prompt_logprobs=False, model=str(nano), **MODES[mode], **moetier(store, dram_records=r))
        for r in ("100%", 0)
    )
    assert everything["tokens"] == nothing["tokens"]
    assert everything["logprobs"] == nothing["logprobs"]
    assert everything["counters"]["misses"] == nothing["counters"]["hits"] == 0
    assert everything["scheduler"] == nothing["scheduler"], "vLLM did the same work in both"
    assert SHOWN[mode](everything["scheduler"])


SHOWN = {
    "prefix-caching": lambda seen: seen["vllm:prefix_cache_hits"] > 0,
    "chunked-prefill": lambda seen: seen["vllm:iteration_tokens_total"]["64.0"] > 10,
    "ngram-speculation": lambda seen: seen["vllm:spec_decode_num_accepted_tokens"] > 0,
    "mtp-speculation": lambda seen: seen["vllm:spec_decode_num_accepted_tokens"] > 0,
    "preemption": lambda seen: seen["vllm:num_preemptions"] > 0,
}
"""What proves that the mode was really on: the engine's own counters."""
