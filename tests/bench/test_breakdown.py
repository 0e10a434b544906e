"""Parts of a decode step and hits by tier: from counters that fit together, else not at all."""

from __future__ import annotations

import pytest

from moetier_bench.breakdown import CALLS, KERNELS, REST, STEPS, WAITED, hit_point, steps_of, steps_plot
from moetier_bench.plots import plots_of
from moetier_bench.result import Result
from tests.bench.made import made

LAYERS = 4


def counted(steps: float, kernels: float, waited: float) -> dict[str, float]:
    """Counters of so many steps, with microseconds of each layer call."""
    calls = steps * LAYERS
    return {STEPS: steps, CALLS: calls, KERNELS: kernels * calls, WAITED: waited * calls}


def result(slots: int = 0, kernels: float = 500.0) -> Result:
    """Two levels of one trial each: 100 steps in a second, of which the layers' kernels take 4 * 0.5 ms."""
    whole = made()
    decode = whole.sections[0]
    trials = tuple(
        trial.model_copy(update={"seconds": 1.0, "counters": counted(100, kernels, 250)})
        for trial in decode.raw.trials[::5]
    )
    section = decode.model_copy(update={"raw": decode.raw.model_copy(update={"trials": trials})})
    serve = whole.recipe.serve.model_copy(update={"settings": {"slots": slots}})
    placed = {"device slots": 8, "DRAM": 24, "all": 32} if slots else {"DRAM": 8, "disk": 24, "all": 32}
    share = whole.cells["decode.C1"].model_copy(update={"name": "tiers.hit_share", "value": 0.5})
    return whole.model_copy(
        update={
            "sections": (section,),
            "recipe": whole.recipe.model_copy(update={"serve": serve}),
            "counters_after": counted(1000, 1, 1),
            "served": whole.served.model_copy(update={"placed": placed}),
            "boot": (share,),
        }
    )


def test_parts_of_a_step_on_the_cpu() -> None:
    steps = steps_of(result())
    assert [step.level for step in steps] == [1, 2]
    for step in steps:
        assert step.total == pytest.approx(10)
        assert [*step.parts.values()] == pytest.approx([2.0, 1.0, 7.0])


def test_with_slots_only_what_the_device_waits_for_is_the_steps() -> None:
    (step, _) = steps_of(result(slots=8))
    assert [*step.parts.values()] == pytest.approx([1.0, 9.0])


def test_counters_that_contradict_each_other_give_none() -> None:
    assert steps_of(result(kernels=5000)) == []
    assert steps_of(made()) == [], "a server that counts no layer calls"


@pytest.mark.parametrize("slots", [0, 8])
def test_hits_by_what_is_in_the_fastest_tier(slots: int) -> None:
    assert hit_point(result(slots)) == (25.0, 50.0)
    assert hit_point(made()) is None


def test_the_bars_are_as_high_as_the_parts() -> None:
    svg = steps_plot("a & b", {"x": steps_of(result()), "y": [], "z": steps_of(result(slots=8))})
    assert svg is not None
    assert "a &amp; b" in svg
    assert svg.count("<rect") == 1 + 4 + 2 * 3 + 2 * 2, "background, legend, two bars of three parts, two of two"
    assert "y</text>" not in svg.split("a: ")[1][:20]


def test_pictures_of_results() -> None:
    assert {"steps", "hits"} <= plots_of([result()]).keys()
    assert not {"steps", "hits"} & plots_of([made()]).keys()
    assert REST in plots_of([result()])["steps"]


def test_counters_beyond_all_measure_make_no_step() -> None:
    whole = result().model_copy(update={"counters_after": {STEPS: 1e-300, CALLS: 1e308}})
    assert steps_of(whole) == []
