"""Through vLLM inside one process: tokens and logprobs do not depend on where the experts are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.store.build import build_store
from tests.serve.engine import moetier, run_engine
from tests.serve.models import VOCABULARY, write_models

pytest.importorskip("vllm", reason="vLLM is not installed")

PROMPTS, MAX_TOKENS = 50, 16
SHARES = {"100%": 32, "25%": 8, "0": 0}
"""Share of the experts in DRAM -> records of each of nano's layers. 0 is the least possible: staging alone."""


@pytest.fixture(scope="module")
def store(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "nano"
    build_store(nano, path)
    return path


@pytest.fixture(scope="module")
def prompts(nano: Path, eval_set: Callable[[str], list[dict[str, Any]]]) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(nano / "tokenizer.json"))
    items = [*eval_set("arithmetic")[:20], *eval_set("copy")[:15], *eval_set("json")[:15]]
    return [tokenizer.encode(item["messages"][-1]["content"]).ids for item in items][:PROMPTS]


@pytest.fixture(scope="module")
def results(nano: Path, store: Path, prompts: list[list[int]]) -> dict[str, dict[str, Any]]:
    assert len(prompts) == PROMPTS
    return {
        share: run_engine(prompts, MAX_TOKENS, model=str(nano), **moetier(store, dram_records=share, threads=2))
        for share in SHARES
    }


@pytest.mark.parametrize("share", [share for share in SHARES if share != "100%"])
def test_tokens_and_logprobs_are_those_of_all_dram(results: dict[str, dict[str, Any]], share: str) -> None:
    for part in ("tokens", "logprobs", "prompt_logprobs"):
        assert results[share][part] == results["100%"][part]


def test_each_tier_did_what_it_was_asked(results: dict[str, dict[str, Any]]) -> None:
    """Identity means nothing if the runs were secretly the same."""
    assert {share: result["records"] for share, result in results.items()} == SHARES
    everything, quarter, nothing = (results[share] for share in SHARES)
    assert everything["counters"]["misses"] == 0
    assert everything["reads"] == 4 * 32, "every record was read once, at the start"
    assert quarter["counters"]["hits"] > 0
    assert quarter["counters"]["misses"] > 0
    assert nothing["counters"]["hits"] == 0
    assert nothing["reads"] == nothing["counters"]["misses"] > everything["reads"]
    assert everything["counters"]["pairs"] == quarter["counters"]["pairs"] == nothing["counters"]["pairs"] > 0


def test_expert_bytes_are_not_read_at_load(nano: Path, store: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """Without any expert's bytes in the checkpoint the same tokens come out; zeros in their place are refused."""
    from moetier.store.checkpoint import Checkpoint, is_expert_tensor
    from moetier.store.trim import trim_checkpoint
    from tests.store.older import older_store

    few = prompts[:4]
    whole = run_engine(few, 8, model=str(nano), **moetier(store, dram_records="50%"))
    trim_checkpoint(Checkpoint.open(nano), tmp_path / "trimmed")
    trimmed = run_engine(few, 8, model=str(tmp_path / "trimmed"), **moetier(store, dram_records="50%"))
    assert trimmed["tokens"] == whole["tokens"]

    hollow = tmp_path / "hollow"
    shutil.copytree(nano, hollow)
    zeroed = 0
    for name, tensor in Checkpoint.open(hollow).tensors.items():
        if is_expert_tensor(name):
            with tensor.file.open("r+b") as shard:
                shard.seek(tensor.offset)
                shard.write(b"\0" * tensor.nbytes)
            zeroed += tensor.nbytes
    assert zeroed > 4_000_000
    with pytest.raises(RuntimeError, match="was built from another checkpoint"):
        run_engine(few, 8, model=str(hollow), **moetier(store, dram_records="50%"))
    shutil.copytree(store, tmp_path / "older")
    older_store(tmp_path / "older")
    with pytest.raises(RuntimeError, match=r"layer \d, expert \d+: the store"):
        run_engine(few, 8, model=str(hollow), **moetier(tmp_path / "older", dram_records="50%"))


def test_float32_agrees_with_stock_vllm(nano: Path, store: Path, shared_models: Path, prompts: list[list[int]]) -> None:
    """Routing, scaling and shared experts are applied once: logprobs are near those of the dequantized model."""
    few = prompts[:8]
    ours = run_engine(few, 1, model=str(nano), dtype="float32", **moetier(store, dram_records="100%"))
    stock = run_engine(few, 1, model=str(shared_models / "nano-bf16"), dtype="float32")
    differences = logprob_differences(ours, stock)
    assert np.median(differences) < 0.02, json.dumps(sorted(differences)[-5:])
    assert np.mean(differences) < 0.1


def logprob_differences(a: dict[str, Any], b: dict[str, Any]) -> list[float]:
    """|difference| of the logprob of every prompt token in two runs."""
    found = []
    for steps_a, steps_b in zip(a["prompt_logprobs"], b["prompt_logprobs"], strict=True):
        for step_a, step_b in zip(steps_a, steps_b, strict=True):
            if step_a is not None:
                found += [abs(step_a[token] - step_b[token]) for token in step_a.keys() & step_b.keys()]
    assert found
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Random weights: the tier changes nothing, and float32 logprobs are near stock vLLM's on the same weights."""
    packed, plain = write_models(tmp_path, family)
    build_store(packed, tmp_path / "store")
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, VOCABULARY, 24).tolist() for _ in range(6)]
    # Where the CPU has AMX, vLLM prefers attention kernels that know no float32.
    common = {"dtype": "float32"} | ({"attention_backend": "CPU_MLA"} if family == "deepseek_v3" else {})
    some, none = (
        run_engine(prompts, 8, model=str(packed), **common, **moetier(tmp_path / "store", dram_records=records))
        for records in (5, 0)
    )
    assert some["tokens"] == none["tokens"]
    assert some["logprobs"] == none["logprobs"]
    stock = run_engine(prompts, 1, model=str(plain), **common)
    differences = logprob_differences(some, stock)
    assert np.median(differences) < 0.05
    assert np.mean(differences) < 0.2
