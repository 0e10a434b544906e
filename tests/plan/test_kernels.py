"""Layer calls with all experts in slots, as measured on one H200 (docs/device-kernels.md, docs/hybrid.md), predicted.

Copy rate 4.2 TB/s, read and write counted. Where routing is even, each expert is as likely; the other cells follow a
Zipf law of exponent 1, drawn without replacement.
"""

import numpy as np
import pytest

from moetier.plan.costs import costs_of, engine_named
from moetier.plan.describe import describe
from moetier.plan.geometry import Geometry, Parts
from moetier.plan.hardware import hardware_of
from moetier.plan.kernels import FEW_PAIRS, GROUP, STEP, TILE, device_seconds, passes
from moetier.plan.kv import stated


def layer(hidden, intermediate, experts, top_k):
    return Geometry(
        name="one layer", model_type="none", source="tests", layers=1, moe_layers=1, hidden=hidden,
        intermediate=intermediate, experts=experts, top_k=top_k, max_context=4096, parts=Parts(), kv=stated(1e-9),
    )  # fmt: skip


V4_FLASH, V41_FLASH, NANO = layer(4096, 2048, 256, 6), layer(5120, 2304, 256, 6), layer(256, 64, 32, 4)
HARDWARE = hardware_of(describe("1xH200", "128GB", gpu_rate="4200GB/s", pcie="5x16"), V4_FLASH.record)
COSTS = costs_of(HARDWARE, engine_named(None, HARDWARE))
ALL_RESIDENT = COSTS.scaled({"begin": 0.0})
"""Kernels that know no other tier."""


def even(geometry):
    return np.full(geometry.experts, geometry.top_k / geometry.experts)


def drawn(geometry):
    rng = np.random.default_rng(0)
    noise = rng.gumbel(size=(20_000, geometry.experts)) - np.log(np.arange(1, geometry.experts + 1))
    picked = np.argpartition(-noise, geometry.top_k, axis=1)[:, : geometry.top_k]
    return np.bincount(picked.ravel(), minlength=geometry.experts) / len(noise)


ZIPF_US = {1: 28.5, 4: 103.9, 8: 167.2, 32: 778.0}
"""Hybrid steps without a miss, by tokens (54b30e1)."""
EVEN_US = {
    ("V4-Flash", 1): 26.1,
    ("V4-Flash", 8): 201,
    ("V4.1-Flash", 1): 39.2,
    ("V4.1-Flash", 8): 278,
    ("V4-Flash", 4096): 4356,
    ("V4-Flash", 16384): 16410,
}


@pytest.mark.parametrize("tokens", ZIPF_US)
def test_a_hybrid_layer_without_a_miss_is_within_5_percent(tokens):
    found = 1e6 * device_seconds(V4_FLASH, COSTS, drawn(V4_FLASH), tokens, 1)
    assert found == pytest.approx(ZIPF_US[tokens], rel=0.05)


@pytest.mark.parametrize(("model", "tokens"), EVEN_US, ids=lambda part: str(part))
def test_a_layer_of_resident_experts_is_within_8_percent(model, tokens):
    geometry = {"V4-Flash": V4_FLASH, "V4.1-Flash": V41_FLASH}[model]
    found = 1e6 * device_seconds(geometry, ALL_RESIDENT, even(geometry), tokens, 1)
    assert found == pytest.approx(EVEN_US[model, tokens], rel=0.08)


@pytest.mark.parametrize("size", [1, GROUP, STEP, TILE])
@pytest.mark.parametrize("tokens", [1, 3, 22, 192, 4096])
@pytest.mark.parametrize("chances", [even, drawn])
def test_passes_are_those_of_counted_pairs(chances, tokens, size):
    """Of so many draws of each expert's pairs; rounding up is what is told by a law and not counted."""
    likely = np.minimum(chances(V4_FLASH), 1.0)
    pairs = np.random.default_rng(1).binomial(tokens, likely, (400, likely.size))
    counted = np.ceil(pairs / size).sum(1).mean()
    assert passes(likely, tokens, size) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("geometry", [V4_FLASH, NANO], ids=["V4-Flash", "nano"])
@pytest.mark.parametrize("costs", [COSTS, ALL_RESIDENT], ids=["hybrid", "all resident"])
def test_more_tokens_never_take_less(costs, geometry, ranks):
    counts = (1, 2, 3, 8, FEW_PAIRS // geometry.top_k, FEW_PAIRS // geometry.top_k + 1, 64, 512, 4096)
    times = [device_seconds(geometry, costs, even(geometry), tokens, ranks) for tokens in counts]
    assert times == sorted(times)


@pytest.mark.parametrize("tokens", [1, 8, 4096])
@pytest.mark.parametrize("chances", [np.zeros(0), np.zeros(5)], ids=["no slot", "never routed to"])
def test_no_expert_takes_no_time(chances, tokens):
    assert device_seconds(V4_FLASH, COSTS, chances, tokens, 1) == 0


@pytest.mark.parametrize("tokens", [1, 8, 64, 4096])
def test_no_call_is_faster_than_its_bytes(tokens):
    touched = (1 - (1 - even(V4_FLASH)) ** tokens).sum()
    floor = touched * V4_FLASH.record_bytes / COSTS.gpu_rate.value
    assert device_seconds(V4_FLASH, COSTS, even(V4_FLASH), tokens, 1) > floor
