"""A checkpoint whose drafter is not among its tensors is served without it, and refused with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moetier.checkpoint.shards import read_shard
from moetier.store.build import build_store
from tests.serve.engine import moetier, run_engine
from tests.store.checkpoints import write_safetensors

pytest.importorskip("vllm", reason="vLLM is not installed")

PROMPTS = [[11, 22, 33, 44, 55], [101, 202, 303]]
DRAFTER = "model.layers.5."


@pytest.fixture(scope="module")
def model(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nano with its draft layer in a file that the index does not name."""
    folder = tmp_path_factory.mktemp("left-out") / "model"
    shutil.copytree(nano, folder)
    ((file),) = folder.glob("*.safetensors")
    raw = file.read_bytes()
    tensors = {
        t.name: (t.dtype, t.shape, np.frombuffer(raw, np.uint8, t.nbytes, t.offset))
        for t in read_shard(file).tensors.values()
    }
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(DRAFTER)}
    write_safetensors(file, kept)
    write_safetensors(folder / "model-mtp.safetensors", {n: t for n, t in tensors.items() if n not in kept})
    index = {"metadata": {}, "weight_map": dict.fromkeys(kept, file.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_it_answers_as_the_whole_model_and_refuses_to_speculate(nano: Path, model: Path, tmp_path: Path) -> None:
    build_store(nano, tmp_path / "whole")
    build_store(model, tmp_path / "store", check=2)
    whole, without = (
        run_engine(PROMPTS, 8, model=str(path), **moetier(store, dram_records="100%", threads=1))
        for path, store in ((nano, tmp_path / "whole"), (model, tmp_path / "store"))
    )
    for part in ("tokens", "logprobs", "prompt_logprobs"):
        assert without[part] == whole[part]
    speculative = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    with pytest.raises(RuntimeError, match=r"no experts of draft layer 5, which was left out .*model-mtp.safetensors"):
        run_engine(PROMPTS, 8, model=str(model), **moetier(tmp_path / "store", threads=1), **speculative)
