"""Tell the launcher what vLLM's worker knows of its KV cache and its device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

from moetier.launch.started import Started, write_started
from moetier.settings import Settings
from moetier.vllm.plugin import NAME

logger = init_logger(f"vllm.{__name__}")


def started(worker: Any, kv_cache_config: Any) -> Started | None:
    """Once the worker has allocated it; None for a model without a KV cache.

    `get_max_concurrency_for_kv_cache_config`, `num_blocks` and `model_runner.kv_caches` are the same from vLLM 0.26 to
    0.33.
    """
    if not kv_cache_config.num_blocks or not kv_cache_config.kv_cache_groups:
        return None
    requests = get_max_concurrency_for_kv_cache_config(worker.vllm_config, kv_cache_config)
    caches = (cache.untyped_storage() for cache in _tensors(worker.model_runner.kv_caches))
    storages = {cache.data_ptr(): cache for cache in caches}
    device_bytes = None
    if worker.device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(worker.device)
        device_bytes = whole - free
    return Started(
        kv_bytes=sum(storage.nbytes() for storage in storages.values()),
        blocks=kv_cache_config.num_blocks,
        blocks_per_request=max(round(kv_cache_config.num_blocks / requests), 1),
        context=worker.model_config.max_model_len,
        device_bytes=device_bytes,
    )


def tell(worker: Any, kv_cache_config: Any) -> None:
    """Log it, and write it where the launcher looks; a folder that takes nothing costs no service."""
    folder = Settings.parse(worker.vllm_config.additional_config[NAME]).counters_folder
    found = started(worker, kv_cache_config)
    if found is None:
        return
    for line in found.lines():
        logger.info("moetier: %s", line)
    try:
        if folder is not None:
            write_started(folder, found)
    except OSError as error:
        logger.warning("moetier: cannot say what was started in %s: %s", folder, error)


def _tensors(caches: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested lists."""
    if isinstance(caches, torch.Tensor):
        yield caches
    else:
        for cache in caches:
            yield from _tensors(cache)
