"""One memory model: what the plan decides, the launch passes on and the plugin finds room for is one number."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from moetier import budget
from moetier.amounts import amount_of
from moetier.budget import (
    DEVICE_CONTEXT,
    DEVICE_HEADROOM,
    ENGINE_BYTES,
    GIB,
    Budget,
    Item,
    choose_slots,
    device_rows,
    records_that_fit,
)
from moetier.contract import LayerGeometry, RecordLayout
from moetier.errors import SettingsError
from moetier.launch.command import ServeRequest
from moetier.launch.place import place as launch_place
from moetier.machine.limits import Memory
from moetier.plan import catalog
from moetier.plan.describe import describe
from moetier.plan.hardware import hardware_of
from moetier.plan.headers import folder_headers
from moetier.plan.placement import Wanted, kv_bytes, place
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.store import Store

MIB = 2**20
MODELS = [catalog.bundled(name) for name in ("gpt-oss-120b", "glm-4.5-air", "qwen3-235b", "qwen3-next-80b")]
MACHINES = 200


def _asked(random: Random) -> str | int:
    return random.choice(["auto", f"{random.randint(0, 100)}%", f"{random.uniform(0, 99):.2f}%", random.randint(0, 32)])


@pytest.fixture(scope="module")
def served(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Checkpoint, Store]]:
    """The bundled model and its store, whose tensors and records are what is counted."""
    folder = tmp_path_factory.mktemp("budget") / "store"
    build_store(nano, folder)
    with Store.open(folder) as store:
        yield Checkpoint.open(nano), store


@pytest.mark.parametrize("seed", range(MACHINES))
def test_plan_launch_and_plugin_say_one_number(
    seed: int, nano: Path, served: tuple[Checkpoint, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is near what the model needs, so that any number of experts may fit."""
    random, (checkpoint, store) = Random(seed), served
    geometry = folder_headers(nano).geometry()
    asked, context = _asked(random), random.choice([256, 1024, 2048])
    cache = kv_bytes(geometry, "bf16", 1, context, 1)
    staging = Settings.model_fields["staging_records"].default * geometry.record_bytes
    rest = ENGINE_BYTES + cache + geometry.parts.resident + staging
    experts = geometry.moe_layers * geometry.experts * geometry.record_bytes
    ram = int((rest + random.uniform(-0.2, 1.2) * experts) * random.choice([1, 8 / 7]))  # with the reserve, or without
    monkeypatch.setattr(budget.machine, "memory", lambda: Memory(random.randint(1, 4) * ram, ram))
    amount = amount_of(str(asked), "--dram-records", geometry.experts)
    wanted = Wanted(context=context, dram_records=amount, kv_format="bf16")
    planned = place(geometry, replace(hardware_of(describe("none", "64GB")), ram_bytes=ram), wanted)

    settings = Settings.parse({"store": store.path, "dram_records": asked})
    request = ServeRequest(nano, settings, kv_cache_gib=cache / GIB)
    # The plan goes without a record where only the reserve is left; the launch says so.
    if planned.problems or (asked == "auto" and planned.dram_records == 0):
        with pytest.raises(SettingsError, match="too little memory"):
            launch_place(checkpoint, store, request, (0,))
        return
    launched, _ = launch_place(checkpoint, store, request, (0,))
    assert launched == planned.dram_records
    passed_on = settings.model_copy(update={"dram_records": launched})
    assert records_that_fit(passed_on, store, geometry.moe_layers) == launched


@pytest.mark.parametrize("seed", range(MACHINES))
def test_slots_of_the_plan_are_those_of_the_plugin(seed: int) -> None:
    random = Random(seed)
    g, card = random.choice(MODELS), random.choice([24, 32, 48, 80, 96])
    hardware = hardware_of(describe(f"{random.choice([1, 2, 4])}x{card}GB", f"{random.randint(96, 512)}GB"))
    planned = place(g, hardware, Wanted(context=4096, slots=random.choice([None, random.randint(1, 64)])))
    if planned.problems or not planned.slots:
        return
    layer = LayerGeometry(g.hidden, g.intermediate // planned.ranks, g.experts, g.top_k)
    stride = RecordLayout.of(layer).stride
    free = int(hardware.gpu_bytes) - planned.device["dense weights"] - DEVICE_CONTEXT // 2
    items = (
        Item("workspace", device_rows(layer, planned.wanted.chunk)),
        Item("KV cache", planned.device["KV cache"]),
        Item("staging", Settings.model_fields["staging_slots"].default * stride),
    )
    room = Budget(free, items, g.moe_layers, g.experts, stride, DEVICE_HEADROOM)
    assert choose_slots(planned.slots, room) == planned.slots


def test_a_budget_is_the_sum_of_its_items() -> None:
    room = Budget(
        100 * GIB, (Item("a", 20 * GIB), Item("b", 30 * GIB)), layers=2, experts=8, stride=4 * GIB, reserve=GIB
    )
    assert (room.other, room.free, room.fit, room.most, room.need(6)) == (50 * GIB, 50 * GIB, 6, 6, 98 * GIB)
