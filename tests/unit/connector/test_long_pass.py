"""All blocks that one pass computes are saved, however many; what is not is counted."""

import pickle

import numpy as np
import pytest

from kvray.actors.shard.shard import Shard
from kvray.connector.base import RequestData, SchedulerOutput
from kvray.engine.meta import ConnectorMeta
from kvray.store.arena.layout import READY
from tests.unit.connector.conftest import MakePair, arena_of
from tests.unit.connector.pair import BLOCK, Pair, Request

NUM_BLOCKS = 180
PROMPT = list(range(NUM_BLOCKS * BLOCK))


@pytest.fixture
def pair(shard: Shard, make_pair: MakePair) -> Pair:
    return make_pair(shape=(256, 2, 2, 8))


def test_a_pass_saves_all_blocks_of_a_long_prompt(pair: Pair) -> None:
    request = Request(1, PROMPT)
    pair.serve(request)
    pair.flush()
    assert pair.totals["stored_blocks"] == NUM_BLOCKS
    assert pair.totals["dropped_blocks"] == 0
    tables = arena_of(pair).tables
    assert np.count_nonzero(tables.slot_parent[tables.slot_state == READY] < 0) == 1
    assert pair.serve(Request(2, PROMPT)) == (NUM_BLOCKS - 1) * BLOCK


def test_a_saved_block_costs_its_key_and_its_page(pair: Pair) -> None:
    request = Request(1, PROMPT)
    pair.query(request)
    meta = pair.plan(request)
    sent = len(pickle.dumps(meta)) - len(pickle.dumps(ConnectorMeta()))
    assert sent < 36 * NUM_BLOCKS + 500


def test_all_requests_of_one_pass_are_saved(pair: Pair) -> None:
    requests = [Request(n, PROMPT[n * 60 * BLOCK : (n + 1) * 60 * BLOCK]) for n in range(3)]
    for request in requests:
        pair.query(request)
    reports = [
        RequestData(one.request_id, list(one.tokens), list(one.block_ids), 0, len(one.tokens))
        for one in requests
    ]
    meta = pair.scheduler.build_connector_meta(SchedulerOutput(new_requests=reports))
    pair.worker.bind_connector_meta(meta)
    pair.worker.start_load_kv(None)
    for request in requests:
        for index, block_id in enumerate(request.block_ids):
            pair.pool[block_id] = pair.content(request, index)
    pair.end_pass()
    pair.flush()
    for number, request in enumerate(requests):
        assert pair.serve(Request(10 + number, request.tokens)) == 59 * BLOCK


def test_what_was_computed_while_the_tier_was_away_is_counted_when_the_request_ends(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(1, PROMPT[: 9 * BLOCK])
    pair.query(request)
    with monkeypatch.context() as patch:
        patch.setattr(type(pair.worker._rank.shared.link), "arena", None)
        pair.plan(request)
        pair.worker.start_load_kv(None)
        pair.compute(request)
        assert pair.totals["dropped_blocks"] == 0, "a later pass may save them"
        pair.finish(request)
    assert pair.totals["dropped_blocks"] == pair.totals["dropped_blocks_store_down"] == 9


def test_what_the_engine_names_no_page_for_is_counted(pair: Pair) -> None:
    request = Request(1, PROMPT[: 9 * BLOCK])
    pair.query(request)
    request.block_ids[4] = -1
    pair.plan(request)
    pair.worker.start_load_kv(None)
    pair.end_pass()
    pair.finish(request)
    pair.flush()
    assert pair.totals["stored_blocks"] == 4
    assert pair.totals["dropped_blocks"] == pair.totals["dropped_blocks_no_page"] == 5


def test_saves_that_a_defect_prevents_are_counted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvray.engine.rank.split_keys", lambda *_: 1 / 0)
    pair.serve(Request(1, PROMPT[: 9 * BLOCK]))
    assert pair.totals["dropped_blocks"] == pair.totals["dropped_blocks_error"] == 9


def test_saves_for_another_pool_are_counted(pair: Pair) -> None:
    request = Request(1, PROMPT[: 9 * BLOCK])
    pair.query(request)
    meta = pair.plan(request)
    pair.worker.bind_connector_meta(meta._replace(namespace=b"other"))
    pair.worker.start_load_kv(None)
    assert pair.totals["dropped_blocks"] == pair.totals["dropped_blocks_no_pool"] == 9
