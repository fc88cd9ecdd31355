"""Every rank copies what was promised, once, and gives its leases back however that ends."""

import contextlib
import itertools
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvray.connector.base import RequestData, SchedulerOutput
from kvray.engine.meta import PageIds, Release, SavePlan
from kvray.errors import KVRayError, LayoutMismatch
from kvray.store import Lease
from tests.examples import examples
from tests.kit.connector import BLOCK, HIT, NUM_BLOCKS, PROMPT, Request, args_for
from tests.kit.devices import HostDevice


def test_metadata_that_stays_bound_loads_and_saves_nothing_again(warm):
    request = Request(2, [*PROMPT, *range(30)])
    warm.begin(request)
    warm.pool[request.block_ids] = 5.0
    warm.worker.start_load_kv(None)
    assert (warm.pool[request.block_ids] == 5.0).all()
    assert warm.totals["loaded_blocks"] == 10
    warm.compute(request)
    warm.worker.start_load_kv(None)
    warm.worker.wait_for_save(None)
    warm.flush()
    assert (warm.totals["loaded_blocks"], warm.totals["stored_blocks"]) == (10, 10 + 7)


@pytest.mark.parametrize("make_pair", ["device"], indirect=True)
@pytest.mark.parametrize("is_partial", [False, True])
def test_a_pass_waits_for_what_it_saves_where_the_engine_copies_over_pages(make_pair, is_partial):
    pair = make_pair(args_for(cache={"enable_partial_reuse": is_partial}))
    calls = mock.Mock()
    pair.worker._rank.saver.fence = calls.fence
    pair.worker._rank.pool.settle = calls.settle
    request = Request(2, PROMPT)
    pair.begin(request)
    pair.compute(request)
    assert calls.mock_calls == ([mock.call.fence(), mock.call.settle()] if is_partial else [])


@pytest.mark.parametrize("make_pair", ["device"], indirect=True)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("refills", [False, True])
def test_no_stream_waits_where_that_changes_inputs(make_pair, monkeypatch, is_compiled, refills):
    monkeypatch.setattr("kvray.connector.start._refills_inputs", lambda _: refills)
    changes = {"cache": {"enable_partial_reuse": False}, "torch_compile_enabled": is_compiled}
    pair = make_pair(args_for(**changes))
    pair.store(PROMPT)
    rank, calls, request = pair.worker._rank, mock.Mock(), Request(2, PROMPT)
    monkeypatch.setattr(rank.pool, "fence", calls.fence)
    monkeypatch.setattr(rank.pool, "settle", calls.settle)
    monkeypatch.setattr(HostDevice, "query", lambda _: False)  # copies are under way until asked
    pair.query(request)
    pair.worker.bind_connector_meta(pair.plan(request)._replace(is_fenced=True))
    pair.worker.start_load_kv(None)
    settled = [mock.call.settle()] if refills else []
    assert calls.mock_calls == [mock.call.fence(None), *settled]
    assert bool(rank._loading) != (refills and is_compiled), "it waits itself for what it loads"
    pair.compute(request)


def test_pages_that_may_be_given_away_are_fenced_off_once(warm):
    """What a request saved is its own while it lives, and read before others may have it."""

    def is_fenced(*requests: Request) -> bool:
        reports = [RequestData(one.request_id, [], [], len(one.tokens), 1) for one in requests]
        output = SchedulerOutput(cached_requests=reports)
        return bool(warm.scheduler.build_connector_meta(output).is_fenced)

    first, second = Request(2, [1, *PROMPT]), Request(3, [2, *PROMPT])
    for request in (first, second):
        warm.query(request)
    is_fenced()
    assert not warm.plan(first).is_fenced
    assert warm.plan(second).is_fenced, "the first one was not in the pass"
    assert [is_fenced(second), is_fenced(), is_fenced()] == [False, True, False]
    warm.plan(Request(4, PROMPT))
    warm.query(second)
    warm.plan(second)
    warm.query(second)
    assert warm.plan(second).is_fenced, "it started over, with other pages"


