"""Derive from a few decisions: graph sizes, context, chunk, batched tokens, KV capacity. Pure functions.

`moetier serve` and the images of `moetier stack` take them from here, so that no script repeats a result that only
held for the model it was worked out on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import Version

from moetier.errors import SettingsError

DRAFTS_APART = Version("0.33")
"""From this vLLM on, a block drafter's tokens are in a pass of their own."""
DENSE_COUNTS = 8
"""Up to this many sequences every count has a graph of its own; above, each doubling: at most half of it is padding."""

WORTH_IT = 1.25
"""A larger chunk that takes no longer than this beside the shortest step is taken although that is above the gap."""


def graph_sizes(sequences: int, draft_tokens: int = 0, block_draft: bool = False) -> tuple[int, ...]:
    """CUDA-graph batch sizes in tokens, ascending, that cover every decode batch of up to `sequences` sequences.

    With `draft_tokens` guesses a step the target verifies draft_tokens + 1 tokens a sequence, so sizes are multiples of
    that and end at sequences x (draft_tokens + 1): a cap below it runs the largest batches without graphs. A block
    draft (all guesses from one forward of the drafter) also runs batches of draft_tokens a sequence.
    """
    _positive(sequences=sequences)
    _not_negative(draft_tokens=draft_tokens)
    if block_draft and not draft_tokens:
        raise SettingsError("a block draft: expected at least 1 draft token, found 0; set the drafter's tokens")
    counts = {*range(1, min(DENSE_COUNTS, sequences) + 1), sequences}
    count = 2 * DENSE_COUNTS
    while count < sequences:
        counts.add(count)
        count *= 2
    per_sequence = {draft_tokens + 1} | ({draft_tokens} if block_draft else set())
    return tuple(sorted({count * tokens for count in counts for tokens in per_sequence}))


def context_length(window: int, reserve: int, block: int) -> int:
    """Tokens of context to serve: the model's window less `reserve` (for the answer), in whole KV blocks of `block`."""
    _positive(window=window, block=block)
    _not_negative(reserve=reserve)
    context = (window - reserve) // block * block
    if context <= 0:
        raise SettingsError(
            f"context: a window of {window:,} tokens less a reserve of {reserve:,} leaves no block of {block}; "
            "reserve less"
        )
    return context


@dataclass(frozen=True)
class Chunk:
    """Tokens of a prompt in a step, and why so many: seconds of that step, of the shortest one, and those asked for."""

    tokens: int
    seconds: float
    shortest: float
    gap: float


def chunk_for_gap(seconds: Mapping[int, float], gap: float) -> Chunk:
    """The largest chunk that keeps running streams no longer than `gap` seconds from their next token.

    seconds: what a step with so many tokens of a prompt takes, of each chunk that may be chosen. A part of it does not
    depend on the tokens, as nearly every expert is streamed or read once a step. Where that part alone is above `gap`,
    small chunks would bring a prompt in much later and shorten gaps by little (WORTH_IT).
    """
    if not gap > 0:
        raise SettingsError(f"gap: expected seconds above 0, found {gap}")
    shortest = min(seconds.values())
    allowed = max(gap, WORTH_IT * shortest)
    tokens = max(tokens for tokens, taken in seconds.items() if taken <= allowed)
    return Chunk(tokens, seconds[tokens], shortest, gap)


def scheduled_tokens(batched_tokens: int, sequences: int, draft_slots: int = 0) -> int:
    """Tokens a step may schedule: the batch's budget less the drafter's extra slots (see `draft_slots`)."""
    _positive(batched_tokens=batched_tokens, sequences=sequences)
    _not_negative(draft_slots=draft_slots)
    left = batched_tokens - sequences * draft_slots
    if left < sequences:
        raise SettingsError(
            f"batched tokens: {batched_tokens:,} less {sequences} x {draft_slots} slots of the drafter leave {left:,}, "
            f"fewer than one for each of {sequences} sequences; raise --max-num-batched-tokens to at least "
            f"{sequences * (draft_slots + 1):,} or lower --max-num-seqs"
        )
    return left


def batched_tokens(scheduled: int, sequences: int, draft_slots: int = 0) -> int:
    """The budget that leaves `scheduled` tokens for the scheduler: the inverse of `scheduled_tokens`."""
    _positive(scheduled=scheduled, sequences=sequences)
    _not_negative(draft_slots=draft_slots)
    return scheduled + sequences * draft_slots


def draft_slots(draft_tokens: int, block_draft: bool, vllm: str = "0.32") -> int:
    """Slots of a step's batch that a drafter takes for a sequence, besides the one that decoding has.

    A drafter that guesses one token after the other (MTP) reuses that one; a block drafter needs one for each further
    guess, but in a pass of its own since vLLM 0.33. (`SpeculativeConfig.max_num_new_slots_for_drafting` for mtp and
    dspark, read in 0.26, 0.32 and 0.33.)
    """
    _not_negative(draft_tokens=draft_tokens)
    apart = Version(vllm) >= DRAFTS_APART
    return max(draft_tokens - 1, 0) if block_draft and not apart else 0


@dataclass(frozen=True)
class KvCapacity:
    """Capacity of a KV cache, in units that mean the same for every model: bytes, blocks, requests at full context.

    blocks_per_request depends on context, batch and asynchronous scheduling, and differs between groups of layers: it
    is what the engine reports for this very launch, never worked out from the context.
    """

    blocks: int
    blocks_per_request: int
    block_bytes: int
    context: int

    def __post_init__(self) -> None:
        _positive(blocks_per_request=self.blocks_per_request, block_bytes=self.block_bytes, context=self.context)
        _not_negative(blocks=self.blocks)

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def concurrency(self) -> float:
        """Requests of full context that fit at a time."""
        return self.blocks / self.blocks_per_request

    @property
    def tokens_at_full_context(self) -> int:
        """Return the tokens that vLLM logs for its cache: concurrency x context. No pool that short requests share."""
        return self.blocks * self.context // self.blocks_per_request


def _positive(**values: int) -> None:
    _at_least(1, values)


def _not_negative(**values: int) -> None:
    _at_least(0, values)


def _at_least(least: int, values: dict[str, int]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SettingsError(f"{name}: expected a whole number of at least {least}, found {value!r}")
