"""Parked requests wait for their blocks: kept until told and a while longer, then never loaded."""

import time

import pytest

from kvray.actors.shard import Shard
from kvray.connector.base import RequestData, SchedulerOutput
from kvray.connector.meta import ConnectorMeta
from kvray.errors import CorruptBlock, LeaseExpired
from tests.unit.actors.small_shard import wait_for
from tests.unit.connector.conftest import MakePair, arena_of, leased
from tests.unit.connector.pair import BLOCK, Pair, Request
from tests.unit.connector.test_scheduler import flip_a_byte

PROMPT = list(range(100, 140))
PARK_LEASE_S = 0.3


@pytest.fixture
def warm(shard: Shard, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A pair that loads later, and whose tier has PROMPT."""
    monkeypatch.setenv("KVRAY_CONNECTOR__LOAD", "async")
    monkeypatch.setenv("KVRAY_CONNECTOR__PARK_LEASE_S", str(PARK_LEASE_S))
    pair = make_pair()
    pair.serve(Request(1, PROMPT))
    pair.flush()
    return pair


def park(pair: Pair, request: Request) -> None:
    """Ask for the request, and have it parked by the pass of that iteration."""
    request.block_ids = list(range(20, 30))
    pair.pool[request.block_ids] = -1.0
    found = pair.scheduler.get_num_new_matched_tokens(request, 0)
    assert found == (9 * BLOCK, True)
    bind(pair)


def bind(pair: Pair, *reports: RequestData) -> ConnectorMeta:
    meta = pair.scheduler.build_connector_meta(SchedulerOutput(new_requests=list(reports)))
    pair.worker.bind_connector_meta(meta)
    pair.worker.start_load_kv(None)
    return meta


def poll(pair: Pair, request: Request) -> None:
    """Poll as the engine does until the request may go on."""
    said = pair.worker.get_finished([], [request.request_id])[1]
    wait_for(lambda: said or said.extend(pair.worker.get_finished([], [])[1]) or said)
    assert said == [request.request_id]
    assert pair.worker.get_finished([], []) == ([], [])


def resumed(request: Request, position: int = 9 * BLOCK) -> RequestData:
    tokens = list(request.tokens)
    left = len(tokens) - position
    return RequestData(request.request_id, tokens, list(request.block_ids), position, left)


def test_a_parked_request_is_loaded_when_it_comes_back(warm: Pair) -> None:
    request = Request(2, PROMPT)
    park(warm, request)
    assert (warm.pool[request.block_ids] == -1.0).all()
    poll(warm, request)
    assert leased(warm) == 9
    meta = bind(warm, resumed(request))
    assert len(meta.loads) == 1
    for index in range(9):
        assert (warm.pool[request.block_ids[index]] == warm.content(request, index)).all()
    assert leased(warm) == 0


def test_an_engine_that_took_less_gets_less(warm: Pair) -> None:
    request = Request(2, PROMPT)
    park(warm, request)
    poll(warm, request)
    meta = bind(warm, resumed(request, position=4 * BLOCK))
    assert len(meta.loads[0].pages[0].ids()) == 4
    assert (warm.pool[request.block_ids[4:]] == -1.0).all()


def test_a_promise_is_kept_while_the_engine_was_not_told(warm: Pair) -> None:
    park(warm, Request(2, PROMPT))
    time.sleep(PARK_LEASE_S * 1.5)
    bind(warm)
    assert leased(warm) == 9


def test_one_that_does_not_come_back_is_given_up_and_stops_the_engine_if_it_does(
    warm: Pair,
) -> None:
    request = Request(2, PROMPT)
    park(warm, request)
    poll(warm, request)
    bind(warm)
    assert leased(warm) == 9
    time.sleep(PARK_LEASE_S * 1.1)
    bind(warm)
    assert leased(warm) == 0
    with pytest.raises(LeaseExpired, match="park_lease_s"):
        bind(warm, resumed(request))
    assert (warm.pool[request.block_ids] == -1.0).all()


def test_one_that_ends_while_parked_gives_its_lease_back(warm: Pair) -> None:
    request = Request(2, PROMPT)
    park(warm, request)
    assert not warm.scheduler.request_finished(request, [])
    assert leased(warm) == 0
    poll(warm, request)


def test_a_block_that_proves_corrupt_while_parked_is_never_loaded(warm: Pair) -> None:
    flip_a_byte(arena_of(warm), depth=3)
    request = Request(2, PROMPT)
    park(warm, request)
    poll(warm, request)
    with pytest.raises(CorruptBlock, match="load: sync"):
        bind(warm, resumed(request))
    assert (warm.pool[request.block_ids] == -1.0).all()
    assert leased(warm) == 0


def test_a_miss_is_never_parked(warm: Pair) -> None:
    assert warm.scheduler.get_num_new_matched_tokens(Request(2, [1, 2, 3]), 0) == (0, False)
