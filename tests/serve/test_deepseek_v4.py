"""DeepSeek V4 under vLLM: equal tokens and logprobs wherever its experts are, and layer calls as the oracle's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.contract import oracle
from moetier.engine.recording import read_calls
from moetier.store.build import build_store
from moetier.store.store import Store
from tests.serve.deepseek_v4 import CONFIG, HASHED, write
from tests.serve.engine import LIMIT_SECONDS, moetier

for package in ("vllm", "triton"):
    pytest.importorskip(package, reason=f"{package} is not installed")
if importlib.util.find_spec("vllm.models.deepseek_v4.cpu") is None:
    pytest.skip("this vLLM has no DeepSeek V4 for CPUs", allow_module_level=True)
import torch  # noqa: E402 (vLLM brings it)

if not torch.cpu._is_avx512_supported():
    pytest.skip("vLLM's attention of DeepSeek V4 wants AVX-512", allow_module_level=True)

DRAM = ("100%", "10%", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v4")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    """Of an engine with each share of the records in DRAM; the first recorded its calls."""
    model, store = write(folder / "model"), folder / "store"
    build_store(model, store)
    rng = np.random.default_rng(5)
    settings: list[dict[str, Any]] = [
        {"dram_records": share, "heat_file": str(folder / f"heat-{number}")} for number, share in enumerate(DRAM)
    ]
    settings[0]["record_calls"] = str(folder / "calls")
    common = {"model": str(model), "worker_cls": "moetier.vllm.cpu_worker.MoetierCpuWorker"}
    common |= {"max_model_len": 512, "max_num_seqs": 4}
    job = {
        "engines": [{**common, **moetier(store, **one)} for one in settings],
        "prompts": [rng.integers(2, CONFIG["vocab_size"], length).tolist() for length in (5, 40, 170)],
        "max_tokens": 8,
        "out": str(folder),
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "tests.serve.deepseek_v4", str(folder / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(len(DRAM))]


def test_tokens_do_not_depend_on_the_tier(results: list[dict[str, Any]]) -> None:
    everything, some, nothing = results
    for other in (some, nothing):
        assert other["tokens"] == everything["tokens"]
        assert other["logprobs"] == everything["logprobs"]
    assert everything["counters"]["misses"] == nothing["counters"]["hits"] == 0
    assert 0 < some["counters"]["misses"] < nothing["counters"]["misses"]
    assert len({token for answer in everything["tokens"] for token in answer}) > 4, "answers that could differ"


def test_layer_calls_are_the_oracles(results: list[dict[str, Any]], folder: Path) -> None:
    """SwiGLU is clamped, the route weight comes before the down projection, and hashed layers route by token id."""
    checked = dict.fromkeys(range(CONFIG["num_hidden_layers"]), 0)
    with Store.open(folder / "store") as store:
        geometry, family = store.manifest.layer_geometry, store.manifest.layer_family
        record = np.empty(store.layout.stride, np.uint8)
        assert family.swiglu_limit == CONFIG["swiglu_limit"]
        for call in read_calls(folder / "calls"):
            if call.x.shape[0] > 3 or checked[call.layer] == 2:
                continue
            matrices = {}
            for expert in np.unique(call.ids).tolist():
                store.read_record(call.layer, expert, record)
                matrices[expert] = store.layout.unpack(record)
            x = oracle.from_bf16(call.x)
            wanted = oracle.moe_layer(x, call.ids, call.weights, matrices, geometry.experts, family)
            assert np.array_equal(call.out, wanted)
            assert np.allclose(call.weights.sum(1), CONFIG["routed_scaling_factor"], rtol=1e-5)
            checked[call.layer] += 1
    assert set(checked.values()) == {2}
    assert set(HASHED) < set(checked)
