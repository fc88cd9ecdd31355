"""What the leader keeps of a request: every full block is saved once, and never too early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.engine.request import RequestState, UnwrittenTokens
from kvray.errors import LayoutMismatch
from kvray.identity.block import BlockKey
from kvray.identity.keys import MediaItem, chain_keys

BLOCK = 4
PROMPT = list(range(100, 118))
SEED = b"s" * 32


def state_of(tokens: list[int], **fields: object) -> RequestState:
    state = RequestState(request_id=1, seed=SEED, tokens_per_block=BLOCK, **fields)  # type: ignore[arg-type]
    state.prompt_keys(tokens)
    return state


def reported(tokens: list[int], pages: list[list[int]], **fields: object) -> RequestState:
    """Return the state of a request whose first pass has been reported."""
    state = state_of(tokens, **fields)
    state.extend(tokens, pages, new=True)
    return state


def keys_of(tokens: list[int], media: tuple[MediaItem, ...] = ()) -> list[BlockKey]:
    return chain_keys(tokens, tokens_per_block=BLOCK, seed=SEED, media=media)


def save(state: RequestState, computed: int) -> range:
    """Save what can be; return which blocks."""
    saved = range(state.num_saved, state.savable(computed))
    state.num_saved = saved.stop
    return saved


@given(
    prompt=st.lists(st.integers(0, 99), min_size=1, max_size=40),
    chunks=st.lists(st.integers(1, 9), max_size=12),
    generated=st.integers(0, 12),
    saved=st.integers(0, 3),
    media_at=st.none() | st.integers(0, 39),
)
def test_saves_cover_all_full_blocks_once_and_none_early(
    prompt, chunks, generated, saved, media_at
):
    media = () if media_at is None else (MediaItem(position=media_at, digest=b"d"),)
    state = state_of(prompt, media=media)
    first = state.num_saved = min(saved, len(prompt) // BLOCK)
    tokens, computed, seen = list(prompt), 0, list[int]()
    num_blocks = -(-(len(prompt) + generated) // BLOCK)
    state.extend(prompt, [range(num_blocks)], new=True)
    for chunk in [*chunks, len(prompt)]:
        computed = min(len(prompt), computed + chunk)
        blocks = save(state, computed)
        assert blocks.stop * BLOCK <= max(computed, first * BLOCK)
        seen += blocks
    for token in range(generated):
        state.extend([token], [[]], new=False)
        tokens.append(token)
        seen += save(state, len(tokens))
    assert seen == list(range(first, len(tokens) // BLOCK))
    assert state.keys_until(len(tokens) // BLOCK) == keys_of(tokens, media)


def test_nothing_is_saved_beyond_the_tokens_and_pages_that_were_reported():
    state = reported([1, 2, 3], [[0, 1]])
    assert not save(state, 4)
    state.extend([4], [[]], new=False)
    assert save(state, 4)
    state = reported(list(range(12)), [[5, -1, 7]])
    assert list(save(state, 12)) == [0]
    assert not save(state, 12)
    two = reported(list(range(12)), [[5, 6, 7], [1]], windowed=(False, False))
    assert list(save(two, 12)) == [0], "all groups must have reported a block"
    two.extend([], [[], [2, 3]], new=False)
    assert list(save(two, 12)) == [1, 2]
    windowed = reported(list(range(12)), [[5, 6, 7], [-1, -1, 2]], windowed=(False, True))
    assert list(save(windowed, 12)) == [0, 1, 2]
    assert windowed.load_pages(1, 3) == ([6, 7], [-1, 2])


@pytest.mark.parametrize("pages", [[9, 8, -1, 6, 5], [9, 8, 7]])
def test_a_block_to_load_without_a_page_is_an_error(pages):
    state = reported(list(range(20)), [pages])
    with pytest.raises(LayoutMismatch, match="2 of them"):
        state.load_pages(1, 4)


def test_a_report_with_other_tokens_than_the_query_or_before_has_the_keys_of_its_own():
    state = state_of([1, 2, 3, 9])
    state.extend([1, 2, 3, 4, 5], [[0, 1]], new=True)
    state.extend([6], [[]], new=False)
    state.extend([1, 2, 3, 4, 5], [[2, 3]], new=True)  # a replay without what was generated
    assert state.pages == ([2, 3],)
    state.extend([7, 8, 9], [[]], new=False)
    assert state.num_tokens == 8
    assert state.keys_until(2) == keys_of([1, 2, 3, 4, 5, 7, 8, 9])


@pytest.mark.parametrize("allocated", [[], [[5, 6, 7]]])
def test_a_later_request_whose_pages_are_not_known_for_all_groups_loads_nothing(allocated):
    state = state_of(list(range(12)), windowed=(False, True))
    state.allocated = allocated
    state.extend([], [[], []], new=False)
    with pytest.raises(LayoutMismatch, match="0 of them"):
        state.load_pages(0, 1)
    assert not save(state, 12)


def test_two_chains_part_where_their_seeds_or_media_do():
    one, two = (MediaItem(position=at, digest=b"d") for at in (5, 9))
    state = state_of(list(range(20)), media=(one, two))
    assert state.unlike_at(SEED, [one, two]) is None
    assert state.unlike_at(SEED, [one]) == 9
    assert state.unlike_at(SEED, [MediaItem(position=5, digest=b"e"), two]) == 5
    assert state.unlike_at(b"t" * 32, [one, two]) == 0


def test_blocks_whose_pages_may_have_changed_are_neither_saved_nor_lost():
    """Of a prompt of two blocks and a half; the engine drafts tokens."""
    state = reported(list(range(10)), [[0, 1, 2]], savable_blocks=2)
    assert list(save(state, 10)) == [0, 1]
    state.extend(list(range(10, 20)), [[3, 4]], new=False)
    assert list(save(state, 20)) == []
    assert state.num_full == state.num_saved


# Notes of tokens that an engine's own prefix cache may have unwritten, beside what
# tests/trtllm/test_pages_that_go.py shows of them.


@pytest.mark.parametrize("finds_parts", [True, False])
def test_what_was_computed_behind_an_uncomputed_token_is_unsure_for_ever(finds_parts):
    unwritten = UnwrittenTokens(4, finds_parts=finds_parts)
    unwritten.begin(1, PROMPT, 4)
    unwritten.confirm(1, 8)
    longer = [*PROMPT, 1, 2, 3]
    assert unwritten.begin(2, longer, 16)
    for ended in (1, 2):
        unwritten.confirm(ended, 100)
        unwritten.end(ended)
    assert not unwritten.begin(3, [*PROMPT, 4, 5], 16), "its tokens were computed later"
    assert unwritten.begin(4, [*longer, 6, 7], 20)


def test_a_copy_of_uncomputed_tokens_is_unsure_for_ever():
    unwritten = UnwrittenTokens(4, finds_parts=True)
    unwritten.begin(1, PROMPT, 4)
    assert unwritten.begin(2, [*PROMPT[:14], 1, 2], 14)
    unwritten.confirm(1, len(PROMPT))
    unwritten.end(1)
    assert unwritten.begin(3, [*PROMPT[:13], 3, 4], 13)
    assert not unwritten.begin(4, [*PROMPT[:12], 5, 6], 12)


@pytest.mark.parametrize("num_computed", [len(PROMPT), len(PROMPT) - 1])
def test_of_a_prompt_that_was_computed_nothing_is_unsure(num_computed):
    """The engine's cache has the last token only behind one that was sampled."""
    unwritten = UnwrittenTokens(4, finds_parts=True)
    unwritten.begin(1, PROMPT, 0)
    unwritten.confirm(1, num_computed)
    unwritten.end(1)
    assert not unwritten.begin(2, [*PROMPT, 1], len(PROMPT))
    unwritten.confirm(2, len(PROMPT))
    for kept in (unwritten._notes, unwritten._places, unwritten._open):
        assert not kept


def test_prompts_that_end_without_a_word_cost_a_bounded_memory(monkeypatch):
    monkeypatch.setattr("kvray.engine.request._OPEN_MAX", 3)
    monkeypatch.setattr("kvray.engine.request._NOTES_MAX", 5)
    unwritten = UnwrittenTokens(4, finds_parts=True)
    for number in range(9):
        unwritten.begin(number, [*PROMPT, number, 7], len(PROMPT))
    assert (len(unwritten._open), len(unwritten._notes)) == (3, 5)
    assert sum(unwritten._places.values()) == 5
    assert unwritten.begin(20, [*PROMPT, 8, 7], len(PROMPT) + 1)
    assert not unwritten.begin(21, [*PROMPT, 0, 7], len(PROMPT) + 1), "the oldest are forgotten"
    unwritten.confirm(0, len(PROMPT) + 2)  # of a note that is gone
