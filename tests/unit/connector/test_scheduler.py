"""The leader promises what is leased and valid, and gives back what was not used."""

import logging
from unittest import mock

import pytest

from kvray.connector.base import RequestData, SchedulerOutput
from kvray.errors import LayoutMismatch, LeaseExpired, ShardUnavailable
from kvray.store import Arena
from tests.kit.connector import BLOCK, HIT, PROMPT, Request, args_for


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


def test_where_its_page_may_not_be_written_it_gets_nothing_and_one_warning(make_pair, caplog):
    pair = make_pair(args_for(torch_compile_enabled=True))
    pair.store(PROMPT)
    # A last block that is begun is found also where none is found in part, and is all there is.
    pair.query(Request(4, PROMPT), len(PROMPT) - 1)
    assert "enable_partial_reuse" not in caplog.text
    for request_id in (2, 3):
        request = Request(request_id, PROMPT)
        assert pair.scheduler.get_num_new_matched_tokens(request, BLOCK + 1) == (0, False)
    assert caplog.text.count("enable_partial_reuse: false") == 1
    assert pair.totals["miss_tokens_unaligned"] == 2 * (len(PROMPT) - BLOCK - 1 - BLOCK)


def test_a_promise_that_was_taken_without_blocks_ends_the_engine_and_leaves_no_lease(warm):
    taken, broken = Request(2, PROMPT), Request(3, PROMPT)
    warm.query(taken)
    warm.query(broken)
    broken.block_ids = broken.block_ids[:2]
    with pytest.raises(LayoutMismatch):
        warm.plan(broken)
    warm.scheduler.shutdown()
    assert warm.leased == 0


def test_an_engine_that_counts_on_a_promise_given_up_is_stopped(warm):
    request = Request(1, PROMPT)
    warm.query(request)
    assert warm.scheduler.build_connector_meta(SchedulerOutput()).loads == ()
    assert warm.leased == 0
    late = RequestData(1, [], [], HIT, len(PROMPT) - HIT)
    with pytest.raises(LeaseExpired, match="earlier pass"):
        warm.scheduler.build_connector_meta(SchedulerOutput(cached_requests=[late]))


def test_cancelled_requests_are_forgotten_oldest_first(make_pair, monkeypatch):
    monkeypatch.setattr("kvray.engine.leader._STATES_MAX", 3)
    pair = make_pair()
    living = Request(1, PROMPT)
    pair.query(living)
    for request_id in range(2, 9):
        pair.query(Request(request_id, PROMPT[:5]))
        pair.plan(living)
    assert list(pair.scheduler._leader.states) == [7, 8, 1]


@pytest.mark.parametrize("error", [ShardUnavailable("It is gone."), ZeroDivisionError("a bug")])
def test_no_error_of_a_query_reaches_the_engine(warm, monkeypatch, caplog, error):
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
    make_pair().close()
    pair = make_pair()
    pair.scheduler.shutdown()
    pair.scheduler = type(pair.scheduler)(args_for())
    pair.store(PROMPT)
    assert pair.serve(Request(2, PROMPT)) == HIT


def test_a_later_request_of_an_id_that_nobody_asked_about_is_not_taken_for_the_first(pair):
    first, other = Request(1, PROMPT[:6]), list(range(50, 90))
    pair.query(first)
    pair.plan(first)
    pair.scheduler.update_state_after_alloc(Request(1, other), list(range(5, 15)))
    report = RequestData(1, other[6:], list(range(7, 15)), 0, len(other))
    output = SchedulerOutput(cached_requests=[report])
    assert pair.scheduler.build_connector_meta(output).saves == ()
