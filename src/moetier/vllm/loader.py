"""Model loader "moetier": vLLM's own, but a routed expert's tensor is never read from the checkpoint."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from moetier.checkpoint.shards import Shards
from moetier.errors import CheckpointError, UnsupportedModelError
from moetier.store.checkpoint import is_expert_tensor
from moetier.vllm.fixed import fix, refuse
from moetier.vllm.method import MoetierMoEMethod
from moetier.vllm.plugin import NAME

logger = init_logger(f"vllm.{__name__}")


@dataclass
class LoadReport:
    """Report of a load: what it read, and what it left to the store."""

    tensors: int = 0
    bytes: int = 0
    expert_tensors_skipped: int = 0


class MoetierLoader(DefaultModelLoader):
    """Expert names are filtered before any tensor is opened. A tensor is read where the checkpoint's index has it."""

    def __init__(self, load_config: LoadConfig) -> None:
        # vLLM's preparation of files knows only its own formats.
        super().__init__(dataclasses.replace(load_config, load_format="safetensors"))
        self.report = LoadReport()
        self._loading = False

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load everything but the experts, once."""
        _check_all_ours(model)
        self._loading = True
        try:
            super().load_weights(model, model_config)
        finally:
            self._loading = False
        drafts = getattr(model_config, "runner_type", "") == "draft"  # it reads a file in which others' experts lie
        if self.report.expert_tensors_skipped and not drafts and not _routed_experts(model):
            raise UnsupportedModelError(
                f"{type(model).__name__}: expected routed experts that vLLM runs as RoutedExperts, found none, and "
                f"{self.report.expert_tensors_skipped} tensors of experts in the checkpoint; this model cannot be "
                "served with moetier: leave out --load-format and --quantization"
            )
        fix(model)

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """For `load_weights`; vLLM asks for them again only to change the weights of a running engine."""
        if not self._loading:
            refuse("reload_weights")
        return super().get_all_weights(model_config, model)

    def _get_weights_iterator(self, source: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
        folder, files, is_safetensors, *_ = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if not is_safetensors:
            raise CheckpointError(f"{folder}: expected *.safetensors, found only other formats; convert the checkpoint")
        self.counter_before_loading_weights = time.perf_counter()
        shards = Shards.open(Path(files[0]).parent).shards
        if source.allow_patterns_overrides is not None:
            chosen = {Path(file).name for file in files}
            shards = [shard for shard in shards if shard.path.name in chosen]
        for shard in shards:
            with safe_open(shard.path, framework="pt") as file:
                for name in shard.tensors:
                    if is_expert_tensor(name):
                        self.report.expert_tensors_skipped += 1
                        continue
                    tensor = file.get_tensor(name)
                    self.report.tensors += 1
                    self.report.bytes += tensor.nbytes
                    yield source.prefix + name, tensor
        logger.info(
            "moetier: %d tensors were read, %.1f MiB; %d of experts are the store's",
            self.report.tensors,
            self.report.bytes / 2**20,
            self.report.expert_tensors_skipped,
        )


def _routed_experts(model: torch.nn.Module) -> list[RoutedExperts]:
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def _check_all_ours(model: torch.nn.Module) -> None:
    """UnsupportedModelError where a layer's experts are not ours: nobody would load them."""
    for layer in _routed_experts(model):
        if not isinstance(layer.quant_method, MoetierMoEMethod):
            raise UnsupportedModelError(
                f"{layer.layer_name}: expected its experts from a store (--quantization {NAME}), found "
                f"{type(layer.quant_method).__name__}, whose weights --load-format {NAME} does not read; give both "
                "options, as `moetier serve` does, or neither. A draft model with experts of its own is not served: "
                "take one without"
            )
