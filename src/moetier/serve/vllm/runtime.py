"""The tiers of this process: opened once, shared by a model and its drafter, closed at exit."""

from __future__ import annotations

import atexit
import multiprocessing.util
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from moetier.errors import SettingsError
from moetier.layer import TieredModel
from moetier.layer.fit import records_that_fit
from moetier.serve.failure import reported
from moetier.serve.vllm.plugin import NAME
from moetier.settings import Settings
from moetier.store.checkpoint import Checkpoint
from moetier.store.store import Store

logger = init_logger(f"vllm.{__name__}")

_models: dict[Settings, TieredModel] = {}


def tiered_model(vllm_config: Any) -> TieredModel:
    """The tiers that `--additional-config '{"moetier": {...}}'` asks for."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or NAME not in additional:
        raise SettingsError(
            'no settings for moetier: expected --additional-config \'{"moetier": {"store": FOLDER}}\'; '
            "`moetier serve MODEL` writes it"
        )
    settings = Settings.parse(additional[NAME])
    if settings not in _models:
        with reported(settings.failure_file):
            _models[settings] = _open(settings, vllm_config)
    return _models[settings]


def _open(settings: Settings, vllm_config: Any) -> TieredModel:
    checkpoint = Checkpoint.open(Path(vllm_config.model_config.model))
    store = Store.open(settings.store, checkpoint_identity=checkpoint.identity())
    drafts = vllm_config.speculative_config is not None
    layers = sum(drafts or layer.number < checkpoint.hidden_layers for layer in store.manifest.layers)
    records = records_that_fit(settings, store, layers)
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    tiers = TieredModel(settings, store, records, max_tokens, checkpoint)
    # Processes that multiprocessing starts run these finalizers at their end, but no atexit functions.
    multiprocessing.util.Finalize(None, tiers.close, exitpriority=100)
    logger.info(
        "moetier: %d of %d records of each layer in DRAM, CPU kernels %s on %d threads, disk reads %s",
        records,
        store.manifest.layer_geometry.experts,
        tiers.kernel.isa,
        tiers.pool.threads,
        "direct" if tiers.reader.direct else "through the page cache",
    )
    return tiers


def close_all() -> None:
    """Close every model of this process; the next one is opened anew."""
    while _models:
        _models.popitem()[1].close()


atexit.register(close_all)
