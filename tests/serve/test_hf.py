"""Under transformers: the bits do not depend on the tier, and float32 logits are near the dequantized model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.errors import UnsupportedModelError
from moetier.settings import Settings
from moetier.store.build import build_store
from tests.serve.models import VOCABULARY, write_models

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")


@pytest.fixture(scope="module")
def store(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "nano"
    build_store(nano, path)
    return path


@pytest.fixture(scope="module")
def tokens(nano: Path, eval_set: Callable[[str], list[dict[str, Any]]]) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(nano / "tokenizer.json"))
    text = "\n".join(item["messages"][-1]["content"] for item in eval_set("json"))
    return torch.tensor([tokenizer.encode(text).ids[:256]])


def logits(path: Path, store: Path, tokens: Any, dtype: Any, records: int | str) -> Any:
    from moetier.transformers.experts import load_model

    model = load_model(path, Settings.parse({"store": store, "dram_records": records}), dtype=dtype, max_tokens=512)
    try:
        with torch.inference_mode():
            found = model(tokens).logits
        assert model.moetier.counters.pairs > 0
        return found
    finally:
        model.moetier.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_do_not_depend_on_the_tier(nano: Path, store: Path, tokens: Any, dtype: str) -> None:
    everything, quarter, nothing = (
        logits(nano, store, tokens, getattr(torch, dtype), records) for records in ("100%", "25%", 0)
    )
    assert torch.equal(everything, quarter)
    assert torch.equal(everything, nothing)


def test_float32_is_near_the_dequantized_model(nano: Path, store: Path, tokens: Any, shared_models: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = logits(nano, store, tokens, torch.float32, "50%")
    reference = AutoModelForCausalLM.from_pretrained(shared_models / "nano-bf16", dtype=torch.float32)
    with torch.inference_mode():
        theirs = reference(tokens).logits
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.95
    assert (ours - theirs).abs().median() < 0.05


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_other_families(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    packed, plain = write_models(tmp_path, family)
    build_store(packed, tmp_path / "store")
    prompt = torch.tensor(np.random.default_rng(2).integers(0, VOCABULARY, (2, 24)))
    ours = logits(packed, tmp_path / "store", prompt, torch.float32, 3)
    assert torch.equal(ours, logits(packed, tmp_path / "store", prompt, torch.float32, "100%"))
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)(prompt).logits
    assert (ours - theirs).abs().median() < 0.05 * theirs.abs().median()


def test_experts_get_no_memory_in_the_framework(nano: Path, store: Path) -> None:
    from moetier.transformers.experts import load_model

    model = load_model(nano, Settings.parse({"store": store, "dram_records": 1}))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert not [name for name in sizes if ".experts." in name and "shared" not in name]
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    model.moetier.close()


def test_dense_layers_of_another_format_are_refused(tmp_path: Path) -> None:
    from moetier.transformers.experts import load_model

    packed, _ = write_models(tmp_path, "qwen3_moe")
    build_store(packed, tmp_path / "store")
    shard = packed / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b'"dtype": "BF16"', b'"dtype":  "I16"', 1))
    with pytest.raises(UnsupportedModelError, match="is I16: expected its other layers in one of BF16"):
        load_model(packed, Settings.parse({"store": tmp_path / "store"}))
