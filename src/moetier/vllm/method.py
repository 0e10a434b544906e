"""The fused-MoE method: what vLLM's router chose goes to the tiered layer, its bits come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from moetier.engine.naming import layer_number
from moetier.launch.failure import reported
from moetier.vllm import ops, runtime
from moetier.vllm.support import check_supported

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from moetier.engine import TieredModel


class MoetierMoEMethod(FusedMoEMethodBase):
    """Holds no weights: they are in the store. One object per routed-expert layer."""

    def __init__(self, layer: RoutedExperts) -> None:
        super().__init__(layer.moe_config)
        config = get_current_vllm_config()
        self._config = config
        self._model: TieredModel = runtime.tiered_model(config)
        with reported(self._model.settings.failure_file):
            self._number = layer_number(layer.layer_name, self._model.hidden_layers)
            self._model.claim(self._number, layer.layer_name)
            runtime.check_drafter(self._number, self._model, config)
            self._model.store.layer_index(self._number)  # a drafter that was left out is told before its sizes are
            check_supported(layer, self._model.store, config, self._model.settings)
        self._key = -1

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Nothing to allocate in the framework."""

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Fill the layer's device slots and DRAM tier with its hottest records."""
        if self._key < 0:
            settings = self._model.settings
            with reported(settings.failure_file):
                model = runtime.hybrid_model(self._model, self._config) if settings.slots else self._model
                tiers = model.attach(self._number)
            self._key = ops.register_layer(tiers, settings.failure_file)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """No stock kernel is used."""

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """X [T, hidden], weights and ids [T, top_k] -> [T, hidden] of x's dtype. Shared experts stay with vLLM."""
        return torch.ops.moetier.routed_experts(x, topk_weights, topk_ids, self._key)
