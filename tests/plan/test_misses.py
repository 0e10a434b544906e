"""Missed experts: how often how many, and the division between CPU and link."""

import itertools

import numpy as np
import pytest

from moetier.machine.facts import KernelRate, Rates
from moetier.plan import catalog
from moetier.plan.describe import describe
from moetier.plan.hardware import CALL, hardware_of
from moetier.plan.misses import STAGED, Split, distribution

MODEL = catalog.bundled("deepseek-v4-flash")


def every_subset(chances):
    """Brute force: how likely each number of events is."""
    found = np.zeros(len(chances) + 1)
    for happened in itertools.product((0, 1), repeat=len(chances)):
        found[sum(happened)] += np.prod([c if h else 1 - c for c, h in zip(chances, happened, strict=True)])
    return found


@pytest.mark.parametrize(
    "chances", [[], [0.0], [1.0], [0.3], [0.5, 0.5], [1.0, 0.0, 1.0], [0.9, 0.1, 0.5, 0.02, 0.7]], ids=str
)
def test_distribution_equals_brute_force(chances):
    assert distribution(np.array(chances)) == pytest.approx(every_subset(chances), abs=1e-12)


@pytest.mark.parametrize("chance", [1e-9, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("experts", [1, 128, 1000])
def test_distribution_keeps_sum_and_mean(experts, chance):
    likely = distribution(np.full(experts, chance))
    assert likely.sum() == pytest.approx(1)
    assert likely @ np.arange(likely.size) == pytest.approx(experts * chance, rel=1e-6)


def as_planned(split, records, staged):
    """Every division of `records` tried, as plan_step does: the first that CPU and link end soonest with."""
    best = None
    for streamed in range(min(records, staged) + 1):
        on_cpu, each = records - streamed, split.cpu / (1 - split.slowed) if streamed else split.cpu
        device = split.device + streamed * split.link if streamed else 0.0
        planned = max(split.call + on_cpu * each if on_cpu else 0.0, device)
        if best is None or planned < best[0]:
            best = planned, streamed
    return split.divided(np.array([float(records)]), np.array([float(best[1])]))[0]


@pytest.mark.parametrize("staged", [0, 1, STAGED])
@pytest.mark.parametrize("link", [1e-6, 2e-4, 1.0], ids="link {} s".format)
@pytest.mark.parametrize("slowed", [0.0, 0.15])
def test_the_division_is_the_one_that_the_device_plans(slowed, link, staged):
    split = Split(device=4e-5, call=5e-5, cpu=1.5e-4, link=link, dram=1e-4, slowed=slowed)
    assert split.seconds(50, staged) == pytest.approx([as_planned(split, n, staged) for n in range(51)])


def test_a_divided_call_ends_after_its_slowest_part():
    split = Split(device=4e-5, call=5e-5, cpu=1e-4, link=2e-4, dram=1e-5, slowed=0.2)
    records, streamed = np.array([0.0, 1, 10, 10, 10]), np.array([0.0, 0, 0, 2, 10])
    cpu_beside_the_link_for_a_while = 5e-5 + 8 * 1e-4 + 0.2 * 2 * 2e-4
    all_by_link = 4e-5 + 10 * 2e-4
    wanted = [4e-5, 1.5e-4, 5e-5 + 10 * 1e-4, cpu_beside_the_link_for_a_while, all_by_link]
    assert split.divided(records, streamed) == pytest.approx(wanted)
    dram = Split(device=4e-5, call=5e-5, cpu=1e-4, link=2e-4, dram=5e-4)
    assert dram.divided(records, streamed)[1:] == pytest.approx(records[1:] * 5e-4)


def test_no_miss_is_the_device_alone_and_more_misses_are_never_faster():
    split = Split(device=4e-5, call=5e-5, cpu=1.5e-4, link=2.5e-4, dram=1e-4)
    times = split.seconds(100)
    assert times[0] == split.device
    assert (np.diff(times) >= 0).all()
    assert (split.all_streamed(100) >= split.device).all()


def with_kernel(*rows):
    """A machine with these measured (experts, seconds) of one token."""
    record = MODEL.record_bytes
    rates = tuple(
        KernelRate(
            isa="avx512", threads=14, hidden=4096, intermediate=2048, tokens=1, experts=experts, seconds=seconds,
            bytes_per_s=experts * record / seconds, ops_per_s=1e12, peak_ops_per_s=2e12,
        )
        for experts, seconds in rows
    )  # fmt: skip
    machine = describe("1x32GB", "128GB", memory="100GB/s")
    dram = machine.rates.dram_read
    return machine.model_copy(update={"rates": Rates(identity="measured", dram_read=dram, kernel=rates)})


def test_call_and_rate_come_from_one_expert_and_from_a_tokens_experts():
    each, call = MODEL.record_bytes / 90e9, 60e-6
    found = hardware_of(with_kernel((6, call + 6 * each), (1, call + each)), MODEL.record)
    assert found.cpu_rate.value == pytest.approx(90e9)
    assert found.cpu_call.value == pytest.approx(call)


@pytest.mark.parametrize(
    "rows",
    [((6, 1e-3),), ((1, 2e-4),), ((1, 1e-3), (6, 1e-3)), ((1, 2e-3), (6, 1e-3)), ((1, 1e-9), (6, 1e-3))],
    ids=["a token only", "one expert only", "no difference", "one slower than six", "one in no time"],
)
def test_odd_kernel_rates_give_a_call_and_a_rate_within_reason(rows):
    found = hardware_of(with_kernel(*rows), MODEL.record)
    assert 0 < found.cpu_rate.value <= max(experts * MODEL.record_bytes / seconds for experts, seconds in rows)
    assert 0 < found.cpu_call.value <= 1e-3 or found.cpu_call.value == CALL
