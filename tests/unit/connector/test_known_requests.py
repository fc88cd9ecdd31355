"""What a shard and its arena know of requests: outcomes, keys, how long to keep their blocks."""

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from kvray.actors.shard.actor_requests import Asked
from kvray.actors.shard.shard import Shard
from kvray.connector.base import RequestData
from kvray.engine.request import RequestState, read_priorities
from kvray.identity.block import namespace_id
from kvray.identity.keys import chain_keys, request_seed
from kvray.node import link as link_module
from kvray.store.arena import key_index
from kvray.store.block_history import CLEARED
from kvray.store.sizing import Window
from tests.kit.connector import BLOCK, NUM_WANTED, Pair, Request
from tests.waiting import wait_for

_STARTS = itertools.count(1000, 100)


@pytest.fixture(autouse=True)
def reports_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_REPORT_S", 0.02)


def state_of(**known: Any) -> RequestState:
    return RequestState(request_id=1, seed=bytes(32), tokens_per_block=BLOCK, **known)


def new_prompt(count: int = 10) -> list[int]:
    """Return a prompt of so many blocks that the shard of this module has not seen leave."""
    start = next(_STARTS)
    return list(range(start, start + count * BLOCK))


def asked(shard: Shard, pair: Pair, request_id: int) -> Asked:
    """Return what the shard knows of a request, once it was reported."""
    # The pairs of this process are replicas of one name.
    find = partial(shard.requests.asked, pair.engine.replica, request_id, 1)
    wait_for(find, "the report")
    return find()[0]


def test_outcomes_are_known_and_where_missed_blocks_are_and_when_they_left(shard, pair):
    prompt = new_prompt()
    pair.serve(Request(9001, prompt))
    pair.flush()
    missed = asked(shard, pair, 9001).note
    assert (missed.first, missed.end, missed.wanted) == (0, 0, NUM_WANTED)
    assert (missed.reason, missed.num_tokens, missed.tokens_per_block) == ("not_stored", 40, BLOCK)
    assert len(missed.keys) == NUM_WANTED
    keys = b"".join(missed.keys)
    here = shard.requests.whereabouts(None, keys)
    assert here.host.tolist() == here.either.tolist() == [1] * NUM_WANTED
    assert not here.left_at.any()

    assert pair.serve(Request(9002, prompt), BLOCK) == NUM_WANTED * BLOCK - BLOCK
    found = asked(shard, pair, 9002)
    assert (found.note.first, found.note.end, found.note.reason) == (1, NUM_WANTED, "none")
    assert found.note.keys == ()
    assert found.note.lease_s > 0
    assert found.namespace is not None
    assert found.namespace.tokens_per_block == BLOCK

    shard.clear(10)
    gone = shard.requests.whereabouts(None, keys)
    assert not gone.either.any()
    assert np.all(gone.left_at > missed.at)
    assert set(gone.left_by.tolist()) == {CLEARED}
    assert not shard.requests.whereabouts(missed.at, keys).left_at.any()

    pair.query(Request(9003, prompt, lora_task_id=7))
    assert asked(shard, pair, 9003).note.reason == "bypassed"


@pytest.fixture
def before(running_shard: Shard) -> int:
    return running_shard.requests.sizing_plan().window.trace.num_requests


def window_with(shard: Shard, num_prompts: int) -> Window:
    """Return the shard's sample once it has so many prompts."""
    find = shard.requests.sizing_plan
    wait_for(lambda: find().window.trace.num_requests >= num_prompts, "the report")
    return find().window


def test_prompts_reach_the_shard_with_their_keys_when_they_end(running_shard, before, pair):
    prompt = new_prompt()
    pair.store(prompt)
    pair.serve(Request(2, prompt[: 4 * BLOCK]))
    trace = (window := window_with(running_shard, before + 2)).trace
    first, second = (
        trace.ids[trace.starts[at] : trace.starts[at + 1]].tolist() for at in (before, before + 1)
    )
    assert window.lengths[before].tolist() == [10, 9, 0], "the last token is always computed"
    assert second == first[:4]
    assert sum(one.num_hit for one in window.spaces) > 0


def test_a_request_that_is_asked_about_again_counts_once(running_shard, before, pair):
    request = Request(1, new_prompt(5))
    for _ in range(3):
        pair.query(request, 0)
    pair.serve(request)
    pair.serve(Request(2, new_prompt(5)))
    assert window_with(running_shard, before + 2).trace.num_requests == before + 2


SHORTER = list(range(100, 132))


