"""The leader promises what is leased and valid, and gives back what was not used."""

import logging
from unittest import mock

import pytest

from kvray.connector.base import RequestData, SchedulerOutput
from kvray.errors import LayoutMismatch, LeaseExpired, ShardUnavailable
from kvray.store import Arena
from tests.kit.connector import BLOCK, HIT, PROMPT, Request, args_for, flip_a_byte


def test_a_block_of_which_the_engine_has_a_part_is_loaded_from_its_start(warm):
    for request_id, computed in ((2, BLOCK + 1), (3, HIT - 1)):
        request = Request(request_id, PROMPT)
        warm.begin(request, computed)
        assert request.matched == HIT - computed
        warm.check(request, request.matched, computed)
        warm.compute(request)
        warm.finish(request)
    assert warm.query(Request(4, PROMPT), HIT) == 0
    totals = warm.totals
    assert totals["hit_tokens"] == totals["hit_tokens_from_host"] == HIT - BLOCK - 1 + 1
    assert totals["local_tokens"] == BLOCK + 1 + HIT - 1 + HIT
    assert totals["miss_tokens_unaligned"] == 0


@pytest.mark.parametrize("comes_later", [False, True])
@pytest.mark.parametrize("computed", [BLOCK + 1, HIT - 1])
def test_an_offer_in_mid_block_that_is_not_taken_loads_nothing(warm, computed, comes_later):
    """If it is one token, the engine steps back inside the block that it has a part of."""
    request = Request(2, PROMPT)
    assert warm.query(request, computed) == HIT - computed
    if comes_later:  # without its offer
        warm.scheduler.build_connector_meta(SchedulerOutput())
        request.matched = 0
    assert warm.plan(request, computed, accepted=False).loads == ()
    assert warm.leased == 0


@pytest.mark.parametrize(
    "changes", [{"torch_compile_enabled": True}, {"cache": {"enable_partial_reuse": False}}]
)
def test_where_its_page_may_not_be_written_it_gets_nothing_and_one_warning(
    make_pair, caplog, changes
):
    pair = make_pair(args_for(**changes))
    pair.store(PROMPT)
    # A last block that is begun is found also where none is found in part, and is all there is.
    pair.query(Request(4, PROMPT), len(PROMPT) - 1)
    assert "enable_partial_reuse" not in caplog.text
    for request_id in (2, 3):
        request = Request(request_id, PROMPT)
        assert pair.scheduler.get_num_new_matched_tokens(request, BLOCK + 1) == (0, False)
    said = [one for one in caplog.messages if "enable_partial_reuse: false" in one]
    assert len(said) == 1
    assert pair.totals["miss_tokens_unaligned"] == 2 * (len(PROMPT) - BLOCK - 1 - BLOCK)


def test_unused_promises_are_released_by_the_next_metadata(warm):
    for request_id in (2, 2, 3):  # asking again replaces it
        assert warm.query(Request(request_id, PROMPT)) == HIT
    assert warm.leased == 9
    assert warm.scheduler.build_connector_meta(SchedulerOutput()).loads == ()
    assert warm.leased == 0


def test_a_promise_that_the_engine_did_not_take_is_released_and_nothing_is_loaded(warm):
    request = Request(2, PROMPT)
    warm.query(request)
    assert warm.plan(request, accepted=False).loads == ()
    assert warm.leased == 0
    warm.worker.start_load_kv(None)


def test_a_promise_that_was_taken_without_blocks_ends_the_engine_and_leaves_no_lease(warm):
    taken, broken = Request(2, PROMPT), Request(3, PROMPT)
    warm.query(taken)
    warm.query(broken)
    broken.block_ids = broken.block_ids[:2]
    with pytest.raises(LayoutMismatch):
        warm.plan(broken)
    warm.scheduler.shutdown()
    assert warm.leased == 0


def test_a_promise_to_a_later_request_of_an_id_is_kept_from_its_allocation(warm):
    request = Request(1, PROMPT)
    warm.query(request)
    meta = warm.scheduler.build_connector_meta(later(request, 0))
    assert list(meta.loads[0].pages[0].ids()) == request.block_ids[:9]
    warm.worker.bind_connector_meta(meta)
    warm.worker.start_load_kv(None)
    assert warm.totals["errors"] == 0


