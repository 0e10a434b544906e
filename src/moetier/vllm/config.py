"""Quantization config "moetier": routed experts are ours, every other layer goes to the checkpoint's own config."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from moetier.vllm.method import MoetierMoEMethod
from moetier.vllm.plugin import NAME


class MoetierConfig(QuantizationConfig):
    """Takes over only where the user said `--quantization moetier`."""

    def __init__(self, checkpoint_config: dict[str, Any] | None = None) -> None:
        """checkpoint_config: the checkpoint's `quantization_config`, None where it has none."""
        self._checkpoint_config = checkpoint_config
        self._delegate: QuantizationConfig | None = None
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        """Answer what models ask the checkpoint's own config, such as the size of its blocks, that one answers."""
        delegate = self.__dict__.get("_delegate")
        if delegate is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}, nor has the checkpoint's own config")
        return getattr(delegate, name)

    @classmethod
    def get_name(cls) -> str:
        """See QuantizationConfig."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """bf16, and float32 for comparisons; the contract returns bf16 either way."""
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Without slots any device will do (`moetier doctor` says what slots need); other layers have their config."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: everything is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MoetierConfig:
        """Config from the checkpoint's `quantization_config`."""
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim the checkpoint if the user asked for us."""
        return NAME if user_quant == NAME else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """VLLM has read the model's config: build the config of the other layers."""
        if self._checkpoint_config is not None:
            self._delegate = _stock_config(self._checkpoint_config, hf_config)
            self._delegate.packed_modules_mapping = self.packed_modules_mapping
            self._delegate.maybe_update_config(model_name, hf_config=hf_config)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Names in the checkpoint's config become vLLM's."""
        if self._delegate is not None:
            self._delegate.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_cache_scale_mapper(self) -> Any:
        """How the checkpoint names the scales of its KV cache."""
        return (self._delegate or QuantizationConfig).get_cache_scale_mapper()

    def get_checkpoint_weight_mapper(self) -> Any:
        """How the checkpoint names its weights; vLLM asks from 0.33 on."""
        return (self._delegate or QuantizationConfig).get_checkpoint_weight_mapper()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours for routed experts; the checkpoint's own for all others (None: not quantized)."""
        if isinstance(layer, RoutedExperts):
            return MoetierMoEMethod(layer)
        if self._delegate is None:
            return _unquantized(layer)
        self._delegate.packed_modules_mapping = self.packed_modules_mapping
        return self._delegate.get_quant_method(layer, prefix)


def _unquantized(layer: torch.nn.Module) -> QuantizeMethodBase | None:
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def _stock_config(checkpoint_config: dict[str, Any], hf_config: Any) -> QuantizationConfig:
    """The config that vLLM would have chosen for this checkpoint without us."""
    method = checkpoint_config["quant_method"]
    for name in QUANTIZATION_METHODS:
        if name != NAME:
            candidate = get_quantization_config(name)
            override = candidate.override_quantization_method(checkpoint_config, None, hf_config=hf_config)
            if override is not None:
                method = override
                break
    return get_quantization_config(method).from_config(checkpoint_config)
