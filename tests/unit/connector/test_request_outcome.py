"""What a shard knows of requests and prompts that a connector has answered."""

import itertools
import time

import numpy as np
import pytest

from kvray.actors.shard.actor_requests import Asked
from kvray.actors.shard.shard import Shard
from kvray.node import link as link_module
from kvray.store.block_history import CLEARED
from kvray.store.sizing import Window
from tests.unit.connector.conftest import MakePair
from tests.unit.connector.pair import BLOCK, Pair, Request
from tests.waiting import wait_for

PROMPT = list(range(300, 340))
_COUNT = itertools.count()
WANTED = (len(PROMPT) - 1) // BLOCK


@pytest.fixture(autouse=True)
def reports_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_REPORT_S", 0.02)


def new_prompt() -> list[int]:
    """Return a prompt that the shard of this module has not seen leave."""
    start = 1000 + next(_COUNT) * len(PROMPT)
    return list(range(start, start + len(PROMPT)))


def asked(shard: Shard, pair: Pair, request_id: int) -> Asked:
    """Return what the shard knows of a request, once it was reported."""
    replica = pair.worker._rank.shared.pool.replica

    def find() -> list[Asked]:
        # The pairs of this process are replicas of one name.
        return shard.queries.asked(replica, request_id, 1)

    wait_for(lambda: bool(find()), "the report")
    return find()[0]


def test_a_miss_and_a_hit_are_known_with_their_blocks(shard: Shard, make_pair: MakePair) -> None:
    pair = make_pair()
    pair.serve(Request(9001, PROMPT))
    pair.flush()
    missed = asked(shard, pair, 9001).note
    assert (missed.first, missed.end, missed.wanted) == (0, 0, WANTED)
    assert (missed.reason, missed.num_tokens, missed.tokens_per_block) == ("not_stored", 40, BLOCK)
    assert len(missed.keys) == WANTED
    pair.finish(Request(9001, PROMPT))
    pair.query(Request(9002, PROMPT), BLOCK)
    found = asked(shard, pair, 9002)
    assert (found.note.first, found.note.end, found.note.reason) == (1, WANTED, "none")
    assert found.note.keys == ()
    assert found.note.lease_s > 0
    assert found.namespace is not None
    assert found.namespace.tokens_per_block == BLOCK


def test_of_what_was_missed_it_is_known_where_it_is_and_when_it_left(
    shard: Shard, make_pair: MakePair
) -> None:
    pair, prompt = make_pair(), new_prompt()
    pair.serve(Request(9011, prompt))
    pair.flush()
    missed = asked(shard, pair, 9011).note
    keys = b"".join(missed.keys)
    here = shard.queries.whereabouts(None, keys)
    assert here.host.tolist() == here.either.tolist() == [1] * WANTED
    assert not here.left_at.any()
    shard.clear(10)
    gone = shard.queries.whereabouts(None, keys)
    assert not gone.either.any()
    assert np.all(gone.left_at > missed.at)
    assert set(gone.left_by.tolist()) == {CLEARED}
    assert not shard.queries.whereabouts(missed.at, keys).left_at.any()


def test_a_request_without_keys_is_known_as_such(shard: Shard, make_pair: MakePair) -> None:
    pair = make_pair()
    pair.query(Request(9021, PROMPT, lora_task_id=7))
    assert asked(shard, pair, 9021).note.reason == "bypassed"


_PROMPT_SAMPLE_COUNT = itertools.count(1)


def serve(pair: Pair, prompt: list[int]) -> None:
    request = Request(next(_PROMPT_SAMPLE_COUNT), prompt)
    pair.serve(request)
    pair.finish(request)


def window_with(shard: Shard, num_prompts: int) -> Window:
    """Return the shard's sample once it has so many prompts more than before."""
    find = shard.queries.sizing_plan
    wait_for(lambda: find().window.trace.num_requests >= num_prompts, "the report")
    return find().window


def test_prompts_reach_the_shard_with_their_keys_when_they_end(
    running_shard: Shard, make_pair: MakePair
) -> None:
    before = running_shard.queries.sizing_plan().window.trace.num_requests
    pair = make_pair()
    start = 100_000 + time.monotonic_ns() % 10**9
    prompt = list(range(start, start + 10 * BLOCK))
    serve(pair, prompt)
    serve(pair, prompt[: 4 * BLOCK])
    trace = (window := window_with(running_shard, before + 2)).trace
    first, second = (
        trace.ids[trace.starts[at] : trace.starts[at + 1]].tolist() for at in (before, before + 1)
    )
    assert window.lengths[before].tolist() == [10, 9, 0], "the last token is always computed"
    assert second == first[:4]


def test_a_request_that_is_asked_about_again_counts_once(
    running_shard: Shard, make_pair: MakePair
) -> None:
    before = running_shard.queries.sizing_plan().window.trace.num_requests
    pair = make_pair()
    start = 200_000 + time.monotonic_ns() % 10**9
    request = Request(next(_PROMPT_SAMPLE_COUNT), list(range(start, start + 5 * BLOCK)))
    for _ in range(3):
        pair.query(request, 0)
    pair.serve(request)
    pair.finish(request)
    serve(pair, list(range(start + 7, start + 7 + 5 * BLOCK)))
    window = window_with(running_shard, before + 2)
    assert window.trace.num_requests == before + 2