def test_one_whose_pages_nobody_has_told_stops_the_engine_and_leaves_no_lease(warm):
    assert warm.scheduler.get_num_new_matched_tokens(Request(1, PROMPT), 0) == (HIT, False)
    with pytest.raises(LayoutMismatch, match="0 of them"):
        warm.scheduler.build_connector_meta(later(Request(1, PROMPT), 0))
    assert warm.leased == 0


def test_one_that_counts_on_a_promise_given_up_stops_the_engine(warm):
    request = Request(1, PROMPT)
    warm.query(request)
    warm.scheduler.build_connector_meta(SchedulerOutput())
    with pytest.raises(LeaseExpired, match="earlier pass"):
        warm.scheduler.build_connector_meta(later(request, HIT))


def test_a_later_request_of_an_id_that_nobody_has_asked_about_is_not_taken_for_the_first(pair):
    pair.query(Request(1, PROMPT[:6]))
    pair.plan(Request(1, PROMPT[:6], block_ids=[0, 1]))
    pair.scheduler.update_state_after_alloc(Request(1, range(50, 90)), list(range(5, 15)))
    output = later(Request(1, range(50, 90)), 0)
    output.cached_requests[0].new_tokens = list(range(56, 90))
    output.cached_requests[0].new_block_ids = list(range(7, 15))
    assert pair.scheduler.build_connector_meta(output).saves == ()


def later(request: Request, position: int) -> SchedulerOutput:
    """Return the output of a pass that computes the rest of a request whose id is not new."""
    left = len(request.tokens) - position
    report = RequestData(request.request_id, [], [], position, left)
    return SchedulerOutput(cached_requests=[report])


def test_cancelled_requests_are_forgotten_oldest_first(make_pair, monkeypatch):
    monkeypatch.setattr("kvray.engine.leader._STATES_MAX", 3)
    pair = make_pair()
    living = Request(1, PROMPT)
    pair.query(living)
    for request_id in range(2, 9):
        pair.query(Request(request_id, PROMPT[:5]))
        pair.plan(living)
    assert list(pair.scheduler._leader.states) == [7, 8, 1]


def test_a_corrupt_block_shortens_the_promise_and_is_saved_again(warm):
    before = warm.arena.stats()["corrupt"]
    flip_a_byte(warm.arena, depth=4)
    assert warm.serve(Request(2, PROMPT)) == 4 * BLOCK
    warm.flush()
    assert warm.arena.stats()["corrupt"] == before + 1
    assert warm.serve(Request(3, PROMPT)) == HIT


@pytest.mark.parametrize("error", [ShardUnavailable("It is gone."), ZeroDivisionError("a bug")])
def test_no_error_of_the_query_reaches_the_engine_and_each_is_said_once(
    warm, monkeypatch, caplog, error
):
    monkeypatch.setattr(Arena, "valid", mock.Mock(side_effect=error))
    for request_id in (2, 3):
        assert warm.serve(Request(request_id, PROMPT)) == 0
    assert warm.leased == 0
    assert warm.totals["errors"] == 2
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1


def test_a_defect_in_planning_a_save_costs_the_save_only(pair, monkeypatch):
    request = Request(1, PROMPT)
    pair.query(request)
    monkeypatch.setattr("kvray.engine.leader.SavePlan", lambda **_: 1 / 0)
    assert pair.plan(request).saves == ()
    assert pair.totals["errors"] == 1


def test_a_scheduler_without_a_worker_says_what_to_do(pair, caplog):
    pair.worker.shutdown()
    assert pair.query(Request(1, PROMPT)) == 0
    assert "same configuration file" in caplog.text


def test_halves_that_got_copies_of_the_arguments_find_each_other(make_pair):
    gone = make_pair()
    gone.close()
    pair = make_pair()
    pair.scheduler.shutdown()
    pair.scheduler = type(pair.scheduler)(args_for())
    pair.store(PROMPT)
    assert pair.serve(Request(2, PROMPT)) == HIT
