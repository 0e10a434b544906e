"""The memory model: what takes bytes of a host or a device beside experts, and how many experts fit into the rest.

The plan, the launch and the plugin name their items here and count with `Budget`; nobody else has a sum of his own.
"""

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
"""Bytes of a vLLM engine process beside weights, KV cache and records: libraries, activations, buffers."""
DEVICE_SHARE = 0.95
"""Share of a device's memory that the engine may take; the driver and fragments have the rest."""
DEVICE_CONTEXT = 3 * GIB
"""Assumed: driver's context, libraries, captured graphs, on each device."""
DEVICE_RANKS = 3 * GIB // 2
"""Bytes of each of several devices besides: buffers of collectives. Published: about 110 slots on four 32 GB cards."""
DEVICE_HEADROOM = 3 * GIB
"""Bytes of a device with its weights that are left to activations, captured graphs and libraries. Assumed."""
WORKSPACE_ROWS = 32
"""Assumed: bytes of the engine's activations for each element of a chunk's hidden rows, beside the experts' rows."""
HOST_SHARED = 5 * GIB
"""Frontend, engine, staging for reads from disk. With HOST_RANK and TABLE_ROWS from the published rows of four cards:
27 GiB beside records and tables, 35 to 39 GiB with tables on disk; how much of it is a rank's is assumed."""
HOST_RANK = 11 * GIB // 2
"""A rank's worker: libraries, the driver's host side, pinned buffers."""
TABLE_ROWS = 9 * GIB
"""Rows of tables that stay in DRAM when the tables are on disk: published, the difference of the first two rows."""
SMALL_HOST = 64 * GIB
"""Hosts below this keep an eighth of their memory for rows of tables."""


@dataclass(frozen=True)
class Item:
    """Something that takes memory beside the experts."""

    name: str
    size: int


@dataclass(frozen=True)
class Budget:
    """Memory of `limit` bytes, of one process: what is no expert's takes `items`, and experts of each layer the rest.

    stride: bytes of an expert. reserve: bytes that are left alone where the user gave no number.
    """

    limit: int
    items: tuple[Item, ...]
    layers: int
    experts: int
    stride: int
    reserve: int = 0

    @property
    def other(self) -> int:
        """Bytes of all items."""
        return sum(item.size for item in self.items)

    @property
    def free(self) -> int:
        """Bytes that the items leave, the reserve among them; negative where they do not fit."""
        return self.limit - self.other

    @property
    def fit(self) -> int:
        """Experts of each layer that fit beside the reserve."""
        return self._into(self.free - self.reserve)

    @property
    def most(self) -> int:
        """Experts of each layer that fit if the reserve is spent too."""
        return self._into(self.free)

    def need(self, experts: int) -> int:
        """Bytes with so many experts of each layer, everything counted."""
        return self.other + experts * self.layers * self.stride

    def _into(self, room: int) -> int:
        return max(0, min(self.experts, room // (self.layers * self.stride)))


def device_rows(geometry: LayerGeometry, tokens: int) -> int:
    """Bytes of a device for the pairs of a call of `tokens`: activations, intermediate values, rows by slice."""
    rows = 1 + (geometry.slices if geometry.slices > 1 else 0)
    return tokens * geometry.top_k * (geometry.hidden * (2 + 4 * rows) + geometry.intermediate * 4)


def reserve_of(limit: int) -> int:
    """Bytes left to the rest of the machine: 20 GiB on large hosts, an eighth on small ones."""
    return min(20 * GIB, limit // 8)


def cpu_items(dense: int, cache: int) -> tuple[Item, ...]:
    """Return what a server without devices takes of the host beside records and staging."""
    return Item("processes", ENGINE_BYTES), Item("dense weights", dense), Item("KV cache", cache)


def device_host_items(ranks: int) -> tuple[Item, ...]:
    """Return what one of `ranks` ranks with devices takes of the host beside records: its own and its part."""
    return Item("processes", HOST_SHARED // ranks), Item("rank", HOST_RANK)


def host(available: int, items: tuple[Item, ...], layers: int, experts: int, stride: int, ranks: int = 1) -> Budget:
    """The budget of one of `ranks` processes that share the memory that is available on a host."""
    return Budget(available // ranks, items, layers, experts, stride, reserve_of(available) // ranks)


def choose(asked: int | None, room: Budget) -> int:
    """Records of each layer in DRAM; SettingsError if they do not fit. asked: None for as many as fit.

    Asking for a number spends the reserve too.
    """
    if room.free < (room.reserve if asked is None else 0):
        raise SettingsError(
            f"too little memory: {gib(room.other)} GiB are needed before any expert is in DRAM (dense weights, KV "
            f"cache, engine, staging), {gib(room.limit)} GiB are available"
            + (f" and {gib(room.reserve)} GiB are left to the machine" if asked is None else "")
            + "; lower --kv-cache-gib or stop other processes"
        )
    if asked is None:
        return room.fit
    if room.need(asked) > room.limit:
        raise SettingsError(
            f"too little memory for {asked} of {room.experts} records of each of {room.layers} layers: that takes "
            f"{gib(room.need(asked))} GiB in all, {gib(room.limit)} GiB are available; what fits is "
            f"--dram-records {room.fit} (or auto)"
        )
    return asked


def choose_slots(asked: int | None, room: Budget) -> int:
    """Slots of each layer on a device; SettingsError if they do not fit. asked: None for as many as fit.

    Asking for a number spends the headroom too.
    """
    slots = room.fit if asked is None else min(asked, room.experts)
    if 1 <= slots <= room.most:
        return slots
    if room.fit < 1:
        raise SettingsError(
            f"slots {'auto' if asked is None else asked}: no slot fits: {gib(room.limit)} GiB are free on the device, "
            f"{gib(room.other + room.reserve)} GiB of them go to the KV cache, activations and staging; "
            "lower --kv-cache-gib or --max-num-batched-tokens"
        )
    raise SettingsError(
        f"slots {slots}: they take {gib(room.need(slots) - room.other)} GiB for {room.layers} layers, "
        f"{gib(room.free - room.reserve)} GiB are left on the device; what fits is --slots {room.fit} (or auto)"
    )


def records_that_fit(
    settings: Settings, store: Store, layers: int, items: tuple[Item, ...] = (), ranks: int = 1
) -> int:
    """Records of each of `layers` layers to keep in DRAM as the settings ask; SettingsError where they do not fit.

    items: what one rank takes beside staging and is not there yet. ranks: processes that share this machine.
    """
    geometry = store.manifest.layer_geometry
    stride = max(Part(geometry, rank, ranks).room for rank in range(ranks))
    items = (*items, Item("staging", settings.staging_records * stride))
    room = host(machine.memory().available, items, layers, geometry.experts, stride, ranks)
    return choose(settings.records_of(room.experts), room)


def gib(size: int) -> str:
    """GiB with two digits, for messages."""
    return f"{size / GIB:.2f}"
