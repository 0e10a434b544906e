"""Work out what `moetier serve` starts with: the plan, what the user fixed, and what follows from both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moetier.errors import CheckpointError, SettingsError
from moetier.launch import process as launcher
from moetier.launch.arguments import context_of, launch_of
from moetier.launch.command import ServeRequest
from moetier.launch.derive import Chunk, chunk_for_gap
from moetier.launch.planned import Given, Serving, plan_serving
from moetier.plan.predict import chunk_seconds
from moetier.settings import Settings
from moetier.store.checkpoint import Checkpoint
from moetier.vllm_arguments import BATCHED, has

LEAST_KV_GIB = 1.0
LONGEST_GAP_MS = 200.0
"""Between two tokens of a running stream while a prompt enters: five tokens a second, about what one reads."""
SMALLER_CHUNKS = (4096, 2048, 1024, 512, 256)
"""Tokens of a prompt in a step, where the planned ones take too long."""
MOST_ON_CPU = 2048
"""As vLLM's own default there."""
DECIDE = (BATCHED, "--no-enable-chunked-prefill")
"""Whoever gives vLLM one of these decides about chunks."""


def request_of(
    asked: ServeRequest, values: Mapping[str, Any], reserve: int | None, longest_gap: float | None = None
) -> tuple[ServeRequest, tuple[str, ...]]:
    """The request with everything decided but the records in DRAM, and lines to say of it.

    asked: with the user's own settings, `kv_cache_gib` 0 where none was given. values: those settings by name. reserve:
    tokens of the model's window that are not served. longest_gap: in milliseconds, None where the user said nothing.
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
    if longest_gap is not None and not on_cpu and not settings.slots:
        raise SettingsError(
            "--longest-gap: without device slots vLLM decides about chunks; give --slots, or leave it out"
        )
    chunk = _chunk(planned, asked.extra, longest_gap, on_cpu)
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


def _chunk(planned: Serving | None, extra: Sequence[str], longest_gap: float | None, on_cpu: bool) -> Chunk | None:
    """Return the tokens of a prompt in a step: no more than planned, and no slower than running streams shall wait.

    Behind a whole context, where attention takes longest. None where nothing was planned or vLLM's arguments decide.
    """
    decided = next((name for name in DECIDE if has(extra, name)), None)
    if longest_gap is not None and (decided or planned is None):
        reason = f"{decided} decides already; give one of them" if decided else "there is no plan to choose a chunk by"
        raise SettingsError(f"--longest-gap: it decides the tokens of a prompt in a step, but {reason}")
    if decided or planned is None:
        return None
    plan, wanted = planned.plan, planned.plan.placement.wanted
    most = min(wanted.chunk, MOST_ON_CPU) if on_cpu else wanted.chunk
    sizes = {most, *(size for size in SMALLER_CHUNKS if size < most)}
    seconds = {size: chunk_seconds(plan.case, plan.costs, size, max(0, wanted.context - size)) for size in sizes}
    return chunk_for_gap(seconds, (longest_gap or LONGEST_GAP_MS) / 1e3)


def _context(planned: Serving | None, reserve: int | None) -> Iterator[str]:
    """Yield what `--explain` says of a context that was derived."""
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
