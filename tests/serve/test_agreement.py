"""Ranks that differ, or of which one cannot serve, all stop with the reason."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetier.errors import MoetierError, SettingsError, StoreError
from moetier.launch.command import cpus_of_rank, tensor_parallel_size
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.store.store import Store
from moetier.vllm.agreement import Facts, Voice, agree
from tests.store.checkpoints import write_checkpoint

FACTS = Facts("0.1", "int8x", "{}", "aa", "{}", 4)


def together(*says: Callable[[], tuple[Facts, int]]) -> list[int | MoetierError]:
    """Every rank in a thread of its own; a collective that one does not reach would never end."""
    ranks = len(says)
    barrier, voices = threading.Barrier(ranks, timeout=300), [Voice()] * ranks
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        def gather(mine: Voice) -> Sequence[Voice]:
            voices[rank] = mine
            barrier.wait()
            return voices

        try:
            results[rank] = agree(says[rank], gather)
        except MoetierError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def fails(error: MoetierError) -> Callable[[], tuple[Facts, int]]:
    def say() -> tuple[Facts, int]:
        raise error

    return say


def test_ranks_that_agree_take_what_all_have_room_for() -> None:
    assert together(lambda: (FACTS, 9), lambda: (FACTS, 7), lambda: (FACTS, 8)) == [7, 7, 7]


@pytest.mark.parametrize("failing", [0, 1])
def test_rank_that_cannot_serve_stops_all(failing: int) -> None:
    says: list[Callable[[], tuple[Facts, int]]] = [lambda: (FACTS, 9), lambda: (FACTS, 9)]
    says[failing] = fails(StoreError("there is no store here"))
    results = together(*says)
    assert isinstance(results[failing], StoreError)
    assert f"rank {failing} of 2 cannot serve: there is no store here" in str(results[1 - failing])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "bb"}, "weights bb instead of aa"),
        ({"settings": '{"isa":"avx2"}'}, "settings"),
        ({"version": "0.2"}, "version 0.2 instead of 0.1"),
        ({"geometry": "{} slices 4"}, "geometry"),
        ({"layers": 5}, "layers 5 instead of 4"),
    ],
    ids=["store", "settings", "version", "slices", "layers"],
)
def test_ranks_that_differ_all_stop(change: dict[str, Any], message: str) -> None:
    results = together(lambda: (FACTS, 9), lambda: (replace(FACTS, **change), 9))
    for result in results:
        assert isinstance(result, SettingsError)
        assert "expected rank 1 to have what rank 0 has" in str(result)
        assert message in str(result)


def test_facts_of_two_stores_differ_where_it_matters(tmp_path: Path) -> None:
    facts = {}
    for name, seed, slices in (("a", 0, 2), ("again", 0, 2), ("other", 1, 2), ("sliced", 0, 1)):
        made = write_checkpoint(tmp_path / f"model-{seed}" / name, seed=seed, intermediate=64)
        build_store(made.path, tmp_path / name, slices=slices)
        with Store.open(tmp_path / name) as store:
            facts[name] = Facts.of(Settings(store=tmp_path / name), store, 2)
    assert facts["a"] == facts["again"], "where the folder lies does not matter"
    assert facts["a"].weights != facts["other"].weights
    assert facts["a"].geometry != facts["sliced"].geometry


@pytest.mark.parametrize(
    ("extra", "ranks"),
    [([], 1), (["-tp", "2"], 2), (["--tensor-parallel-size=4"], 4), (["--x", "1", "--tensor-parallel-size", "2"], 2)],
    ids=["none", "short", "equals", "long"],
)
def test_tensor_parallel_size(extra: list[str], ranks: int) -> None:
    assert tensor_parallel_size(extra) == ranks


@pytest.mark.parametrize("value", ["0", "two", ""])
def test_tensor_parallel_size_that_is_none(value: str) -> None:
    with pytest.raises(SettingsError, match="expected a number of ranks"):
        tensor_parallel_size(["-tp", value])


def test_cpus_of_ranks_cover_all_once() -> None:
    cpus = (2, 3, 5, 7, 11)
    assert [cpus_of_rank(cpus, rank, 2) for rank in (0, 1)] == [(2, 3), (5, 7, 11)]
    assert [cpus_of_rank((4,), rank, 2) for rank in (0, 1)] == [(4,), (4,)]
