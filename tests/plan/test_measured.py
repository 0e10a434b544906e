"""Layers of V4-Flash's sizes on one H200, as benchmarks/hybrid/run.py measured them (docs/hybrid.md), predicted.

The rates of a miss are those that the server measured at its start; DRAM read 91 to 105 GB/s in the same run, so a
figure of its own is off by up to a tenth. Routing is a Zipf law of exponent 1, drawn without replacement.
"""

import statistics
from dataclasses import replace

import numpy as np
import pytest

from moetier.plan import catalog
from moetier.plan.costs import COMMON, costs_of, engine_named
from moetier.plan.describe import describe
from moetier.plan.geometry import Geometry, Parts
from moetier.plan.hardware import Known, hardware_of
from moetier.plan.kv import stated
from moetier.plan.placement import Wanted, place
from moetier.plan.predict import Case, chunk_seconds, decode_parts
from moetier.plan.workload import Workload

LAYER = Geometry(
    name="one layer", model_type="none", source="tests", layers=1, moe_layers=1, hidden=4096, intermediate=2048,
    experts=256, top_k=6, max_context=4096, parts=Parts(), kv=stated(1e-9),
)  # fmt: skip
MISS_US = {"cpu_call": 54.7, "cpu_rate": 159.2, "link_rate": 251.9, "dram_rate": 147.5}
"""Microseconds: of a call, and of one record by CPU, by link and out of DRAM."""
MEASURED = {
    4: {1: 533, 4: 1749, 8: 3267, 32: 9840},
    12: {1: 364, 4: 1046, 8: 2254, 32: 7323},
    29: {1: 231, 4: 733, 8: 1305, 32: 4743},
    43: {1: 177, 4: 568, 8: 908, 32: 3427},
}
"""Per cent in slots, tokens: microseconds of a layer."""
MISSES = {0: 40.9, 1: 239.6, 2: 391.9}
"""One token, all computed by the CPU: microseconds of a layer with so many misses."""


@pytest.fixture(scope="module")
def costs():
    hardware = hardware_of(describe("1xH200", "128GB", gpu_rate="4200GB/s", pcie="5x16"), LAYER.record)
    known = costs_of(hardware, engine_named(None, hardware)).scaled({"layer": 0.0, "step": 0.0, "host": 0.0})
    rates = {name: LAYER.record_bytes / us * 1e6 for name, us in MISS_US.items() if name != "cpu_call"}
    rates["cpu_call"] = MISS_US["cpu_call"] / 1e6
    return hardware, replace(known, **{name: Known(value, 0.05, "measured") for name, value in rates.items()})


@pytest.fixture(scope="module")
def drawn():
    rng = np.random.default_rng(0)
    noise = rng.gumbel(size=(20_000, LAYER.experts)) - np.log(np.arange(1, LAYER.experts + 1))
    picked = np.argpartition(-noise, LAYER.top_k, axis=1)[:, : LAYER.top_k]
    counts = np.bincount(picked.ravel(), minlength=LAYER.experts) / len(noise)
    return Workload("zipf", "drawn", np.sort(counts)[::-1], 1)


def microseconds(costs, work, slots, tokens):
    """Of one layer without spare slots, so nothing is filled."""
    hardware, known = costs
    placement = place(LAYER, hardware, Wanted(context=256, slots=slots, dram_records=LAYER.experts))
    parts = decode_parts(Case(LAYER, hardware, placement, work), known, tokens)
    return 1e6 * sum(took for name, took in parts.items() if name != "fills of slots")


@pytest.mark.parametrize("share", MEASURED)
@pytest.mark.parametrize("tokens", [1, 4, 8, 32])
def test_a_layer_is_within_15_percent(costs, drawn, share, tokens):
    predicted = microseconds(costs, drawn, round(share / 100 * LAYER.experts), tokens)
    assert predicted == pytest.approx(MEASURED[share][tokens], rel=0.15)


def test_half_of_the_layers_are_within_5_percent(costs, drawn):
    errors = [
        abs(microseconds(costs, drawn, round(share / 100 * LAYER.experts), tokens) / measured - 1)
        for share, row in MEASURED.items()
        for tokens, measured in row.items()
    ]
    assert statistics.median(errors) < 0.05


@pytest.mark.parametrize("misses", MISSES)
def test_one_token_with_known_misses_is_within_10_percent(costs, misses):
    hardware, known = costs
    chances = np.zeros(LAYER.experts)
    chances[:64], chances[64 : 64 + misses] = (LAYER.top_k - misses) / 64, 1.0
    no_link = known.scaled({"link_rate": 1e-6})
    predicted = microseconds((hardware, no_link), Workload("exact", "exact", chances, 1), 64, 1)
    assert predicted == pytest.approx(MISSES[misses], rel=0.10)


def test_the_measured_run_is_what_the_costs_say_of_cpu_and_link_together():
    """docs/plan.md names the figure: 43 % in slots, 32 tokens, 26.7 misses in 3,427 us."""
    together = 26.7 * LAYER.record_bytes / 3427e-6
    alone = LAYER.record_bytes / (MISS_US["dram_rate"] / 1e6)
    assert together / alone == pytest.approx(COMMON["together"].value, rel=COMMON["together"].spread)


PREFILL_MS = {
    (100, 8192): 80.4,
    (100, 4096): 39.5,
    (43, 8192): 89.4,
    (43, 4096): 83.4,
    (25, 8192): 108.0,
    (25, 4096): 107.4,
}
"""Per cent in slots, tokens of one prompt: milliseconds of 6 layers of Qwen3-235B's sizes, 64 staging slots, a link of
55.2 GB/s (benchmarks/hybrid/prefill.py). It is a stack of layers, without an engine, embedding and head."""


@pytest.mark.parametrize(("share", "tokens"), PREFILL_MS)
def test_a_prompt_through_six_layers_is_within_10_percent(share, tokens):
    whole = catalog.bundled("qwen3-235b")
    part = 6 / whole.layers
    kept = {"attention": int(whole.parts.attention * part), "router": int(whole.parts.router * part)}
    six = whole.model_copy(
        update={
            "layers": 6,
            "moe_layers": 6,
            "parts": Parts(**kept),
            "kv": whole.kv.model_copy(update={"pair_macs": int(whole.kv.pair_macs * part)}),
        }
    )
    hardware = hardware_of(describe("1xH200", "128GB", memory="123GB/s", pcie="5x16"), six.record)
    costs = costs_of(hardware, engine_named(None, hardware)).scaled({"layer": 0.0, "step": 0.0})
    costs = replace(costs, link_rate=Known(55.2e9, 0.05, "measured"))
    slots = round(share / 100 * six.experts)
    placement = place(six, hardware, Wanted(context=8192, slots=slots, dram_records=six.experts, chunk=tokens))
    even = Workload("mixed", "every expert is routed to", np.full(six.experts, six.top_k / six.experts), tokens)
    predicted = 1e3 * chunk_seconds(Case(six, hardware, placement, even), costs, tokens)
    assert predicted == pytest.approx(PREFILL_MS[share, tokens], rel=0.10)
