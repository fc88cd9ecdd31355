"""All blocks that one pass computes are saved, however many; what is not is counted."""

import pickle

import numpy as np
import pytest

from kvray.actors.shard.shard import Shard
from kvray.connector.base import RequestData, SchedulerOutput
from kvray.engine import key_board
from kvray.engine.meta import ConnectorMeta
from kvray.store.arena.layout import READY
from tests.unit.connector.conftest import MakePair, arena_of
from tests.unit.connector.pair import BLOCK, Pair, Request

NUM_BLOCKS = 180
PROMPT = list(range(NUM_BLOCKS * BLOCK))
BOARD_KEYS = 128


@pytest.fixture
def pair(shard: Shard, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """An engine whose key board has room for `BOARD_KEYS`, and whose arena has room for more."""
    monkeypatch.setattr(key_board, "_BOARD_BYTES", 4096)
    return make_pair(shape=(256, 2, 2, 8))


def test_a_pass_saves_more_blocks_than_its_key_board_has_room_for(pair: Pair) -> None:
    request = Request(1, PROMPT)
    pair.serve(request)
    pair.flush()
    assert pair.totals["stored_blocks"] == NUM_BLOCKS
    assert pair.totals["dropped_blocks"] == 0
    tables = arena_of(pair).tables
    assert np.count_nonzero(tables.slot_parent[tables.slot_state == READY] < 0) == 1
    assert pair.serve(Request(2, PROMPT)) == (NUM_BLOCKS - 1) * BLOCK


def test_only_keys_that_the_board_has_no_room_for_travel(pair: Pair) -> None:
    request = Request(1, PROMPT)
    pair.query(request)
    meta = pair.plan(request)
    assert [len(one.pages[0].ids()) for one in meta.saves] == [BOARD_KEYS, NUM_BLOCKS - BOARD_KEYS]
    sent = len(pickle.dumps(meta)) - len(pickle.dumps(ConnectorMeta()))
    assert sent < 4 * NUM_BLOCKS + 32 * (NUM_BLOCKS - BOARD_KEYS + 1) + 500


def test_requests_of_one_pass_share_the_board_and_all_are_saved(pair: Pair) -> None:
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


def test_without_room_for_a_board_the_keys_travel(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvray.engine.pass_plan.open_board", lambda *_, **__: None)
    assert pair.serve(Request(1, PROMPT)) == 0
    pair.flush()
    assert pair.totals["stored_blocks"] == NUM_BLOCKS
    assert arena_of(pair).stats()["blocks"] == NUM_BLOCKS


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


def test_blocks_whose_keys_are_lost_are_counted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvray.engine.rank.read_keys", lambda *_: None)
    pair.serve(Request(1, PROMPT[: 9 * BLOCK]))
    assert pair.totals["dropped_blocks"] == pair.totals["dropped_blocks_keys_lost"] == 9


def test_saves_that_a_defect_prevents_are_counted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvray.engine.rank.read_keys", lambda *_: 1 / 0)
    pair.serve(Request(1, PROMPT[: 9 * BLOCK]))
    assert pair.totals["dropped_blocks"] == pair.totals["dropped_blocks_error"] == 9


def test_saves_for_another_pool_are_counted(pair: Pair) -> None:
    request = Request(1, PROMPT[: 9 * BLOCK])
    pair.query(request)
    meta = pair.plan(request)
    pair.worker.bind_connector_meta(meta._replace(namespace=b"other"))
    pair.worker.start_load_kv(None)
    assert pair.totals["dropped_blocks"] == pair.totals["dropped_blocks_no_pool"] == 9
