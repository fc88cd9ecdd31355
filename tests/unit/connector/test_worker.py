"""Every rank copies what was promised, once, and gives its leases back however that ends."""

from types import SimpleNamespace

import pytest
import torch

from kvray.actors.shard.shard import Shard
from kvray.connector import KvRayScheduler, KvRayWorker
from kvray.connector.base import RequestData, SchedulerOutput
from kvray.engine.meta import ConnectorMeta
from kvray.errors import CorruptBlock, LayoutMismatch, LeaseExpired
from tests.unit.connector.conftest import MakePair, arena_of, leased
from tests.unit.connector.pair import BLOCK, Pair, Request, args_for
from tests.unit.connector.test_scheduler import flip_a_byte

PROMPT = list(range(100, 140))


@pytest.fixture
def warm(shard: Shard, make_pair: MakePair) -> Pair:
    """A pair whose tier has PROMPT."""
    pair = make_pair()
    pair.serve(Request(1, PROMPT))
    pair.flush()
    return pair


def test_loads_are_done_once_a_metadata_and_leases_released_once(warm: Pair) -> None:
    request = Request(2, PROMPT)
    warm.query(request)
    warm.plan(request)
    warm.worker.start_load_kv(None)
    assert leased(warm) == 0
    warm.pool[request.block_ids] = 5.0
    warm.worker.start_load_kv(None)
    assert (warm.pool[request.block_ids] == 5.0).all()
    assert warm.totals["loaded_blocks"] == 9


def test_metadata_that_stays_bound_saves_nothing_again(warm: Pair) -> None:
    request = Request(2, list(range(30)))
    warm.query(request)
    warm.plan(request)
    warm.worker.start_load_kv(None)
    warm.compute(request)
    before = dict(warm.totals)
    warm.worker.start_load_kv(None)
    warm.worker.wait_for_save(None)
    warm.flush()
    assert {**warm.totals, "stored_blocks": 0} == {**before, "stored_blocks": 0}
    assert warm.totals["stored_blocks"] == 10 + 7


def test_nothing_happens_before_the_pool_is_registered(shard: Shard) -> None:
    worker, scheduler = KvRayWorker(args_for()), KvRayScheduler(args_for())
    assert worker.register_forward_pass_callable() is None
    worker.start_load_kv(None)
    worker.wait_for_save(None)
    worker.bind_connector_meta(scheduler.build_connector_meta(SchedulerOutput()))
    worker.start_load_kv(None)
    worker.wait_for_layer_load(0, None)
    worker.save_kv_layer(0, None)
    worker.wait_for_save(None)
    assert worker.get_finished([], []) == ([], [])
    scheduler.shutdown()
    worker.shutdown()


def test_finished_requests_are_returned_exactly_once(warm: Pair) -> None:
    assert warm.worker.get_finished([3, 1], []) == ([3, 1], [])
    assert warm.worker.get_finished([], []) == ([], [])


def test_blocks_are_read_when_wait_for_save_returns(warm: Pair) -> None:
    """Those of a cancelled request are freed right after, and nobody says so."""
    for number in range(20):
        request = Request(number + 10, [number, *PROMPT])
        warm.query(request)
        warm.plan(request)
        warm.worker.start_load_kv(None)
        warm.compute(request)
        warm.pool.fill_(-7.0)
    warm.flush()
    for number in range(20):
        assert warm.serve(Request(number + 50, [number, *PROMPT])) == 10 * BLOCK


@pytest.mark.parametrize("make_pair", ["host"], indirect=True)
def test_a_block_that_changed_under_its_lease_ends_the_engine(warm: Pair) -> None:
    first, second = Request(2, PROMPT), Request(3, PROMPT[:20])
    warm.query(first)
    warm.query(second)
    warm.plan(first)
    flip_a_byte(arena_of(warm), depth=2)
    with pytest.raises(CorruptBlock):
        warm.worker.start_load_kv(None)
    assert leased(warm) == 0


def test_every_lease_is_released_when_a_load_fails(warm: Pair) -> None:
    requests = [Request(number, PROMPT) for number in (2, 3, 4)]
    reports = []
    for request in requests:
        warm.query(request)
        ids = request.block_ids
        reports.append(RequestData(request.request_id, list(PROMPT), ids, 0, 1))
    meta = warm.scheduler.build_connector_meta(SchedulerOutput(new_requests=reports))
    assert len(meta.loads) == 3
    arena_of(warm).release(meta.loads[1].leased.leases[0])
    warm.worker.bind_connector_meta(meta)
    with pytest.raises(LeaseExpired):
        warm.worker.start_load_kv(None)
    assert leased(warm) == 0


def test_a_promise_of_another_namespace_is_not_loaded(warm: Pair) -> None:
    request = Request(2, PROMPT)
    warm.query(request)
    meta = warm.plan(request)
    warm.worker.bind_connector_meta(ConnectorMeta(namespace=b"other", loads=meta.loads))
    with pytest.raises(LayoutMismatch, match="same engine arguments"):
        warm.worker.start_load_kv(None)
    assert leased(warm) == 0


