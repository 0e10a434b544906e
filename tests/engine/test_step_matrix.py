"""No step of any engine disturbs a staging slot: graphs, pieces or eager, guesses or none, prompts or none."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM's dispatcher says which steps are graphs")

from moetier.engine.hybrid import Launch, stream
from moetier.store.build import build_store
from moetier.store.store import Store
from moetier.vllm import steps as vllm_steps
from tests.engine.late import LateLane
from tests.engine.step_bench import GUESSES, MODES, Steps, Way, seen
from tests.store.checkpoints import write_checkpoint

SIZES = [(32, 32), (24, 16), (40, 40)]
"""Tokens that the device plans, and of the largest graph."""
RECORDS = [10, 4]
"""In DRAM, of ten that have no slot: all, so that the host copies ahead between steps too; or some."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("steps")
    write_checkpoint(folder / "model", experts=12, hidden=64, intermediate=32, top_k=3, layers=(1, 2, 3))
    build_store(folder / "model", folder / "store")
    with Store.open(folder / "store") as opened:
        yield opened


def run(store: Store, way: Way, number: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, int]]:
    """Disturbed slots of so many steps, and what took part in them."""
    made: list[Steps] = []
    monkeypatch.setattr(stream, "Lane", lambda device: LateLane(made_of(made)))
    steps = object.__new__(Steps)
    made.append(steps)
    steps.__init__(store, way, seed)  # type: ignore[misc]  # the lane that it makes runs on its streams
    try:
        return steps.run(number), dict(seen(steps))
    finally:
        steps.close()


def made_of(made: list[Steps]) -> Any:
    return made[-1].streams


def matrix(store: Store, each: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, Counter[str]]:
    """Steps, disturbed slots, and what took part, over everything."""
    steps = disturbed = 0
    took = Counter[str]()
    for seed, (mode, guesses, sizes, records) in enumerate(itertools.product(MODES, GUESSES, SIZES, RECORDS)):
        way = Way(mode, guesses, *sizes, records)
        found, part = run(store, way, each, seed, monkeypatch)
        assert not found, f"{way}: {found} staging slots were disturbed"
        assert mode != "eager" or not part["replayed"], way
        disturbed, steps = disturbed + found, steps + each
        took.update(part)
        took[f"replayed, {mode}, {guesses}"] += part["replayed"]
    assert all(took[f"replayed, {mode}, {guesses}"] for mode in MODES for guesses in GUESSES if mode != "eager")
    return steps, disturbed, took


def test_no_step_disturbs_a_staging_slot(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, disturbed, took = matrix(store, 20, monkeypatch)
    assert (steps, disturbed) == (len(MODES) * len(GUESSES) * len(SIZES) * len(RECORDS) * 20, 0)
    assert min(took[name] for name in ("replayed", "by Python", "copies")) > 1000


@pytest.mark.campaign
def test_no_step_of_many_disturbs_a_staging_slot(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, disturbed, took = matrix(store, 850, monkeypatch)
    print(f"{steps} steps, {dict(took)}, {disturbed} slots disturbed")
    assert steps >= 100_000


@pytest.mark.parametrize("mode", ["pieces", "both"])
def test_counting_guesses_among_what_is_scheduled_is_seen(
    store: Store, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The bench finds the fault that the two numbers end."""
    right = vllm_steps.launch_of

    def one_number(scheduled: Any, speculative: Any) -> Launch:
        launch = right(scheduled, speculative)
        return Launch(launch.live, launch.live, launch.drafts)

    monkeypatch.setattr(vllm_steps, "launch_of", one_number)
    found, _ = run(store, Way(mode, "MTP 3", 32, 32), 400, 1, monkeypatch)
    assert found