def serve_with(pair: Pair, request: Request, priorities: Any) -> None:
    matched = pair.query(request)
    left = len(request.tokens) - matched
    tokens, pages = list(request.tokens), list(request.block_ids)
    pair.begin_pass(RequestData(request.request_id, tokens, pages, 0, left, priorities=priorities))
    pair.compute(request)


def kept(pair: Pair, tokens: list[int]) -> tuple[list[int], set[int]]:
    """Return priorities and namespaces of the saved blocks of a prompt, in its order."""
    pair.flush()
    seed = request_seed(pair.engine.identity.digest, salt=None, lora=None)
    keys = chain_keys(tokens, tokens_per_block=BLOCK, seed=seed)
    tables = pair.arena.tables
    found = key_index.find(tables, key_index.pack_keys(keys), 0)
    found = found[found >= 0]
    return tables.slot_priority[found].tolist(), set(tables.slot_namespace[found].tolist())


def test_every_block_has_the_namespace_and_the_priority_that_the_engine_gave_it(shard, pair):
    wanted = [100, 90, 80, 35, 0, 50, 50, 50]
    serve_with(pair, Request(1, SHORTER), wanted)
    assert kept(pair, SHORTER) == (wanted, {namespace_id(pair.engine.identity.digest)})
    status = shard.status()
    (mine,) = (one for one in status["arena"]["namespaces"] if one["namespace"])
    assert mine["namespace"] in status["namespaces"]
    assert mine["blocks"] == 8


NO_PRIORITIES = [None, [], "1" * 8, 7, MagicMock()]


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ([-5, 10**6, 99, 1, 2, 3, 4, 5], [0, 100, 99, 1, 2, 3, 4, 5]),
        ([90, 91], [90, 91, *[35] * 6]),
        ([90] * 20, [90] * 8),
        ((1, np.int32(2)), [1, 2, *[35] * 6]),
        *((one, [35] * 8) for one in NO_PRIORITIES),
        *(([one] * 8, [35] * 8) for one in (None, "high", 10**30, float("nan"), [1, 2])),
    ],
)
def test_without_priorities_or_with_nonsense_blocks_have_the_default(asked, wanted):
    told = read_priorities(SimpleNamespace(priorities=asked))
    state = state_of()
    state.extend([], [list(range(8))], new=True, priorities=told)
    assert list(state.priorities_of(0, 8) or [35] * 8) == wanted


def test_blocks_that_are_here_are_kept_longer_when_a_request_asks_for_it(pair):
    raised = [90, 90, 10, 10, 35, 35, 35, 35]
    for request_id, priorities in enumerate((None, raised, None), start=1):
        request = Request(request_id, SHORTER)
        serve_with(pair, request, priorities)
        wanted = [35] * 8 if request_id == 1 else [90, 90, *[35] * 6]
        assert kept(pair, SHORTER)[0] == wanted
        pair.finish(request)
    assert pair.totals["hit_tokens"] == 2 * (len(SHORTER) - BLOCK)
    assert pair.totals["stored_blocks"] == 8


def test_priorities_of_later_reports_belong_to_their_new_blocks(pair):
    request = Request(1, SHORTER)
    serve_with(pair, request, None)
    more = list(range(BLOCK + 1))
    request.tokens = [*SHORTER, *more]
    request.block_ids += [60, 61]
    late = RequestData(1, more, [60, 61], 8 * BLOCK, BLOCK, priorities=[77, 78])
    pair.begin_pass(cached_requests=[late])
    pair.compute(request)
    assert kept(pair, request.tokens)[0] == [*[35] * 8, 77]


def test_what_has_the_default_throughout_needs_no_bytes():
    state = state_of()
    assert state.priorities_of(0, 5) == b""
    state.extend([], [[0, 1]], new=True, priorities=bytes([35, 35]))
    state.extend([], [[2, 3]], new=False)
    state.extend([], [[4]], new=False, priorities=bytes([90]))
    assert state.priorities_of(0, 4) == b""
    assert state.priorities_of(3, 7) == bytes([35, 90, 35, 35])


@pytest.mark.parametrize(("num_found", "num_saved"), [(4, 4), (5, 0)])
def test_blocks_that_are_here_are_saved_again_only_if_one_of_them_is_raised(num_found, num_saved):
    state = state_of(num_found=num_found, num_saved=num_found)
    state.extend([], [list(range(5))], new=True, priorities=bytes([35, 35, 35, 35, 90]))
    assert state.num_saved == num_saved
