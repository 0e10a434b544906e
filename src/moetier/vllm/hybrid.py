"""Device slots under vLLM: how many there are, and the hybrid layers of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.logger import init_logger

from moetier.budget import DEVICE_HEADROOM, GIB, Budget, Item, choose_slots, device_rows
from moetier.contract import RecordLayout
from moetier.engine import TieredModel
from moetier.engine.hybrid import HybridModel, SlotPlan
from moetier.errors import MoetierError, SettingsError

logger = init_logger(f"vllm.{__name__}")


def open_hybrid(
    tiers: TieredModel, layers: int, vllm_config: Any, on_failure: Callable[[MoetierError], None]
) -> HybridModel:
    """Slots for `layers` layers on this process's device; SettingsError where they do not fit.

    The dense weights must be on the device already, so that what is left is known.
    """
    settings, device = tiers.settings, torch.device("cuda", torch.cuda.current_device())
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    per_layer = _slots(tiers, layers, vllm_config, max_tokens)
    plan = SlotPlan.of(settings, layers, per_layer, tiers.part.geometry.experts)
    model = HybridModel(tiers, plan, max_tokens, device, settings.patience_seconds, on_failure)
    logger.info(
        "moetier: %d device slots for each of %d layers (%d resident, %d spare) and %d staging slots, %.2f GiB",
        per_layer,
        layers,
        plan.resident,
        plan.spare,
        plan.staging,
        plan.slots * RecordLayout.of(tiers.part.narrow).stride / GIB,
    )
    return model


def _slots(tiers: TieredModel, layers: int, vllm_config: Any, max_tokens: int) -> int:
    """Slots of each layer."""
    settings, g = tiers.settings, tiers.part.narrow
    stride = RecordLayout.of(g).stride
    free, _ = torch.cuda.mem_get_info()
    cache = vllm_config.cache_config.kv_cache_memory_bytes
    wanted = settings.slots_of(g.experts)
    if wanted is None and not cache:
        raise SettingsError(
            "slots auto: the KV cache's size is not known yet; give it with --kv-cache-gib (or vLLM's "
            "--kv-cache-memory-bytes), or give slots as a number"
        )
    items = (
        Item("workspace", device_rows(g, max_tokens)),
        Item("KV cache", cache or 0),
        Item("staging", settings.staging_slots * stride),
    )
    return choose_slots(wanted, Budget(free, items, layers, g.experts, stride, DEVICE_HEADROOM))
