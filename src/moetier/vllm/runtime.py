"""The tiers of this process: opened once, shared by a model and its drafter, closed at exit."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from moetier.budget import records_that_fit
from moetier.engine import TieredModel
from moetier.engine.hybrid import HybridModel, Launch
from moetier.engine.model import IntegrityError
from moetier.errors import MoetierError, SettingsError, UnsupportedModelError
from moetier.identity.start import self_check
from moetier.launch.command import cpus_of_rank
from moetier.launch.counting import Publisher
from moetier.launch.failure import reported
from moetier.machine import limits as machine
from moetier.sentinel.watch import Sentinel
from moetier.settings import Settings
from moetier.store.checkpoint import Checkpoint
from moetier.store.match import compare_some, open_store
from moetier.store.store import Store
from moetier.tiers.part import Part
from moetier.tiers.step import Step
from moetier.vllm.agreement import Facts, agree
from moetier.vllm.plugin import NAME
from moetier.vllm.ranks import gather, place
from moetier.vllm.support import check_engine

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True)
class Key:
    """Key of what may share tiers in a process: the same settings for the same files of a checkpoint.

    files: name, size, inode and time of change of each, so that a checkpoint that was exchanged is another one.
    """

    settings: Settings
    checkpoint: Path
    files: tuple[tuple[str, int, int, int], ...]

    @classmethod
    def of(cls, settings: Settings, vllm_config: Any) -> Key:
        """For the model of an engine."""
        folder = Path(vllm_config.model_config.model).resolve()
        paths = sorted(path for path in folder.glob("*") if path.suffix in (".json", ".safetensors"))
        stats = ((path.name, path.stat()) for path in paths if path.exists())
        return cls(settings, folder, tuple((name, s.st_size, s.st_ino, s.st_mtime_ns) for name, s in stats))

    @property
    def failure_file(self) -> Path | None:
        return self.settings.failure_file


_models: dict[Key, TieredModel] = {}
_hybrids: dict[Key, HybridModel] = {}
_sentinels: dict[Key, Sentinel] = {}


def tiered_model(vllm_config: Any) -> TieredModel:
    """The tiers that `--additional-config '{"moetier": {...}}'` asks for."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or NAME not in additional:
        raise SettingsError(
            'no settings for moetier: expected --additional-config \'{"moetier": {"store": FOLDER}}\'; '
            "`moetier serve MODEL` writes it"
        )
    settings = Settings.parse(additional[NAME])
    with reported(settings.failure_file):
        check_engine(vllm_config)
        key = Key.of(settings, vllm_config)
        if key not in _models:
            _check_no_draft_model(vllm_config)
            _models[key] = _open(settings, vllm_config)
            if settings.sentinel:
                _sentinels[key] = Sentinel(_models[key], settings.sentinel, halt=settings.halt_on_corruption)
    return _models[key]


def _check_no_draft_model(vllm_config: Any) -> None:
    """UnsupportedModelError for a draft model with experts of its own: there is one store, the target's."""
    drafter = _draft_checkpoint(vllm_config)
    if drafter is not None and drafter == Path(vllm_config.model_config.model).resolve():
        raise UnsupportedModelError(_draft_refused(drafter, vllm_config))


def check_drafter(number: int, tiers: TieredModel, vllm_config: Any) -> None:
    """UnsupportedModelError where layer `number` is a drafter's whose weights come from another checkpoint.

    Its experts would come from the store of the target's.
    """
    drafter = _draft_checkpoint(vllm_config)
    if drafter is None or not tiers.drafts(number):
        return
    target = Checkpoint.open(vllm_config.model_config.model)
    if target.identities.differs(Checkpoint.open(drafter).identities):
        raise UnsupportedModelError(_draft_refused(drafter, vllm_config))


