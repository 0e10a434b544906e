"""All routed-expert layers of a model over one set of tiers: what a serving process holds, once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from moetier.engine.context import Context
from moetier.engine.counters import Checks, Counters
from moetier.engine.host import TieredLayer
from moetier.engine.recording import Recorder
from moetier.errors import MoetierError, UnsupportedModelError
from moetier.kernels.cpu import CpuExperts, ThreadPool
from moetier.settings import Settings
from moetier.store.checkpoint import Checkpoint
from moetier.store.heal import Healer
from moetier.store.store import Store
from moetier.tiers.disk import DiskReader
from moetier.tiers.dram import DramTier
from moetier.tiers.heat import Heat
from moetier.tiers.part import Part
from moetier.tiers.policy import POLICIES
from moetier.tiers.staging import Staging
from moetier.trace.record import TraceHeader, TraceWriter

logger = logging.getLogger(__name__)


class IntegrityError(MoetierError):
    """Memory does not hold what was put there."""

    exit_code = 1


class TieredModel:
    """Opens a store and serves its layers. Thread-safe only in that heat may be saved while layers run."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        records: int,
        max_tokens: int,
        checkpoint: Checkpoint | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """records: records per layer in DRAM; max_tokens: the most tokens of a call; checkpoint: heals bad records.

        rank, ranks: of tensor parallelism; this process holds and computes its share of every record's slices.
        """
        geometry = store.manifest.layer_geometry
        self.part = Part(geometry, rank, ranks)
        self.settings = settings
        self.store = store
        self.records = records
        self.healer = Healer(store, checkpoint) if checkpoint else None
        self._hidden_layers = checkpoint.hidden_layers if checkpoint else None
        self._claims: dict[int, str] = {}
        self.reader = DiskReader(store, settings.disk_threads, self.healer, self.part)
        self.pool = ThreadPool(settings.threads, settings.cpus)
        self.kernel = self.make_kernel(settings.isa, self.pool, max_tokens)
        self.staging = Staging(settings.staging_records, self.part.room, self.part.shift)
        layers = store.manifest.layers
        self.layer_counters = tuple(Counters() for _ in layers)
        """By the layer's index in the store."""
        self.heat = Heat.load(settings.heat_path, len(layers), geometry.experts, store.manifest.checkpoint.identity)
        header = TraceHeader(len(layers), geometry.experts, geometry.top_k, store.manifest.checkpoint.identity)
        self.context = Context(
            recorder=Recorder(settings.record_calls) if settings.record_calls else None,
            trace=TraceWriter(settings.record_trace, header) if settings.record_trace and rank == 0 else None,
        )
        self._attached: dict[int, TieredLayer] = {}
        self.dram: dict[int, DramTier] = {}
        """By the layer's index in the store: of every layer that is served."""
        self.lock = threading.Lock()
        """Held by whoever changes what is in DRAM, where there are device slots: several threads do then."""
        self.checks = Checks()
        self._at_close: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._saver = threading.Thread(target=self._save_heat_now_and_then, name="moetier-heat", daemon=True)
        self._saver.start()

    def make_kernel(self, isa: str | None, pool: ThreadPool, max_tokens: int) -> CpuExperts:
        """A kernel for this rank's part of the records."""
        return CpuExperts(self.part.narrow, self.store.manifest.layer_family, pool, isa=isa, max_tokens=max_tokens)

    def attach(self, number: int) -> TieredLayer:
        """The layer with this number in the checkpoint, its hottest records already in DRAM."""
        index = self.store.layer_index(number)
        if index not in self._attached:
            geometry = self.store.manifest.layer_geometry
            policy = POLICIES[self.settings.policy](geometry.experts)
            tier = DramTier(geometry.experts, self.records, self.part.room, policy, self.part.shift)
            layer = TieredLayer(
                index,
                self.kernel,
                tier,
                self.staging,
                self.reader,
                self.heat,
                self.layer_counters[index],
                self.context,
            )
            layer.preload(self.records)
            self._attached[index] = layer
            self.dram[index] = tier
        return self._attached[index]

    @property
    def hidden_layers(self) -> int:
        """Layers of the model itself, from which its drafter's count on."""
        if self._hidden_layers is None:
            raise ValueError("a model without its checkpoint has no drafter")
        return self._hidden_layers

    def claim(self, number: int, module: str) -> None:
        """Note that the framework's module of this name computes a layer; another for the same is an error.

        A drafter whose modules are numbered from 0 would compute with the experts of the model's first layers.
        """
        if self._claims.setdefault(number, module) != module:
            raise UnsupportedModelError(
                f"{module}: expected one module for layer {number} of the checkpoint, found {self._claims[number]} "
                "too; this model's drafter cannot be served: start without --speculative-config"
            )

    def drafts(self, number: int) -> bool:
        """Whether the layer with this number in the checkpoint is a drafter's."""
        return self._hidden_layers is not None and number >= self._hidden_layers

    @property
    def attached(self) -> tuple[int, ...]:
        """Indices of the layers that are served: the drafter's only where it is used."""
        return tuple(i for i, counted in enumerate(self.layer_counters) if i in self._attached or counted.calls)

    @property
    def counters(self) -> Counters:
        """Return what all layers did together."""
        return Counters.total(self.layer_counters)

    def check_integrity(self) -> int:
        """Compare tables with each other, and every record in DRAM with its checksums; how many records those were.

        Between steps. IntegrityError where one is not right.
        """
        return sum(self.check_records(index, layer.tier) for index, layer in self._attached.items())

    def check_records(self, index: int, tier: DramTier) -> int:
        """`check_integrity` of the DRAM tier of one layer, by its index in the store."""
        number, checked = self.store.manifest.layers[index].number, 0
        try:
            tier.check_integrity()
            self.staging.check_integrity()
        except AssertionError as error:
            raise IntegrityError(f"layer {number}: the DRAM tier does not agree with itself: {error}") from error
        for expert in map(int, tier.resident):
            if wrong := self.store.problem(index, expert, self.part.of(tier.record(expert)), self.part.first):
                raise IntegrityError(
                    f"layer {number}, expert {expert}: the record in DRAM has {wrong}; this machine's memory is at "
                    "fault, or moetier: do not trust its answers"
                )
            checked += 1
        return checked

    def save_heat(self) -> None:
        """Write heat, which is the same on every rank; a disk that does not take it costs a warning, no more."""
        if self.part.rank:
            return
        try:
            self.heat.save(self.settings.heat_path)
        except OSError as error:
            logger.warning("heat was not saved to %s: %s", self.settings.heat_path, error.strerror)

    def _save_heat_now_and_then(self) -> None:
        while not self._stop.wait(self.settings.heat_save_seconds):
            self.save_heat()

    def at_close(self, last: Callable[[], None]) -> None:
        """Call `last` when the model is closed, before anything ends; whatever those before it raise."""
        self._at_close.append(last)

    def close(self) -> None:
        """Save heat and end every thread; the layers cannot be called any more."""
        if self._stop.is_set():
            return
        self._stop.set()
        try:
            with ExitStack() as stack:
                for last in reversed(self._at_close):
                    stack.callback(last)
        finally:
            self._saver.join()
            self.save_heat()
            self.reader.close()
            self.pool.close()
            self.context.close()

    def __enter__(self) -> TieredModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
