"""What is said of a checkpoint that transformers shall run; done as it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.transformers import experts as hf
from tests.remedies.trouble import Trouble
from tests.serve.models import write_models

remedy = pytest.mark.remedy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, its store beside it."""
    folder = tmp_path_factory.mktemp("hf")
    packed, _ = write_models(folder, "qwen3_moe")
    build_store(packed, folder / "store")
    return packed


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        pytest.param(
            (2, "cpu"), (2, "cuda"), marks=remedy("transformers/experts.py", "say device='cuda'"), id="device"
        ),
        pytest.param(
            ("auto", "cuda"), (2, "cuda"), marks=remedy("transformers/experts.py", "give slots as a number"), id="auto"
        ),
    ],
)
def test_slots_on_a_device(
    trouble: Trouble, model: Path, wrong: Any, right: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as a machine without a device goes: the place that the model's slots are made on."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def settings(slots: int | str) -> Settings:
        return Settings.parse({"store": model.parent / "store", "slots": slots, "dram_records": 1})

    with trouble:
        hf.load_model(model, settings(wrong[0]), device=wrong[1])
    assert hf._device_of(settings(right[0]), right[1]) == torch.device("cuda", 0)
    trouble.gone()


@remedy("transformers/experts.py", "serve this checkpoint with vLLM (`moetier serve`)")
def test_other_layers_of_another_format(trouble: Trouble, model: Path) -> None:
    """The loader of `moetier serve` reads such a tensor as it is: its format is the affair of vLLM's own layers."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from moetier.vllm.loader import MoetierLoader

    shard = model / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b'"dtype": "BF16"', b'"dtype":  "I16"', 1))
    with trouble:
        hf.load_model(model, Settings.parse({"store": model.parent / "store"}))
    source = DefaultModelLoader.Source(str(model), revision=None)
    read = {
        tensor.dtype for _, tensor in MoetierLoader(LoadConfig(load_format="moetier"))._get_weights_iterator(source)
    }
    assert read == {torch.bfloat16, torch.int16}
    trouble.gone()