def _draft_checkpoint(vllm_config: Any) -> Path | None:
    """The checkpoint of the drafter, where it is not the target's."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return None
    target = Path(speculative.target_model_config.model).resolve()
    drafter = Path(draft.model).resolve()
    return None if drafter == target else drafter


def _draft_refused(drafter: Path, vllm_config: Any) -> str:
    return (
        f"the drafter {drafter} has routed experts and is another checkpoint than "
        f"{vllm_config.speculative_config.target_model_config.model}: expected one without experts, or the one in the "
        "model's own checkpoint, whose experts are in its store; choose such a one in --speculative-config"
    )


def _open(settings: Settings, vllm_config: Any) -> TieredModel:
    rank, ranks = place()
    opened: list[tuple[Checkpoint, Store]] = []

    def say() -> tuple[Facts, int]:
        checkpoint = Checkpoint.open(Path(vllm_config.model_config.model))
        store = open_store(settings.store, checkpoint)
        Part(store.manifest.layer_geometry, rank, ranks)
        layers = served_layers(checkpoint, store, vllm_config)
        opened.append((checkpoint, store))
        return Facts.of(settings, store, layers), records_that_fit(settings, store, layers, ranks=ranks)

    records = agree(say, gather)
    ((checkpoint, store),) = opened
    if not rank and (compared := compare_some(store, checkpoint)) is not None:
        logger.info("moetier: %s", compared)
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    if settings.slots:
        max_tokens = settings.planned_tokens  # more tokens are the device's alone
    own = _of_rank(settings, rank, ranks)
    if own.slots and own.threads is None:
        threads = machine.default_threads(own.cpus or machine.allowed_cpus())
        own = own.model_copy(update={"threads": machine.hybrid_threads(threads)})
    tiers = TieredModel(own, store, records, max_tokens, checkpoint, rank, ranks)
    if settings.counters_folder is not None:
        tiers.at_close(Publisher(tiers, settings.counters_folder).close)
    if settings.check_at_end:
        tiers.at_close(partial(_check_at_end, tiers))
    # Processes that multiprocessing starts run these finalizers at their end, but no atexit functions.
    multiprocessing.util.Finalize(None, tiers.close, exitpriority=100)
    logger.info(
        "moetier: rank %d of %d, %d of %d records of each layer in DRAM, CPU kernels %s on %d threads, disk reads %s",
        rank,
        ranks,
        records,
        store.manifest.layer_geometry.experts,
        tiers.kernel.isa,
        tiers.pool.threads,
        "direct" if tiers.reader.direct else "through the page cache",
    )
    _check_identity(tiers)
    return tiers


def hybrid_model(tiers: TieredModel, vllm_config: Any) -> HybridModel:
    """The device slots over `tiers`; the first call makes them, when the dense weights are on the device."""
    key = Key.of(tiers.settings, vllm_config)
    if key not in _hybrids:
        from moetier.sentinel.slots import WatchedSlots
        from moetier.vllm.hybrid import open_hybrid

        def failed(error: MoetierError) -> None:
            with contextlib.suppress(MoetierError), reported(tiers.settings.failure_file):
                raise error
            if tiers.part.ranks > 1:  # the others wait for it in a collective; vLLM sees only a process that ends
                os._exit(1)

        checkpoint = Checkpoint.open(Path(vllm_config.model_config.model))
        model = open_hybrid(tiers, served_layers(checkpoint, tiers.store, vllm_config), vllm_config, failed)
        if tiers.settings.check_at_end:
            tiers.at_close(partial(_check_slots_at_end, tiers, model))
        tiers.at_close(model.close)
        if key in _sentinels:
            _sentinels[key].watch(WatchedSlots(tiers, model.layers, model.device))
        _hybrids[key] = model
    return _hybrids[key]


def served_layers(checkpoint: Checkpoint, store: Store, vllm_config: Any) -> int:
    """MoE layers that this engine loads: the drafter's (MTP) only where it speculates."""
    return store.served_layers(checkpoint.hidden_layers, vllm_config.speculative_config is not None)


