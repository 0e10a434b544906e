"""Prediction: more of anything that helps never hurts, bands hold their value, and parts add up."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from moetier.errors import SettingsError
from moetier.machine.facts import DiskRate, GpuRate, KernelRate, Rates
from moetier.plan import catalog
from moetier.plan.calibration import read_measured
from moetier.plan.costs import costs_of, engine_named
from moetier.plan.describe import describe
from moetier.plan.hardware import MEASURED, hardware_of
from moetier.plan.placement import Wanted, place
from moetier.plan.planner import Question, make_plan
from moetier.plan.predict import Case, Draft, band, decode_parts, decode_rate, draft_parts, metrics, ttft
from moetier.plan.workload import NAMED, POLICY, Workload, hit_rate, named, of, zipf
from moetier.plan.workload import routed as routed_to
from moetier.tiers.step import Step
from moetier.trace.record import Trace, TracedCall, TraceHeader, write_trace
from moetier.trace.simulate import hit_rate as simulated
from moetier_bench.samples import figure

V41 = catalog.bundled("deepseek-v4.1-flash")


def case_of(gpus="4x32GB", ram="256GB", disk="7GB/s", workload="mixed", geometry=V41, **asked):
    hardware = hardware_of(describe(gpus, ram, disk), geometry.record)
    placement = place(geometry, hardware, Wanted(**({"context": 32768} | asked)))
    case = Case(geometry, hardware, placement, named(workload, geometry.experts, geometry.top_k))
    return case, costs_of(hardware, engine_named(None, hardware))


@pytest.mark.parametrize("experts", [8, 128, 384, 512])
@pytest.mark.parametrize("top_k", [1, 4, 8])
@pytest.mark.parametrize("skew", [0.0, 0.5, 1.2, 3.0, 24.0, 300.0])
def test_chances_sum_to_top_k_and_none_is_above_one(experts, top_k, skew):
    chances = zipf(experts, top_k, skew)
    assert chances.sum() == pytest.approx(top_k)
    assert chances.max() <= 1
    assert (np.diff(chances) <= 0).all()


def test_stated_hit_rates_are_the_published_ones():
    assert hit_rate(110, 384, "mixed", 6) == pytest.approx(0.875, abs=0.01)
    short = named("short", 384, 6)
    assert 40 * short.any_missed(110, 1) == pytest.approx(10, abs=0.5)


@pytest.mark.parametrize("name", NAMED)
def test_hit_rate_rises_with_slots_to_one(name):
    rates = [hit_rate(slots, 384, name) for slots in (0, 1, 10, 100, 383, 384)]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0, pytest.approx(1))


def test_rows_touch_at_most_all_experts():
    work = named("mixed", 384, 6)
    assert routed_to(work.chances, 1).sum() == pytest.approx(6)
    assert routed_to(work.chances, 1e6).sum() == pytest.approx(384)
    assert work.missed(384, 100) == 0


def test_a_host_that_is_slower_than_the_device_takes_longer_for_more_sequences():
    case, costs = case_of()
    slow = costs.scaled({"host": 1000})
    one, many = (sum(decode_parts(case, slow, streams).values()) for streams in (1, 32))
    assert one == pytest.approx(slow.host.value + slow.step.value + slow.sequence.value)
    assert many - one == pytest.approx(31 * costs.sequence.value)
    assert costs.sequence.value > 0


def test_a_streamed_expert_is_computed_like_one_in_a_slot():
    """Where a copy costs nothing, all that a missed expert costs is what the device computes."""
    parts = []
    for slots in (8, 384):
        case, costs = case_of("1x192GB", "512GB", slots=slots, dram_records=384, context=4096)
        free = costs.scaled({"link_rate": 1e6, "dram_rate": 1e6, "cpu_rate": 1e-6})
        parts.append(decode_parts(case, free, 1))
    few, every = parts
    assert every["missed experts"] == pytest.approx(0)
    assert few["missed experts"] > 0.3 * every["experts in slots"]
    assert few["experts in slots"] + few["missed experts"] == pytest.approx(every["experts in slots"], rel=1e-3)


@pytest.mark.parametrize("workload", NAMED)
@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"dram_records": 120}, {"dram_records": 280}),
        ({"slots": 20}, {"slots": 110}),
        ({"disk": "3GB/s"}, {"disk": "14GB/s"}),
        ({"gpus": "1x32GB", "ram": "512GB"}, {"gpus": "4x32GB", "ram": "512GB"}),
        ({"ram": "96GB"}, {"ram": "384GB"}),
    ],
)
def test_more_is_never_slower(workload, less, more):
    slow, fast = (metrics(*case_of(workload=workload, **change)) for change in (less, more))
    assert fast["decode_tok_s"] >= slow["decode_tok_s"]
    assert fast["ttft_16k_s"] <= slow["ttft_16k_s"]
    assert fast["prefill_tok_s"] >= slow["prefill_tok_s"]


def test_parts_are_seconds_that_add_up():
    case, costs = case_of()
    parts = decode_parts(case, costs)
    assert all(seconds >= 0 for seconds in parts.values())
    assert decode_rate(case, costs) == pytest.approx(1 / sum(parts.values()))


def test_streams_share_a_step_but_not_for_free():
    case, costs = case_of()
    one, eight = decode_rate(case, costs, 1), decode_rate(case, costs, 8)
    assert one < eight < 8 * one


def test_a_draft_pays_only_if_enough_of_it_is_accepted():
    case, costs = case_of(draft=True)
    plain = decode_rate(case, costs)
    none, most = (decode_rate(replace(case, draft=Draft(5, accepted)), costs) for accepted in (1.0, 6.0))
    assert none < plain < most
    assert draft_parts(case, costs, 1, Draft(5, 1.0))["drafter"] > 0


def test_longer_prompts_take_longer():
    case, costs = case_of()
    times = [ttft(case, costs, tokens) for tokens in (1, 512, 2048, 4097, 16384, 131072)]
    assert times == sorted(times)
    assert times[0] < 1 < times[-1]


@pytest.mark.parametrize("gpus", ["none", "1x24GB", "4x32GB", "8x180GB"])
@pytest.mark.parametrize("name", catalog.names())
def test_every_model_on_every_machine_has_finite_numbers_within_their_bands(gpus, name):
    plan = make_plan(Question(catalog.bundled(name), describe(gpus, "2000GB", "7GB/s"), Wanted(context=8192)))
    for value, low, high in plan.metrics.values():
        assert all(map(math.isfinite, (value, low, high)))
        assert 0 <= low <= value <= high


def test_all_in_slots_misses_nothing():
    case, costs = case_of(gpus="8x180GB", ram="512GB")
    assert case.placement.slots == 384
    parts = decode_parts(case, costs)
    assert parts["missed experts"] == parts["experts from disk"] == parts["handover"] == 0


def test_bands_are_narrower_where_rates_were_measured():
    described = describe("1x32GB", "256GB", "7GB/s")
    rates = Rates(
        identity="x",
        kernel=(
            KernelRate(
                isa="avx512", threads=16, hidden=5120, intermediate=2304, tokens=1, experts=6, seconds=1e-3,
                bytes_per_s=2e11, ops_per_s=1e12, peak_ops_per_s=1e13,
            ),
        ),
        host_to_device=(GpuRate(gpu=0, bytes_per_s=5e10),),
        device_copy=(GpuRate(gpu=0, bytes_per_s=8e11),),
        disk_read=(DiskRate(queue_depth=8, record_bytes=18800640, bytes_per_s=7e9),),
    )  # fmt: skip
    measured = described.model_copy(update={"rates": rates, "identity": "x"})
    widths = []
    for machine in (described, measured):
        hardware = hardware_of(machine, V41.record)
        case = Case(V41, hardware, place(V41, hardware, Wanted(context=32768)), named("mixed", 384, 6))
        _, low, high = band(case, costs_of(hardware, engine_named(None, hardware)))["decode_tok_s"]
        widths.append(math.log(high / low))
    assert hardware_of(measured).cpu_rate.spread == MEASURED
    assert widths[1] < widths[0]


def routed(rng, steps, prefill=False):
    """Calls of 2 layers of 16 experts, top-2, the low ids hot."""
    weights = 1.0 / np.arange(1, 17) ** 1.5
    for _ in range(steps):
        for layer in range(2):
            ids = rng.choice(16, 2, replace=False, p=weights / weights.sum())
            yield TracedCall(layer, Step(1, prefill), ids.astype(np.int32)[None])


def small_geometry():
    return V41.model_copy(update={"experts": 16, "top_k": 2, "layers": 2, "moe_layers": 2})


def test_a_trace_gives_its_replayed_hit_rate(tmp_path):
    path = tmp_path / "t.trace"
    write_trace(path, TraceHeader(2, 16, 2, "0" * 64), routed(np.random.default_rng(0), 400))
    work = of(str(path), small_geometry())
    assert work.hit_rate(6) == simulated(Trace.open(path), 6, POLICY)
    assert work.missed(6, 1) == pytest.approx(2 * (1 - work.hit_rate(6)))
    assert routed_to(work.chances, 1).sum() == pytest.approx(2)
    assert POLICY in work.source
    assert isinstance(work.bent(1.1), Workload)


@pytest.mark.parametrize("case", ["other model", "only prompts", "no trace", "absent"])
def test_traces_that_tell_nothing_are_refused(case, tmp_path):
    path = tmp_path / "t.trace"
    if case == "no trace":
        path.write_bytes(b"something else")
    elif case != "absent":
        write_trace(path, TraceHeader(2, 16, 2, "0" * 64), routed(np.random.default_rng(0), 50, case == "only prompts"))
    with pytest.raises(SettingsError):
        of(str(path), V41 if case == "other model" else small_geometry())


def test_a_benchmarks_result_is_read_by_its_cells(tmp_path):
    cells = [figure("decode.C1", "tok/s", "higher", [80, 84, 90]), figure("decode.C8", "tok/s", "higher", [300.0])]
    cells += [figure("ttft.2048", "s", "lower", [1.1]), figure("ttft.65536", "s", "lower", [], "too long")]
    result = {"format": 1, "boot": [figure("boot.start", "s", "lower", [95.0]).model_dump()]}
    result["sections"] = [{"probe": {}, "cells": [cell.model_dump() for cell in cells]}]
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    alone = {"start_s": 95.0, "decode_tok_s": 84.0, "ttft_2048_s": 1.1}
    assert read_measured(path) == alone
    assert read_measured(path, 8) == alone | {"decode_streams_tok_s": 300.0}


@pytest.mark.parametrize(
    "content", ["", "[1]", "{}", '{"decode_tok_s": -1}', '{"decode_tok_s": true}', '{"sections": 3}']
)
def test_results_that_tell_nothing_are_refused(content, tmp_path):
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(SettingsError, match="expected"):
        read_measured(tmp_path / "r.json")


def test_a_curve_is_surer_for_its_own_model_and_surest_in_a_trace(tmp_path):
    path = tmp_path / "t.trace"
    small = small_geometry()
    write_trace(path, TraceHeader(2, 16, 2, "0" * 64), routed(np.random.default_rng(0), 200))
    machine, asked = describe("1x32GB", "64GB", "7GB/s"), Wanted(context=1024, slots=4)
    other = small.model_copy(update={"model_type": "another"})
    questions = (
        Question(small, machine, asked, str(path)),
        Question(small, machine, asked),
        Question(other, machine, asked),
    )
    spreads = [make_plan(question).costs.skew.spread for question in questions]
    assert spreads == sorted(set(spreads))
