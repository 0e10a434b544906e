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
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from moetier.errors import CheckpointError
from moetier.store.checkpoint import is_expert_tensor
from moetier.store.shards import Shards

logger = init_logger(f"vllm.{__name__}")


@dataclass
class LoadReport:
    """What a load read and what it left to the store."""

    tensors: int = 0
    bytes: int = 0
    expert_tensors_skipped: int = 0


class MoetierLoader(DefaultModelLoader):
    """Expert names are filtered before any tensor is opened. A tensor is read where the checkpoint's index has it."""

    def __init__(self, load_config: LoadConfig) -> None:
        # vLLM's preparation of files knows only its own formats.
        super().__init__(dataclasses.replace(load_config, load_format="safetensors"))
        self.report = LoadReport()

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
            "moetier: read %d tensors, %.1f MiB; left %d expert tensors to the store",
            self.report.tensors,
            self.report.bytes / 2**20,
            self.report.expert_tensors_skipped,
        )
