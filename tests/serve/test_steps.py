"""What the tiers hear of vLLM's steps, and the parts of vLLM that the worker subclasses stand on."""

from __future__ import annotations

import dataclasses
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moetier.engine.context import Context
from moetier.tiers.step import Step

pytest.importorskip("vllm", reason="vLLM is not installed")

from moetier.engine.hybrid import Launch
from moetier.errors import SettingsError
from moetier.launch.failure import read_failure, read_words
from moetier.settings import Settings
from moetier.vllm import runtime
from moetier.vllm.steps import StepAware, step_of


def scheduled(tokens: dict[str, int], drafts: dict[str, list[int]] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens=drafts or {},
        total_num_scheduled_tokens=sum(tokens.values()),
    )


def test_step_of_what_was_scheduled() -> None:
    assert step_of(scheduled({"a": 1, "b": 1})) == Step(2, False)
    assert step_of(scheduled({"a": 1, "b": 100})) == Step(2, True)
    assert step_of(scheduled({"a": 4, "b": 1}, {"a": [-1, -1, -1]})) == Step(2, False)


class Worker:
    """Stands for vLLM's; the steps that it saw the tiers in."""

    vllm_config = SimpleNamespace(speculative_config=None)

    def __init__(self) -> None:
        self.seen: list[tuple[bool, Step]] = []

    def load_model(self) -> str:
        return "loaded"

    def execute_model(self, scheduler_output: Any) -> str:
        (model,) = runtime._models.values()
        if scheduler_output.total_num_scheduled_tokens == 13:
            raise ValueError("thirteen")
        self.seen.append((model.context.real, model.context.step))
        return "output"


class Ours(StepAware, Worker):
    pass


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    model: Any = SimpleNamespace(context=Context(), part=SimpleNamespace(ranks=1))
    monkeypatch.setattr(runtime, "_models", {"one": model})
    return model


def test_nothing_is_real_before_the_first_step(model: SimpleNamespace) -> None:
    worker = Ours()
    assert worker.load_model() == "loaded"
    assert not model.context.real
    worker.execute_model(scheduled({}))
    assert worker.execute_model(scheduled({"a": 7})) == "output"
    assert worker.seen == [(False, Step()), (True, Step(1, True))]


def test_failure_ends_the_process_only_among_ranks(model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(ValueError, match="thirteen"):
        Ours().execute_model(scheduled({"a": 13}))
    assert not ended
    model.part.ranks = 2
    with pytest.raises(ValueError, match="thirteen"):
        Ours().execute_model(scheduled({"a": 13}))
    assert ended == [1]


def test_failure_before_the_forward_ends_a_rank_too(model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    broken: Any = SimpleNamespace(before_step=lambda launch, step: [][launch.scheduled])
    monkeypatch.setattr(runtime, "_hybrids", {"one": broken})
    model.part.ranks = 2
    with pytest.raises(IndexError):
        Ours().execute_model(scheduled({"a": 1}))
    assert ended == [1]


def test_recordings_that_cannot_be_made_are_refused() -> None:
    sliced, slots = {"record_calls": "x"}, {"record_trace": "x", "slots": 4}
    with pytest.raises(SettingsError, match="record with one rank"):
        runtime._of_rank(Settings.parse({"store": "s", **sliced}), 0, 2)
    with pytest.raises(SettingsError, match="--slots 0"):
        runtime._of_rank(Settings.parse({"store": "s", **slots}), 0, 1)


def test_vllm_has_what_we_stand_on() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_worker import Worker as GpuWorker

    from moetier.vllm.cpu_worker import MoetierCpuWorker

    fields = {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert {"num_scheduled_tokens", "scheduled_spec_decode_tokens", "total_num_scheduled_tokens"} <= fields
    assert list(inspect.signature(GpuWorker.execute_model).parameters)[:2] == ["self", "scheduler_output"]
    assert MoetierCpuWorker.load_model is StepAware.load_model


def test_guesses_are_real_rows_and_choose_no_graph(model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block drafter runs sequences x (guesses + 1) tokens, but what is scheduled chooses the model's graph."""
    told: list[Launch] = []
    monkeypatch.setattr(runtime, "begin_step", lambda step, launch: told.append(launch))
    worker = Ours()
    worker.execute_model(scheduled({"a": 1, "b": 1}))
    worker.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=5))
    worker.execute_model(scheduled({"a": 1, "b": 1}))
    assert told == [Launch(2, 2), Launch(2, 2 + 2 * 6, drafts=True)]


@pytest.mark.parametrize("slots", [0, 4])
def test_any_exception_of_the_engine_leaves_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """Raised by vLLM, in a step of ours: the file that the launcher reads has it. What we know better replaces it."""
    settings = Settings(store=tmp_path, failure_file=tmp_path / "failure.json", slots=slots)
    model: Any = SimpleNamespace(context=Context(), part=SimpleNamespace(ranks=1))
    monkeypatch.setattr(runtime, "_models", {settings: model})
    with pytest.raises(ValueError, match="thirteen"):
        Ours().execute_model(scheduled({"a": 13}))
    assert read_words(settings.failure_file) == "ValueError: thirteen"
    assert settings.failure_file is not None
    assert read_failure(settings.failure_file) is None
    late: Any = SimpleNamespace(tell_if_late=lambda: None)
    monkeypatch.setattr(runtime, "_hybrids", {settings: late} if slots else {})
    runtime.tell_failure(RuntimeError("second"))
    assert read_words(settings.failure_file) == "ValueError: thirteen"
    runtime.tell_failure(SettingsError("what it was: expected A, found B; do C"))
    assert read_words(settings.failure_file) == "what it was: expected A, found B; do C"
    runtime.tell_failure(SettingsError("a later one"))
    runtime.tell_failure(RuntimeError("CUDA error"))
    failure = read_failure(settings.failure_file)
    assert str(failure) == "what it was: expected A, found B; do C"
    assert list(tmp_path.iterdir()) == [settings.failure_file]
