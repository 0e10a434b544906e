"""How many records of each layer fit in DRAM, decided before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from moetier.contract import LayerGeometry
from moetier.errors import SettingsError
from moetier.machine import limits as machine
from moetier.settings import Settings
from moetier.store.store import Store
from moetier.tiers.part import Part

GIB = 2**30
ENGINE_BYTES = 3 * GIB
"""What a vLLM engine process takes beside weights, KV cache and records: libraries, activations, buffers."""


def device_rows(geometry: LayerGeometry, tokens: int) -> int:
    """Bytes of a device for the pairs of a call of `tokens`: activations, intermediate values, rows by slice."""
    rows = 1 + (geometry.slices if geometry.slices > 1 else 0)
    return tokens * geometry.top_k * (geometry.hidden * (2 + 4 * rows) + geometry.intermediate * 4)


@dataclass(frozen=True)
class Budget:
    """Bytes of host memory. `other` is everything that is not a record of a layer's own."""

    available: int
    reserve: int
    other: int
    layers: int
    experts: int
    stride: int

    @property
    def records(self) -> int:
        """Records per layer that fit, at most all of them; negative if it does not fit without any."""
        room = self.available - self.reserve - self.other
        return min(self.experts, room // (self.layers * self.stride))

    def need(self, records: int) -> int:
        """Bytes that `records` per layer take, everything counted."""
        return self.other + records * self.layers * self.stride


def reserve_of(limit: int) -> int:
    """Bytes left to the rest of the machine: 20 GiB on large hosts, an eighth on small ones."""
    return min(20 * GIB, limit // 8)


def budget(settings: Settings, store: Store, layers: int, other: int, ranks: int = 1) -> Budget:
    """Memory of this machine against `layers` layers of this store.

    other: bytes of dense weights, KV cache and engine, of one rank. ranks: processes that share this machine, each with
    its part of every record; the budget is that of one.
    """
    memory = machine.memory()
    stride = max(Part(store.manifest.layer_geometry, rank, ranks).room for rank in range(ranks))
    return Budget(
        available=memory.available // ranks,
        reserve=reserve_of(memory.limit) // ranks,
        other=other + settings.staging_records * stride,
        layers=layers,
        experts=store.manifest.layer_geometry.experts,
        stride=stride,
    )


def records_that_fit(settings: Settings, store: Store, layers: int, other: int = 0, ranks: int = 1) -> int:
    """Records per layer to keep in DRAM as the settings ask; SettingsError if they do not fit, saying what does."""
    room = budget(settings, store, layers, other, ranks)
    asked = settings.records_of(room.experts)
    return choose(asked, room)


def choose(asked: int | None, room: Budget) -> int:
    """asked: records per layer, None for as many as fit. Asking for a number spends the reserve too."""
    if room.need(0) > room.available - (room.reserve if asked is None else 0):
        raise SettingsError(
            f"too little memory: {_gib(room.need(0))} GiB are needed before any expert is in DRAM (dense weights, KV "
            f"cache, engine, staging), {_gib(room.available)} GiB are available"
            + (f" and {_gib(room.reserve)} GiB are left to the machine" if asked is None else "")
            + "; lower --kv-cache-gib or stop other processes"
        )
    if asked is None:
        return max(room.records, 0)
    if room.need(asked) > room.available:
        raise SettingsError(
            f"too little memory for {asked} of {room.experts} records of each of {room.layers} layers: that takes "
            f"{_gib(room.need(asked))} GiB in all, {_gib(room.available)} GiB are available; what fits is "
            f"--dram-records {max(room.records, 0)} (or auto)"
        )
    return asked


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
