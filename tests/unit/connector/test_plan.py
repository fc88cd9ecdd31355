"""What the leader keeps of a request: every full block is saved once, and never too early."""

import pickle
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.block import BlockKey
from kvray.connector.plan import (
    ConnectorMeta,
    LoadPlan,
    Promise,
    RequestState,
    SavePlan,
    pack_ids,
    promised_blocks_max,
    unpack_ids,
)
from kvray.errors import LayoutMismatch
from kvray.keys import MediaItem, chain_keys
from kvray.store import Lease

BLOCK = 4
SEED = b"s" * 32


def state_of(tokens: list[int], media: tuple[MediaItem, ...] = ()) -> RequestState:
    state = RequestState(request_id=1, seed=SEED, tokens_per_block=BLOCK, media=media)
    state.prompt_keys(tokens)
    return state


def with_promise(state: RequestState, *, first: int, num_blocks: int) -> RequestState:
    leases = (Lease(lease_id=1, page=0, num_slots=first + num_blocks),)
    arena: Any = Mock(arena_id="a")
    state.promise = Promise(arena=arena, leases=leases, first=first, num_blocks=num_blocks)
    return state


def keys_of(tokens: list[int], media: tuple[MediaItem, ...] = ()) -> list[BlockKey]:
    return chain_keys(tokens, tokens_per_block=BLOCK, seed=SEED, media=media)


@given(
    prompt=st.lists(st.integers(0, 99), min_size=1, max_size=40),
    chunks=st.lists(st.integers(1, 9), max_size=12),
    generated=st.integers(0, 12),
    saved=st.integers(0, 3),
    media_at=st.none() | st.integers(0, 39),
)
def test_saves_cover_every_full_block_once_and_none_beyond_what_is_computed(
    prompt: list[int], chunks: list[int], generated: int, saved: int, media_at: int | None
) -> None:
    media = () if media_at is None else (MediaItem(position=media_at, digest=b"d"),)
    state = state_of(prompt, media)
    state.num_saved = min(saved, len(prompt) // BLOCK)
    first = state.num_saved
    tokens, computed, plans = list(prompt), 0, []
    num_blocks = -(-(len(prompt) + generated) // BLOCK)
    state.extend(prompt, list(range(num_blocks)), new=True)
    for chunk in [*chunks, len(prompt)]:
        computed = min(len(prompt), computed + chunk)
        plans.append((computed, state.take_save(computed)))
    for token in range(generated):
        state.extend([token], [], new=False)
        tokens.append(token)
        plans.append((len(tokens), state.take_save(len(tokens))))
    keys = keys_of(tokens, media)
    seen = []
    for computed, plan in plans:
        if plan is not None:
            ids = unpack_ids(plan.block_ids).tolist()
            assert list(plan.keys) == [keys[i] for i in ids]
            assert plan.depth == ids[0]
            assert plan.parent == (keys[ids[0] - 1] if ids[0] else None)
            assert (ids[-1] + 1) * BLOCK <= computed
            seen += ids
    assert seen == list(range(first, len(keys)))


def test_a_lagging_report_saves_nothing_beyond_the_tokens_it_names() -> None:
    state = state_of([1, 2, 3])
    state.extend([1, 2, 3], [0, 1], new=True)
    assert state.take_save(4) is None
    state.extend([4], [], new=False)
    assert state.take_save(4) is not None


def test_blocks_without_a_page_are_never_read() -> None:
    state = state_of(list(range(12)))
    state.extend(list(range(12)), [5, -1, 7], new=True)
    plan = state.take_save(12)
    assert plan is not None
    assert unpack_ids(plan.block_ids).tolist() == [5]
    assert state.take_save(12) is None


def test_an_accepted_promise_becomes_a_load_of_the_blocks_behind_the_engines_own() -> None:
    state = with_promise(state_of(list(range(20))), first=1, num_blocks=3)
    state.extend(list(range(20)), [9, 8, 7, 6, 5], new=True)
    load = state.take_load(BLOCK)
    assert load is not None
    assert (load.first, unpack_ids(load.block_ids).tolist()) == (1, [8, 7, 6])


def test_a_promise_is_not_loaded_where_the_engine_stands_elsewhere() -> None:
    state = with_promise(state_of(list(range(20))), first=1, num_blocks=3)
    state.extend(list(range(20)), [9, 8, 7, 6, 5], new=True)
    assert state.take_load(0) is None
    assert state.take_load(-2 * BLOCK) is None


@pytest.mark.parametrize("block_ids", [[9, 8, -1, 6, 5], [9, 8, 7]])
def test_a_promise_that_was_taken_without_blocks_for_it_is_an_error(block_ids: list[int]) -> None:
    state = with_promise(state_of(list(range(20))), first=1, num_blocks=3)
    state.extend(list(range(20)), block_ids, new=True)
    with pytest.raises(LayoutMismatch, match="2 of them"):
        state.take_load(BLOCK)


def test_a_first_report_with_other_tokens_rekeys_the_request() -> None:
    state = state_of([1, 2, 3, 4])
    state.extend([1, 2, 3, 5], [0], new=True)
    plan = state.take_save(4)
    assert plan is not None
    assert list(plan.keys) == keys_of([1, 2, 3, 5])


def test_at_least_one_token_is_left_to_compute() -> None:
    assert [promised_blocks_max(n, BLOCK) for n in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_metadata_survives_pickling_and_costs_few_bytes_a_loaded_block() -> None:
    def meta(num_blocks: int) -> bytes:
        lease = Lease(lease_id=2**40, page=7, num_slots=num_blocks)
        load = LoadPlan(
            request_id=3,
            arena_id="a" * 16,
            leases=(lease,),
            first=0,
            block_ids=pack_ids(range(num_blocks)),
        )
        save = SavePlan(
            request_id=3, keys=(BlockKey(SEED),), parent=None, depth=0, block_ids=pack_ids([1])
        )
        made = ConnectorMeta(namespace=SEED, loads=(load,), saves=(save,))
        assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301 (made right here)
        return pickle.dumps(made)

    assert len(meta(4096)) - len(meta(0)) <= 8 * 4096
    assert len(meta(0)) < 1000