def _of_rank(settings: Settings, rank: int, ranks: int) -> Settings:
    """The settings with this rank's share of the CPUs and threads."""
    if settings.slots and (settings.record_trace or settings.record_calls):
        raise SettingsError("recording: with device slots what is routed stays on the device; record with --slots 0")
    if ranks == 1:
        return settings
    if settings.record_calls is not None:
        raise SettingsError("record_calls: a rank's output is a part of a layer's; record with one rank")
    threads = settings.threads and max(1, settings.threads // ranks)
    cpus = cpus_of_rank(settings.cpus or machine.allowed_cpus(), rank, ranks)
    return settings.model_copy(update={"cpus": cpus, "threads": threads})


def _check_identity(tiers: TieredModel) -> None:
    begun = time.monotonic()
    checked = self_check(tiers, tiers.settings.identity_check)
    logger.info(
        "moetier: identity check, %d calls, %d comparisons over %d paths, and %d kernels with the oracle, "
        "in %.1f s: 0 differ",
        checked.calls,
        checked.comparisons,
        len(checked.paths),
        checked.oracle,
        time.monotonic() - begun,
    )


def _check_at_end(tiers: TieredModel) -> None:
    with reported(tiers.settings.failure_file):
        logger.info("moetier: tables agree, %d records in DRAM have the right bytes", tiers.check_integrity())


def _check_slots_at_end(tiers: TieredModel, hybrid: HybridModel) -> None:
    with reported(tiers.settings.failure_file):
        try:
            hybrid.check_integrity()
        except AssertionError as error:
            raise IntegrityError(f"device slots and their tables do not agree: {error}") from error
        logger.info("moetier: slots agree, every record in them has the store's bytes")


def warm_up() -> None:
    """The layers are loaded; what runs from now until `begin_step` is no traffic."""
    for model in _models.values():
        model.context.real = False
    for key, hybrid in _hybrids.items():
        from moetier.identity.device import check_paths  # wants what only a GPU has

        begun = time.monotonic()
        with reported(key.failure_file):
            checked = check_paths(hybrid.layers, hybrid.path, hybrid.streams, key.settings.identity_check)
            hybrid.measure()
        logger.info(
            "moetier: identity check of the device, %d calls, %d comparisons in %.1f s: 0 differ; a missed expert "
            "costs %.0f us on the CPU (and %.0f us a call), %.0f us streamed",
            checked.calls,
            checked.comparisons,
            time.monotonic() - begun,
            hybrid.costs.cpu_expert / 1e3,
            hybrid.costs.cpu_call / 1e3,
            hybrid.costs.stream_expert / 1e3,
        )


def begin_step(step: Step, launch: Launch) -> None:
    """The engine is about to launch a step."""
    for model in _models.values():
        model.context.step = step
        model.context.real = True
    for key, sentinel in _sentinels.items():
        sentinel.start()  # nothing is loaded or captured any more
        with reported(key.failure_file):
            sentinel.settle()
    for hybrid in _hybrids.values():
        hybrid.before_step(launch, step)


def end_step(step: Step) -> None:
    """The step was launched."""
    for hybrid in _hybrids.values():
        hybrid.after_step(step)


def tell_failure(error: Exception) -> None:
    """`error` ends this process: say why, in the log and where the launcher looks.

    A device that stopped because the CPU did not answer fails with words of CUDA's; the mailbox knows better.
    """
    with contextlib.suppress(Exception):
        for hybrid in _hybrids.values():
            hybrid.tell_if_late()
    for key in _models:
        with contextlib.suppress(Exception), reported(key.failure_file):
            raise error
    logger.error("moetier: the engine's process ends of %s: %s", type(error).__name__, error, exc_info=error)


def ranks() -> int:
    """Ranks that the models of this process are spread over."""
    return max((model.part.ranks for model in _models.values()), default=1)


def close_all() -> None:
    """Close every model of this process; the next one is opened anew."""
    _hybrids.clear()
    _sentinels.clear()
    while _models:
        _models.popitem()[1].close()


atexit.register(close_all)
