"""Derive from the user's arguments for vLLM and the plan: graphs, batched tokens, and what to say of it.

derive.py has the arithmetic; here is what it is applied to. Whatever the user gave stays as given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moetier.errors import SettingsError
from moetier.launch.command import ServeRequest
from moetier.launch.derive import Chunk, batched_tokens, context_length, draft_slots, graph_sizes, scheduled_tokens
from moetier.settings import Settings
from moetier.vllm_arguments import (
    BATCHED,
    BLOCK,
    GRAPHS,
    LENGTH,
    SEQUENCES,
    SIZES,
    Drafting,
    drafting_of,
    has,
    number_of,
)

MOST_PLANNED = 256
"""Up to here `planned_tokens` is raised for the user's batches; larger ones are streamed faster by the host."""

ANY_BLOCK = 256
"""Tokens of a KV block: a multiple of every block size that vLLM chooses by itself (16 to 256)."""


@dataclass(frozen=True)
class Launch:
    """A decision. sizes: of CUDA graphs in tokens, empty where none are captured or the user decides.

    batched: the budget of a step's tokens, None where vLLM chooses; drafter: how many of them are the drafter's; chunk:
    of a prompt, None where the user gave the budget or nobody chose.
    """

    planned_tokens: int
    drafting: Drafting
    sequences: int | None
    sizes: tuple[int, ...] = ()
    batched: int | None = None
    drafter: int = 0
    chunk: Chunk | None = None
    given: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """For vLLM, beside the user's own."""
        sizes = (SIZES, *map(str, self.sizes)) if self.sizes else ()
        batched = (BATCHED, str(self.batched)) if self.batched and not has(self.given, BATCHED) else ()
        return (*sizes, *batched)

    def lines(self) -> Iterator[str]:
        """Yield what `serve --explain` says of it."""
        each = self.drafting.tokens + 1
        if self.sizes:
            sequences = self.sizes[-1] // each
            per = f" of {each} tokens (one and {each - 1} guesses)" if each > 1 else ""
            sizes = ", ".join(map(str, self.sizes))
            yield f"CUDA graphs of {sizes} tokens: every decode batch of up to {sequences} sequences{per}"
            if self.sequences is not None and sequences < self.sequences:
                yield f"  batches of {sequences + 1} to {self.sequences} sequences run without a graph"
        if self.batched is not None:
            drafter = f", {self.drafter:,} of them the drafter's" if self.drafter else ""
            yield f"up to {self.batched:,} tokens in a step{drafter}"
        if self.chunk is not None:
            yield from _gap(self.chunk)


def _gap(chunk: Chunk) -> Iterator[str]:
    """Yield what running streams wait for a token while a prompt enters, beside what was asked for."""
    step = (
        f"  with {chunk.tokens:,} of a prompt it is expected to take {1e3 * chunk.seconds:,.0f} ms at the context's end"
    )
    if chunk.seconds <= chunk.gap:
        yield f"{step}; running streams shall wait {1e3 * chunk.gap:,.0f} ms for a token at most (--longest-gap)"
        return
    yield (
        f"{step}, more than the {1e3 * chunk.gap:,.0f} ms that running streams shall wait for a token (--longest-gap): "
        f"the shortest takes {1e3 * chunk.shortest:,.0f} ms, as experts are read or streamed for any number of tokens"
    )


def context_of(extra: Sequence[str], window: int, reserve: int | None) -> int | None:
    """Tokens of context to plan and serve: the window less `reserve`, in whole blocks; None where nobody fixed it.

    SettingsError where both --max-model-len and a reserve were given.
    """
    if reserve is None:
        return number_of(extra, LENGTH)
    if has(extra, LENGTH):
        raise SettingsError(f"{LENGTH} and --context-reserve both say how long the context is; give one of them")
    return context_length(window, reserve, number_of(extra, BLOCK) or ANY_BLOCK)


def launch_of(
    request: ServeRequest, chunk: Chunk | None, vllm: str, on_cpu: bool, planned_given: bool = False
) -> Launch:
    """Derive; SettingsError where the user's own numbers cannot work.

    chunk: of a prompt in a step; None where nothing was planned. vllm: its version.
    planned_given: the user set `planned_tokens`.
    """
    extra, settings = request.extra, request.settings
    drafting, sequences = drafting_of(extra), number_of(extra, SEQUENCES)
    slots = draft_slots(drafting.tokens, drafting.block, vllm)
    budget = number_of(extra, BATCHED)
    if budget is not None and sequences is not None:
        scheduled_tokens(budget, sequences, slots)
    launch = Launch(settings.planned_tokens, drafting, sequences, given=tuple(extra))
    if budget is None and chunk is not None and (on_cpu or settings.slots):
        scheduled = max(chunk.tokens, sequences or 1)  # vLLM wants room for a token of each
        budget = batched_tokens(scheduled, sequences or 1, slots if sequences else 0)
        launch = replace(launch, chunk=chunk)
    launch = replace(launch, batched=budget, drafter=_drafters(budget, sequences, slots))
    if on_cpu or not settings.slots or has(extra, "--enforce-eager", *GRAPHS):
        return launch
    planned = _planned(settings, sequences, drafting.tokens + 1, planned_given)
    return replace(launch, planned_tokens=planned, sizes=_sizes(planned, sequences, drafting))


def _drafters(budget: int | None, sequences: int | None, slots: int) -> int:
    return 0 if budget is None else (sequences or 0) * slots


def _planned(settings: Settings, sequences: int | None, each: int, given: bool) -> int:
    """Tokens of a step that the device plans: enough for every decode batch, unless the user said how many."""
    if given or sequences is None:
        return settings.planned_tokens
    return max(settings.planned_tokens, min(sequences * each, MOST_PLANNED // each * each))


def _sizes(planned: int, sequences: int | None, drafting: Drafting) -> tuple[int, ...]:
    """No larger than what the device plans, as graphs hold its plan; () where not one sequence fits."""
    fit = planned // (drafting.tokens + 1)
    count = fit if sequences is None else min(fit, sequences)
    return graph_sizes(count, drafting.tokens, drafting.block) if count else ()
