"""Launch derivations on published cases, and their properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.errors import SettingsError
from moetier.launch.derive import (
    KvCapacity,
    batched_tokens,
    chunk_for_gap,
    context_length,
    draft_slots,
    graph_sizes,
    scheduled_tokens,
)

BLOCK_DRAFT_5 = (5, 6, 10, 12, 15, 18, 20, 24, 25, 30, 35, 36, 40, 42, 48, 80, 96, 160, 192)


def test_graphs_of_mtp_2_at_32_sequences_end_at_96() -> None:
    assert graph_sizes(32, draft_tokens=2)[-1] == 96


def test_graphs_of_a_block_draft_of_5_at_32_sequences_are_the_published_ones() -> None:
    assert graph_sizes(32, draft_tokens=5, block_draft=True) == BLOCK_DRAFT_5


@given(st.integers(1, 1024), st.integers(0, 16), st.booleans())
def test_graphs_cover_every_decode_batch_with_less_than_half_padding(sequences: int, draft: int, block: bool) -> None:
    sizes = graph_sizes(sequences, draft, block and draft > 0)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == sequences * (draft + 1)
    for count in range(1, sequences + 1):
        for tokens in {draft + 1} | ({draft} if block and draft else set()):
            covering = min(size for size in sizes if size >= count * tokens)
            assert covering < 2 * count * tokens or covering == count * tokens


def test_context_is_the_window_less_the_reserve_in_whole_blocks() -> None:
    assert context_length(1_048_576, 16_384, 256) == 1_032_192
    assert context_length(1_000, 0, 256) == 768


@pytest.mark.parametrize(
    ("seconds", "gap", "tokens"),
    [
        pytest.param({256: 0.02, 512: 0.03, 2048: 0.1}, 0.2, 2048, id="all-are-short"),
        pytest.param({256: 0.03, 512: 0.06, 2048: 0.24}, 0.2, 512, id="the-largest-is-too-long"),
        pytest.param({256: 0.03, 512: 0.06, 2048: 0.24}, 0.24, 2048, id="just-as-long"),
        pytest.param({256: 1.0, 512: 1.0, 4096: 1.2, 8192: 1.9}, 0.2, 4096, id="streaming-takes-longer-anyway"),
        pytest.param({256: 1.0, 512: 1.4, 4096: 9.0}, 0.2, 256, id="nothing-is-short"),
        pytest.param({2048: 3.0}, 0.2, 2048, id="no-choice"),
    ],
)
def test_a_chunk_keeps_the_gap_or_the_shortest_steps(seconds: dict[int, float], gap: float, tokens: int) -> None:
    chunk = chunk_for_gap(seconds, gap)
    assert (chunk.tokens, chunk.seconds, chunk.shortest) == (tokens, seconds[tokens], min(seconds.values()))


@pytest.mark.parametrize(("budget", "left"), [(4_096, 3_968), (8_192, 8_064), (4_224, 4_096)])
def test_budget_less_the_reservation_of_a_block_draft_of_5_at_32_sequences(budget: int, left: int) -> None:
    slots = draft_slots(5, block_draft=True)
    assert scheduled_tokens(budget, 32, slots) == left
    assert batched_tokens(left, 32, slots) == budget


def test_mtp_reserves_nothing() -> None:
    assert scheduled_tokens(4_096, 32, draft_slots(2, block_draft=False)) == 4_096


@pytest.mark.parametrize(
    ("blocks", "per_request", "context", "concurrency", "tokens"),
    [
        pytest.param(7_676, 7_386, 1_032_192, 1.0393, 1_072_719, id="budget-4096"),
        pytest.param(7_650, 7_490, 1_032_192, 1.0214, 1_054_241, id="budget-8192"),
        pytest.param(7_957, 7_706, 262_144, 1.0326, 270_682, id="context-262144"),
    ],
)
def test_kv_capacity(blocks: int, per_request: int, context: int, concurrency: float, tokens: int) -> None:
    capacity = KvCapacity(blocks, per_request, block_bytes=1_000, context=context)
    assert round(capacity.concurrency, 4) == concurrency
    assert capacity.tokens_at_full_context == tokens
    assert capacity.bytes == blocks * 1_000


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda: graph_sizes(0), "sequences", id="no-sequences"),
        pytest.param(lambda: graph_sizes(4, -1), "draft_tokens", id="negative-draft"),
        pytest.param(lambda: graph_sizes(4, 0, block_draft=True), "block draft", id="empty-block"),
        pytest.param(lambda: graph_sizes(True), "whole number", id="true-is-no-number"),
        pytest.param(lambda: context_length(4_096, 4_000, 256), "reserve less", id="no-block-left"),
        pytest.param(lambda: scheduled_tokens(128, 32, 4), "at least 160", id="budget-too-small"),
        pytest.param(
            lambda: chunk_for_gap({512: 0.1}, float("nan")), "above 0, found nan", id="a-gap-that-is-no-number"
        ),
        pytest.param(lambda: KvCapacity(1, 0, 1, 1), "blocks_per_request", id="engine-not-asked"),
    ],
)
def test_impossible_launches_are_refused(call: object, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        call()  # type: ignore[operator]
