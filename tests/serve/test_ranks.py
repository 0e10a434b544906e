"""Tensor parallelism on two CPU ranks: each reads its slices alone, tiers change no token, none outlives another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from moetier.launch.counting import Snapshot, read_snapshots
from moetier.store.build import build_store
from moetier.store.store import Store
from moetier.tiers.part import Part
from tests.serve.damage import zero_the_weights
from tests.serve.engine import moetier, run_engine
from tests.serve.server import LIMIT_SECONDS, Server, serving
from tests.serve.streaming import Request

pytest.importorskip("vllm", reason="vLLM is not installed")

RANKS, LAYERS, EXPERTS = 2, 4, 32
SHARES = {"50%": 16, "0": 0}
"""Share of the experts in DRAM -> records of each of nano's layers."""


@pytest.fixture(scope="module")
def store(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "nano"
    build_store(nano, path, slices=RANKS)
    return path


@pytest.fixture(scope="module")
def runs(
    nano: Path, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], list[Snapshot]]]:
    generator, found = np.random.default_rng(3), {}
    prompts = [generator.integers(0, 4000, 24).tolist() for _ in range(6)]
    for share in SHARES:
        counters = tmp_path_factory.mktemp("counters")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if (psutil.cpu_count() or 1) > 1 else "0|0")
            result = run_engine(
                prompts,
                8,
                model=str(nano),
                tensor_parallel_size=RANKS,
                distributed_executor_backend="mp",
                worker_cls="moetier.vllm.cpu_worker.MoetierCpuWorker",
                **moetier(store, dram_records=share, counters_folder=str(counters)),
            )
        found[share] = result, read_snapshots(counters)
    return found


def test_tokens_and_logprobs_do_not_depend_on_the_tier(runs: dict[str, tuple[dict[str, Any], list[Snapshot]]]) -> None:
    (half, _), (none, _) = runs.values()
    for part in ("tokens", "logprobs", "prompt_logprobs"):
        assert half[part] == none[part]


@pytest.mark.parametrize("share", SHARES)
def test_each_rank_reads_its_part_alone(
    runs: dict[str, tuple[dict[str, Any], list[Snapshot]]], store: Path, share: str
) -> None:
    _, ranks = runs[share]
    assert [snapshot.rank for snapshot in ranks] == [0, 1]
    with Store.open(store) as opened:
        geometry = opened.manifest.layer_geometry
    for snapshot in ranks:
        part = Part(geometry, snapshot.rank, RANKS)
        assert snapshot.disk_reads == SHARES[share] * LAYERS + snapshot.total.disk_reads > 0
        assert snapshot.disk_bytes == snapshot.disk_reads * part.room
        assert part.room < part.layout.stride
    for name in ("calls", "tokens", "pairs", "hits", "misses"):
        assert getattr(ranks[0].total, name) == getattr(ranks[1].total, name) > (-1 if name == "hits" else 0)


@pytest.mark.long
def test_rank_that_fails_ends_all(nano: Path, store: Path, tmp_path: Path) -> None:
    """First a bad record in the part of the second rank alone, which its copy of the checkpoint cannot heal."""
    model, copy = tmp_path / "nano-mxfp4", tmp_path / "store"
    shutil.copytree(nano, model)
    shutil.copytree(store, copy)
    with serving(model, copy, tmp_path / "out", dram_records="0", vllm=("-tp", "2")) as server:
        whole = Request(server).whole()
        zero_the_weights(model)
        running = Request(server)
        assert running.began.wait(LIMIT_SECONDS)
        spoil_second_slices(copy)
        assert server.wait_exit() == 1
        assert running.join().error is not None
        assert whole.startswith(running.text)
        assert "slice 1: checksum" in server.error
        assert "layer 2, expert" in server.error


def test_ranks_that_do_not_divide_the_slices_are_refused(nano: Path, store: Path, tmp_path: Path) -> None:
    with Server(nano, store, tmp_path / "out", vllm=("-tp", "4")) as server:
        assert server.wait_exit() == 2
        assert "tensor-parallel size 4: expected one that divides the 2 slices" in server.error
    assert server.error.count("moetier store build CHECKPOINT OUT --slices 4") == 1


def spoil_second_slices(store: Path) -> None:
    """Of every record of the second layer."""
    with Store.open(store) as opened:
        path, layout = opened.record_file(1), opened.layout
    with path.open("r+b") as file:
        for start in range(0, path.stat().st_size, layout.stride):
            file.seek(start + layout.slice_bytes + 100)
            (byte,) = file.read(1)
            file.seek(start + layout.slice_bytes + 100)
            file.write(bytes([byte ^ 1]))
