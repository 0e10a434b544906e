"""Where every byte lies: devices, host, disk; and the nearest settings that fit where the wanted ones do not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from moetier.budget import (
    DEVICE_CONTEXT,
    DEVICE_RANKS,
    DEVICE_SHARE,
    GIB,
    SMALL_HOST,
    TABLE_ROWS,
    WORKSPACE_ROWS,
    Budget,
    Item,
    cpu_items,
    device_host_items,
    device_rows,
    host,
)
from moetier.contract import LayerGeometry
from moetier.contract.geometry import BLOCK
from moetier.errors import SettingsError
from moetier.plan.geometry import Geometry
from moetier.plan.hardware import Hardware
from moetier.plan.misses import STAGED
from moetier.settings import Settings

STAGED_IN_DRAM: int = Settings.model_fields["staging_records"].default
"""Records of DRAM for experts that are read and not kept."""


@dataclass(frozen=True)
class Wanted:
    """Values that the user asks for; None: as it fits."""

    context: int
    streams: int = 1
    dram_records: int | None = None
    slots: int | None = None
    residents: int = 0
    """Slots of a layer fixed by heat whose records take no DRAM."""
    kv_format: str | None = None
    tables: str = "auto"
    """auto is disk: in DRAM they bring nothing that can be measured (published: 146 and 145 tokens/s)."""
    chunk: int = 4096
    """Tokens of a prompt that one step takes."""
    draft: bool = False


@dataclass(frozen=True)
class Placement:
    """A decision. Bytes by part; `device` is of each of `ranks` devices. problems: why it does not fit."""

    wanted: Wanted
    ranks: int
    kv_format: str
    slots: int
    """Records of a layer that devices hold together."""
    dram_records: int
    residents: int
    tables: str
    device: dict[str, int]
    device_limit: int
    host: dict[str, int]
    host_limit: int
    disk: dict[str, int]
    problems: tuple[str, ...] = field(default=())

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def covered(self) -> int:
        """Experts of a layer that need no disk: slots and DRAM hold the hottest, and residents are not held twice."""
        return max(self.slots, self.dram_records + min(self.residents, self.slots))


def ranks_of(geometry: Geometry, hardware: Hardware) -> int:
    """Devices that work as one: a power of two, since records are cut in slices of whole blocks."""
    ranks = 1 << (hardware.gpus.bit_length() - 1) if hardware.gpus else 1
    while geometry.intermediate % (BLOCK * ranks):
        ranks //= 2
    return ranks


def place(geometry: Geometry, hardware: Hardware, wanted: Wanted) -> Placement:
    """Put everything somewhere. What does not fit is in `problems`, and `nearest` finds what does."""
    _check(geometry, wanted)
    if wanted.slots and not hardware.gpus:
        raise SettingsError(
            f"slots {wanted.slots}: this machine has no GPU for them; leave --slots out, or name --gpus"
        )
    ranks, problems = ranks_of(geometry, hardware), list[str]()
    kv_format = wanted.kv_format or geometry.kv.default
    device = _device(geometry, hardware, wanted, ranks, kv_format) if hardware.gpus else {}
    limit = int(hardware.gpu_bytes * DEVICE_SHARE)
    slot = geometry.moe_layers * geometry.record_bytes // ranks
    slots = 0
    if hardware.gpus:
        room = Budget(limit, _items(device), geometry.moe_layers, geometry.experts, geometry.record_bytes // ranks)
        slots = room.fit if wanted.slots is None else wanted.slots
        if room.free < 0 or slots > room.fit:
            problems.append(_too_much_device(device, slots * slot, limit))
        device["expert slots"] = slots * slot
    residents = min(wanted.residents, slots)
    host, tables, records = _host(geometry, hardware, wanted, ranks, kv_format, residents, problems)
    disk = {"expert records": geometry.store_bytes}
    if tables == "disk" and geometry.parts.tables:
        disk["tables"] = geometry.parts.tables
    if hardware.disk_bytes is not None and sum(disk.values()) > hardware.disk_bytes:
        problems.append(
            f"the store takes {sum(disk.values()) / GIB:.0f} GiB of disk, {hardware.disk_bytes / GIB:.0f} GiB are free"
        )
    return Placement(
        wanted, ranks, kv_format, slots, records, residents, tables, device, limit, host, hardware.ram_bytes, disk,
        tuple(problems),
    )  # fmt: skip


def _check(geometry: Geometry, wanted: Wanted) -> None:
    if wanted.kv_format is not None and wanted.kv_format not in geometry.kv.formats:
        raise SettingsError(
            f"KV format {wanted.kv_format!r} is none of {geometry.name}: expected {', '.join(geometry.kv.formats)}"
        )
    if not 1 <= wanted.context <= geometry.max_context:
        raise SettingsError(f"context {wanted.context}: expected 1 to {geometry.max_context} tokens of {geometry.name}")
    for name, value in (
        ("dram records", wanted.dram_records),
        ("slots", wanted.slots),
        ("residents", wanted.residents),
    ):
        if value is not None and not 0 <= value <= geometry.experts:
            raise SettingsError(f"{name} {value}: expected 0 to {geometry.experts}, the experts of a layer")
    if wanted.slots is not None and wanted.residents > wanted.slots:
        raise SettingsError(f"{wanted.residents} residents of {wanted.slots} slots; lower --residents")
    if wanted.tables not in ("auto", "dram", "disk"):
        raise SettingsError(f"tables {wanted.tables!r}: expected auto, dram or disk")
    if wanted.draft and geometry.drafter is None:
        raise SettingsError(f"{geometry.name} brings no drafter; leave --draft-tokens out")


def kv_bytes(geometry: Geometry, kv_format: str, ranks: int, context: int, streams: int) -> int:
    """Return the bytes of one rank."""
    size = geometry.kv.formats[kv_format]
    whole = streams * (context * size.bytes_per_token + size.bytes_per_sequence)
    return int(whole / min(ranks, geometry.kv.heads))


def _device(g: Geometry, hardware: Hardware, wanted: Wanted, ranks: int, kv_format: str) -> dict[str, int]:
    """Bytes of one device beside slots."""
    layer = LayerGeometry(g.hidden, max(g.intermediate // ranks // BLOCK, 1) * BLOCK, g.experts, g.top_k)
    parts = {
        "dense weights": g.parts.resident // ranks,
        "KV cache": kv_bytes(g, kv_format, ranks, wanted.context, wanted.streams),
        "workspace": wanted.chunk * g.hidden * WORKSPACE_ROWS + device_rows(layer, wanted.chunk),
        "staging": STAGED * g.record_bytes // ranks,
        "context and graphs": DEVICE_CONTEXT,
    }
    if ranks > 1:
        parts["context and graphs"] += DEVICE_RANKS
    if wanted.draft:
        parts["drafter"] = (g.parts.drafter + g.parts.drafter_experts) // ranks
    return parts


def _items(parts: dict[str, int]) -> tuple[Item, ...]:
    return tuple(Item(name, size) for name, size in parts.items())


def _host(
    g: Geometry, hardware: Hardware, wanted: Wanted, ranks: int, kv_format: str, residents: int, problems: list[str]
) -> tuple[dict[str, int], str, int]:
    """Bytes of the host by part, where the tables are, and records of a layer in DRAM."""
    limit = hardware.ram_bytes
    if hardware.gpus:
        shared, own = device_host_items(ranks)
        parts = {shared.name: ranks * shared.size, f"{ranks} rank{'s' if ranks > 1 else ''}": ranks * own.size}
    else:
        kv_size = kv_bytes(g, kv_format, 1, wanted.context, wanted.streams)
        parts = {item.name: item.size for item in cpu_items(g.parts.resident, kv_size)}
        parts["staging"] = STAGED_IN_DRAM * g.record_bytes
        if wanted.draft:
            parts["drafter"] = g.parts.drafter + g.parts.drafter_experts
    rows = min(TABLE_ROWS, g.parts.tables, limit // 8 if limit < SMALL_HOST else TABLE_ROWS)
    wanted_records = wanted.dram_records
    tables = "disk" if wanted.tables == "auto" else wanted.tables
    if g.parts.tables:
        parts["tables" if tables == "dram" else "rows of tables"] = g.parts.tables if tables == "dram" else rows
    room = host(limit, _items(parts), g.moe_layers, g.experts - residents, g.record_bytes)
    records = room.fit if wanted_records is None else wanted_records
    if room.need(records) > limit:
        problems.append(
            f"the host needs {room.need(records) / GIB:.0f} GiB with {records} records of each "
            f"layer in DRAM and has {limit / GIB:.0f} GiB"
            + (
                f"; what fits is --dram-records {room.most}"
                if room.free >= 0
                else "; it would not fit without any of them"
            )
        )
    parts["expert records"] = room.need(records) - room.other
    return parts, tables, records


def _too_much_device(parts: dict[str, int], slots: int, limit: int) -> str:
    need = sum(parts.values()) + slots
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    tail = f", expert slots {slots / GIB:.1f}" if slots else ""
    return f"a device needs {need / GIB:.1f} GiB ({listed}{tail}) and has {limit / GIB:.1f} GiB"


def nearest(geometry: Geometry, hardware: Hardware, wanted: Wanted) -> Placement | None:
    """The least change of settings that fits: what the user fixed first, then context, streams, chunk and KV format."""
    smallest = min(geometry.kv.formats, key=lambda name: geometry.kv.formats[name].bytes_per_token)
    free = replace(wanted, slots=None, dram_records=None, residents=0, tables="auto")
    steps = [replace(wanted, dram_records=None), replace(wanted, slots=None, residents=0), free]
    steps.append(replace(free, kv_format=smallest))
    shorter = replace(free, kv_format=smallest)
    while shorter.streams > 1:
        shorter = replace(shorter, streams=max(1, shorter.streams // 2))
        steps.append(shorter)
    while shorter.context > 2048:
        shorter = replace(shorter, context=max(2048, shorter.context // 2))
        steps.append(shorter)
    while shorter.chunk > 512:
        shorter = replace(shorter, chunk=shorter.chunk // 2)
        steps.append(shorter)
    if wanted.draft:
        steps.append(replace(shorter, draft=False))
    return next((found for found in (place(geometry, hardware, step) for step in steps) if not found.problems), None)
