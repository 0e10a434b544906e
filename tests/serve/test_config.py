"""The quantization config between vLLM's models and the checkpoint's own."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from moetier.vllm.config import MoetierConfig

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v4"])
def test_models_see_the_checkpoints_own_config(model_type: str) -> None:
    """DeepSeek V4 pads its shared experts by the size of the blocks, where ranks are more than divide them."""
    config = MoetierConfig.from_config(FP8)
    config.maybe_update_config("model", hf_config=SimpleNamespace(model_type=model_type))
    for found in (config, pickle.loads(pickle.dumps(config))):
        assert getattr(found, "weight_block_size", None) == [128, 128]
        assert found.get_name() == "moetier"
        assert not hasattr(found, "nothing_has_this")
        assert found.get_cache_scale_mapper() == found._delegate.get_cache_scale_mapper()


def test_a_checkpoint_without_one() -> None:
    config = pickle.loads(pickle.dumps(MoetierConfig()))
    assert getattr(config, "weight_block_size", None) is None
    assert config.get_cache_scale_mapper() is not None
