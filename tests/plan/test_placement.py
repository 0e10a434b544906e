"""Placement: nothing is counted twice, nothing is left out, and what does not fit is said with what does."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetier.budget import GIB
from moetier.errors import SettingsError
from moetier.plan import catalog
from moetier.plan.describe import describe
from moetier.plan.hardware import hardware_of
from moetier.plan.placement import Wanted, nearest, place
from moetier.plan.planner import Question, make_plan, to_json

V41, V4, AIR, QWEN = (
    catalog.bundled(name) for name in ("deepseek-v4.1-flash", "deepseek-v4-flash", "glm-4.5-air", "qwen3-235b")
)
FOUR = hardware_of(describe("4x32GB", "256GB", "7GB/s"))


def test_records_and_slots_fill_what_is_left():
    p = place(V41, FOUR, Wanted(context=131072))
    layer = V41.moe_layers * V41.record_bytes
    assert p.problems == ()
    assert 0 <= p.device_limit - p.device_bytes < layer / 4
    assert 20 * GIB <= p.host_limit - p.host_bytes < 20 * GIB + layer
    assert p.host["expert records"] == p.dram_records * layer
    assert p.device["expert slots"] == p.slots * layer // 4
    assert p.disk == {"expert records": V41.store_bytes, "tables": V41.parts.tables}


def test_residents_are_not_paid_for_twice():
    big = hardware_of(describe("4x32GB", "1000GB"))
    both = [place(V41, big, Wanted(context=32768, residents=r)) for r in (0, 40)]
    assert [p.dram_records for p in both] == [384, 344]
    assert [p.covered for p in both] == [384, 384]


def test_the_cache_of_one_head_is_on_every_rank_and_heads_are_divided():
    one, four = (hardware_of(describe(f"{n}x96GB", "512GB")) for n in (1, 4))
    asked = Wanted(context=131072)
    assert place(V4, one, asked).device["KV cache"] == place(V4, four, asked).device["KV cache"]
    assert place(QWEN, one, asked).device["KV cache"] == 4 * place(QWEN, four, asked).device["KV cache"]


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_kv_formats_are_an_axis(kv_format):
    p = place(V41, FOUR, Wanted(context=1048576, kv_format=kv_format))
    per_token = V41.kv.formats[kv_format].bytes_per_token
    assert p.device["KV cache"] == pytest.approx(1048576 * per_token, rel=0.01)


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8)])
def test_devices_work_as_a_power_of_two_that_cuts_records_in_whole_blocks(gpus, ranks):
    assert place(V41, hardware_of(describe(f"{gpus}x32GB", "256GB")), Wanted(context=32768)).ranks == ranks


def test_more_ranks_than_heads_keep_copies_of_the_cache():
    four, eight = (hardware_of(describe(f"{n}x96GB", "512GB")) for n in (4, 8))
    asked = Wanted(context=131072)
    assert place(QWEN, four, asked).device["KV cache"] == place(QWEN, eight, asked).device["KV cache"]


def test_without_a_device_all_lies_in_the_host():
    p = place(AIR, hardware_of(describe("none", "128GB")), Wanted(context=32768))
    assert (p.slots, p.device) == (0, {})
    assert p.host["dense weights"] == AIR.parts.resident
    assert p.host["KV cache"] > 0


@pytest.mark.parametrize(
    ("machine", "asked", "problem"),
    [
        (("4x32GB", "64GB"), Wanted(context=32768, dram_records=300), "what fits is --dram-records"),
        (("1x16GB", "256GB"), Wanted(context=1048576, streams=64), "a device needs"),
        (("4x32GB", "256GB"), Wanted(context=32768, slots=384), "a device needs"),
        (("none", "8GB"), Wanted(context=32768), "it would not fit without any of them"),
        (("4x32GB", "448GB"), Wanted(context=32768, dram_records=384, tables="dram"), "the host needs"),
    ],
)
def test_what_does_not_fit_is_said_and_the_nearest_that_fits_is_found(machine, asked, problem):
    described = describe(*machine)
    plan = make_plan(Question(V41, described, asked))
    assert not plan.fits
    assert problem in " ".join(plan.placement.problems)
    if machine[1] == "8GB":
        assert plan.nearest is None
    else:
        assert plan.nearest.fits
        assert to_json(plan)["nearest"]["fits"]


def test_slots_without_a_gpu_are_refused():
    with pytest.raises(SettingsError, match=r"slots 3: this machine has no GPU .*leave --slots out"):
        place(AIR, hardware_of(describe("none", "128GB")), Wanted(context=32768, slots=3))


def test_the_nearest_keeps_what_it_can():
    hardware = hardware_of(describe("4x32GB", "256GB"))
    asked = Wanted(context=524288, dram_records=384, kv_format="fp8_ds_mla")
    found = nearest(V41, hardware, asked).wanted
    assert found == replace(asked, dram_records=None)
    shorter = nearest(QWEN, hardware_of(describe("1x24GB", "512GB")), Wanted(context=262144, kv_format="bf16"))
    assert shorter.kv_format == "fp8"
    assert 2048 <= shorter.wanted.context < 262144


def test_the_store_must_fit_the_disk():
    machine = describe("4x32GB", "256GB", disk_size="300GB")
    assert "of disk" in place(V41, hardware_of(machine), Wanted(context=32768)).problems[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_format": "fp7"}, "fp7"),
        ({"context": 0}, "context"),
        ({"context": 1 << 21}, "context"),
        ({"dram_records": 385}, "dram records 385"),
        ({"slots": -1}, "slots -1"),
        ({"slots": 10, "residents": 11}, "lower --residents"),
        ({"tables": "tape"}, "tape"),
    ],
)
def test_settings_without_a_meaning_are_refused(change, message):
    with pytest.raises(SettingsError, match=message):
        place(V41, FOUR, replace(Wanted(context=32768), **change))


def test_a_model_without_a_drafter_drafts_nothing():
    with pytest.raises(SettingsError, match="no drafter"):
        place(QWEN, FOUR, Wanted(context=32768, draft=True))


@settings(max_examples=60)
@given(
    gpus=st.integers(0, 8), gib=st.sampled_from([8, 16, 24, 32, 96, 180]), ram=st.integers(1, 2048),
    context=st.integers(1, 131072), streams=st.integers(1, 300), model=st.sampled_from([V41, V4, AIR, QWEN]),
)  # fmt: skip
def test_a_plan_that_fits_keeps_its_budgets(gpus, gib, ram, context, streams, model):
    machine = describe(f"{gpus}x{gib}GB" if gpus else "none", f"{ram}GB")
    hardware = hardware_of(machine)
    p = place(model, hardware, Wanted(context=context, streams=streams))
    if p.problems:
        p = nearest(model, hardware, Wanted(context=context, streams=streams))
    if p is not None:
        assert not p.problems
        assert p.device_bytes <= p.device_limit
        assert p.host_bytes <= p.host_limit
        assert 0 <= p.slots <= model.experts
        assert 0 <= p.dram_records <= model.experts
