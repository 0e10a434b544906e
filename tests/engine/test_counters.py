"""Counters of layers add up."""

from moetier.engine import Counters


def test_total_and_difference() -> None:
    first, second = Counters(calls=2, hits=3, misses=1, cpu_us=1.5), Counters(calls=1, misses=4, cpu_us=2)
    total = Counters.total([first, second])
    assert total == Counters(calls=3, hits=3, misses=5, cpu_us=3.5)
    assert total.since(first) == second
    assert Counters.total([]) == Counters()


def test_hit_rate() -> None:
    assert Counters(hits=3, misses=1).hit_rate == 0.75
    assert Counters().hit_rate == 1
