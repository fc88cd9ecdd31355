"""What a shard knows of requests that a connector has answered."""

import itertools

import numpy as np
import pytest

from kvray.actors.shard.actor_requests import Asked
from kvray.actors.shard.shard import Shard
from kvray.node import link as link_module
from kvray.store.block_history import CLEARED
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