def test_a_pool_that_cannot_be_read_costs_the_save_only(
    warm: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(2, list(range(30)))
    warm.query(request)
    warm.plan(request)
    monkeypatch.setattr(warm.worker._rank.pool, "save", lambda *_: 1 / 0)
    warm.worker.start_load_kv(None)
    warm.compute(request)
    warm.flush()
    assert warm.totals["dropped_blocks"] == 7


def test_two_ranks_hold_parts_of_their_own(shard: Shard, make_pair: MakePair) -> None:
    """Ranks as threads of one process that share their arguments, but for the rank."""

    def args(rank: int) -> SimpleNamespace:
        mapping = SimpleNamespace(to_mapping=lambda: SimpleNamespace(rank=rank))
        return args_for(tensor_parallel_size=2, parallel_config=mapping)

    leader, other = make_pair(args(0)), KvRayWorker(args(1))
    pool = torch.zeros_like(leader.pool)
    other.register_kv_caches(pool)
    request = Request(1, PROMPT)
    leader.query(request)
    other.bind_connector_meta(leader.plan(request))
    leader.worker.start_load_kv(None)
    other.start_load_kv(None)
    pool[request.block_ids] = 1000.0
    other.wait_for_save(None)
    other.register_kv_caches(pool)  # ends what was begun
    assert leader.query(Request(2, PROMPT)) == 0, "one rank's part is no block"
    leader.compute(request)
    leader.flush()

    again = Request(3, PROMPT)
    assert leader.query(again) == 9 * BLOCK
    assert leased(leader) == 18
    other.bind_connector_meta(leader.plan(again))
    leader.worker.start_load_kv(None)
    assert leased(leader) == 9
    other.start_load_kv(None)
    assert leased(leader) == 0
    assert (pool[again.block_ids[:9]] == 1000.0).all()
    assert (leader.pool[again.block_ids[:9]] != 1000.0).all()
    other.shutdown()


def test_pages_that_may_be_given_away_are_fenced_off_once(warm: Pair) -> None:
    """What a request saved is its own while it lives, and read before others may have it."""

    def meta_of(*requests: Request) -> ConnectorMeta:
        reports = [
            RequestData(one.request_id, [], [], len(one.tokens), 1) for one in requests if one
        ]
        return warm.scheduler.build_connector_meta(SchedulerOutput(cached_requests=reports))

    first, second = Request(2, [1, *PROMPT]), Request(3, [2, *PROMPT])
    for request in (first, second):
        warm.query(request)
    meta_of()
    assert not warm.plan(first).is_fenced
    assert warm.plan(second).is_fenced, "the first one was not in the pass"
    assert not meta_of(second).is_fenced
    assert meta_of().is_fenced
    assert not meta_of().is_fenced
    warm.plan(Request(4, PROMPT))
    warm.query(second)
    warm.plan(second)
    warm.query(second)
    assert warm.plan(second).is_fenced, "it started over, with other pages"


def test_what_a_dropped_pass_was_to_save_is_saved_by_the_next(warm: Pair) -> None:
    request = Request(2, [7, *PROMPT])
    warm.query(request)
    warm.plan(request)
    warm.worker.start_load_kv(None)  # and no forward pass
    report = RequestData(request.request_id, [], [], 0, len(request.tokens))
    meta = warm.scheduler.build_connector_meta(SchedulerOutput(cached_requests=[report]))
    assert len(meta.saves[0].pages[0].ids()) == 10
    warm.worker.bind_connector_meta(meta)
    warm.worker.start_load_kv(None)
    warm.compute(request)
    warm.flush()
    assert warm.query(Request(3, request.tokens)) == 10 * BLOCK


@pytest.mark.parametrize("make_pair", ["device"], indirect=True)
def test_a_pass_that_did_not_wait_for_its_layers_fails(warm: Pair) -> None:
    request = Request(2, PROMPT)
    warm.query(request)
    warm.plan(request)
    warm.worker.start_load_kv(None)
    warm.worker.wait_for_layer_load(0, None)
    with pytest.raises(LayoutMismatch, match=r"without the hook"):
        warm.worker.wait_for_save(None)
    with pytest.raises(LayoutMismatch, match=r"without the hook"):
        warm.worker.get_finished([], [])  # where every runtime ends the engine


def test_a_pass_that_was_dropped_is_fenced_off_from_the_next(warm: Pair) -> None:
    dropped, request = Request(2, PROMPT), Request(3, PROMPT)
    warm.query(dropped)
    warm.plan(dropped)
    warm.worker.start_load_kv(None)
    assert warm.serve(request) == 9 * BLOCK


def test_blocks_of_a_request_are_free_once_they_were_read(warm: Pair) -> None:
    reads = warm.worker._rank.shared.pending_reads
    reads.begin(7)
    is_host = warm.worker._rank.shared.pool.is_host
    assert warm.scheduler.request_finished(Request(7, [1]), []) is not is_host
    assert warm.worker.get_finished([7, 8], []) == ([7, 8] if is_host else [8], [])
    assert warm.worker.get_finished([], []) == ([], [])
    reads.end(7)
    assert warm.worker.get_finished([], []) == ([] if is_host else [7], [])
    assert warm.worker.get_finished([], []) == ([], [])