def test_what_a_dropped_pass_was_to_save_is_saved_by_the_next(warm):
    request = Request(2, [7, *PROMPT])
    warm.begin(request)  # and no forward pass
    report = RequestData(request.request_id, [], [], 0, len(request.tokens))
    meta = warm.scheduler.build_connector_meta(SchedulerOutput(cached_requests=[report]))
    assert len(meta.saves[0].pages[0].ids()) == 10
    warm.worker.bind_connector_meta(meta)
    warm.worker.start_load_kv(None)
    warm.compute(request)
    warm.flush()
    assert warm.query(Request(3, request.tokens)) == 10 * BLOCK


@pytest.mark.parametrize("make_pair", ["device"], indirect=True)
def test_a_pass_that_did_not_wait_for_its_layers_fails(warm):
    request = Request(2, PROMPT)
    warm.begin(request)
    warm.worker.wait_for_layer_load(0, None)
    with pytest.raises(LayoutMismatch, match=r"without the hook"):
        warm.worker.wait_for_save(None)
    with pytest.raises(LayoutMismatch, match=r"without the hook"):
        warm.worker.get_finished([], [])  # where every runtime ends the engine


def test_the_engine_keeps_no_blocks_for_a_save_and_hears_of_each_id_once(warm):
    reads = warm.engine.pending_reads
    reads.begin(7)
    is_host = warm.engine.identity.is_host
    assert warm.scheduler.request_finished(Request(7, [1]), []) is False
    assert warm.worker.get_finished([7, 8], []) == ([7, 8] if is_host else [8], [])
    assert warm.worker.get_finished([], []) == ([], [])
    reads.end(7)
    assert warm.worker.get_finished([], []) == ([] if is_host else [7], [])
    assert warm.worker.get_finished([], []) == ([], [])


NUMBERS = st.integers(-3, 80) | st.sampled_from([-(2**63), -1, 2**31, 2**63 - 1, 2**64])
IDS = st.lists(st.integers(-2, NUM_BLOCKS + 3), max_size=12)
FUZZED = itertools.count(10)
PAGES = st.tuples(IDS.map(PageIds.of)) | st.tuples(st.binary(max_size=9).map(PageIds))


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.fixed_dictionaries(
        {}, optional={"leased_blocks": NUMBERS, "first": NUMBERS, "pages": PAGES}
    ),
    lease=st.none() | st.tuples(NUMBERS, NUMBERS),
    depth=NUMBERS,
    keys=st.binary(max_size=96),
    saved=PAGES,
    released=NUMBERS,
)
def test_metadata_writes_to_named_pages_only(warm, fields, lease, depth, keys, saved, released):
    """It comes from the engine's own leader: this is about versions that differ, and defects."""
    request = Request(next(FUZZED), PROMPT)
    assert warm.query(request) == HIT
    meta = warm.plan(request)
    warm.worker.bind_connector_meta(None)
    warm.scheduler.request_finished(request, request.block_ids)
    (load,) = meta.loads
    ((arena_id, leased),) = load.leased
    if lease is not None:
        other = Lease(lease_id=lease[0], page=lease[1], num_slots=10, check=0)
        fields["leased"] = ((arena_id, other),)
    changed = load._replace(**fields)
    release = Release(0, arena_id, Lease(lease_id=released, page=5, num_slots=1, check=0))
    saves = (SavePlan(99, depth, keys, saved),)
    warm.worker.bind_connector_meta(
        meta._replace(loads=(changed,), saves=saves, releases=(release,))
    )
    before = warm.pool.clone()
    with contextlib.suppress(KVRayError, ValueError, IndexError, OverflowError):
        warm.worker.start_load_kv(None)  # what it raises stops the engine
        warm.end_pass()
    warm.worker._rank.failed.clear()  # an engine of its own for each metadata
    warm.arena.release(leased)
    packed = changed.pages[0].packed
    named = set(changed.pages[0].ids().tolist()) if len(packed) % 4 == 0 else set()
    written = (warm.pool != before).flatten(1).any(dim=1)
    assert set(written.nonzero().flatten().tolist()) <= named
    # What was promised rightly goes on to be served.
    warm.worker.bind_connector_meta(None)
    assert warm.serve(Request(next(FUZZED), PROMPT)) == HIT
