"""What `moetier serve` starts with: the plan, what the user fixed, and what follows from both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moetier.errors import CheckpointError, SettingsError
from moetier.plan.serving import Given, Serving, plan_serving
from moetier.serve import launcher
from moetier.serve.command import ServeRequest
from moetier.serve.launch import context_of, launch_of
from moetier.settings import Settings
from moetier.store.checkpoint import Checkpoint

LEAST_KV_GIB = 1.0


def request_of(
    asked: ServeRequest, values: Mapping[str, Any], reserve: int | None
) -> tuple[ServeRequest, tuple[str, ...]]:
    """The request with everything decided but the records in DRAM, and lines to say of it.

    asked: with the user's own settings, `kv_cache_gib` 0 where none was given. values: those settings by name. reserve:
    tokens of the model's window that are not served.
    """
    on_cpu = launcher.runs_on_cpu()
    planned, notes = _plan(asked.model, Given.of(values, asked.extra, reserve, context_of), on_cpu)
    settings = Settings.parse({**(planned.settings if planned else {}), **values})
    if on_cpu and settings.slots:
        raise SettingsError(
            f"slots: found {settings.slots}, but this vLLM computes on the CPU, where there are none; "
            "leave --slots out, or install vLLM's CUDA build on a machine with a GPU"
        )
    request = replace(
        asked,
        settings=settings,
        kv_cache_gib=asked.kv_cache_gib or max(LEAST_KV_GIB, planned.kv_cache_gib if planned else 0.0),
        planned_device_bytes=planned.device_bytes if planned else None,
    )
    chunk = planned.plan.placement.wanted.chunk if planned else None
    _, vllm = launcher.vllm_distribution()
    launch = launch_of(request, chunk, vllm, on_cpu, "planned_tokens" in values)
    context = planned.arguments(asked.extra) if planned else ()
    request = replace(
        request,
        settings=settings.model_copy(update={"planned_tokens": launch.planned_tokens}),
        derived=(*context, *launch.arguments),
        launch=(*_context(planned, reserve), *launch.lines()),
    )
    return request, notes


def _context(planned: Serving | None, reserve: int | None) -> Iterator[str]:
    """What `--explain` says of a context that was derived."""
    if planned is not None and reserve is not None:
        window, context = planned.plan.question.geometry.max_context, planned.plan.placement.wanted.context
        yield f"context of {context:,} tokens: the window of {window:,} less {reserve:,}, in whole KV blocks"


def _plan(model: Path, given: Given, on_cpu: bool) -> tuple[Serving | None, tuple[str, ...]]:
    """The plan for this machine, None where none can be made; and what to say of it.

    Settings of the user that do not fit by the plan's estimate are left to the check of what is really free.
    """
    try:
        planned = plan_serving(model, given, on_gpu=not on_cpu)
    except (CheckpointError, SettingsError) as error:
        if isinstance(error, CheckpointError):
            Checkpoint.open(model)  # what is wrong with it is said by its own error
        elif given.nothing or given.reserve is not None:
            raise
        return None, (f"no plan: {error}",)
    return planned, tuple(planned.lines())
