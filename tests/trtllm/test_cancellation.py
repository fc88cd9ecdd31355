"""Requests end without a word, twice, or unknown, and offers are resolved late, in part or never.

Whatever was promised is released.
"""

import pytest

from tests.trtllm.conftest import PROMPT, leased
from tests.trtllm.engine import Engine
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import BLOCK, FLAT, WINDOWED
from tests.trtllm.version import WITH_GROUPS, on

POINTS = ["asked", "loaded", "passed", "ended"]


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside_another"])
@pytest.mark.parametrize("point", POINTS)
def test_a_request_may_be_gone_at_any_point_of_its_first_pass(make_warm, point, is_alone):
    warm = make_warm()
    other = None if is_alone else warm.submit([*PROMPT[:20], *range(9)], max_new=4)
    victim = warm.submit(PROMPT, max_new=4)

    def cancel(engine: Engine) -> None:
        del engine.at[point]
        engine.kill(victim)

    warm.at[point] = cancel
    warm.run()
    assert victim.is_finished
    assert other is None or other.num_hit == 20
    warm.serve(PROMPT, max_new=4)


@pytest.mark.parametrize("num_passes", range(1, 7))
@pytest.mark.parametrize("is_overlapped", [False, True], ids=["in_turn", "overlapped"])
def test_a_request_may_be_gone_after_any_pass(make_warm, num_passes, is_overlapped):
    warm = make_warm(chunk=BLOCK, is_overlapped=is_overlapped)
    victim = warm.submit([*PROMPT[:20], *range(12)], max_new=9)
    for _ in range(num_passes):
        warm.step()
    if not victim.is_finished:
        warm.kill(victim)
    warm.serve([*PROMPT[:20], *range(12)], max_new=4)


def test_pages_of_a_cancelled_request_are_saved_before_others_get_them(make_engine):
    cold = make_engine(num_pages=24, cache={"enable_block_reuse": True})
    for seed in range(8):
        victim = cold.submit([seed, *PROMPT], max_new=4)
        cold.at["passed"] = lambda engine, one=victim: one.is_finished or engine.kill(one)
        cold.step()
    cold.at.clear()
    cold.close()
    warm = make_engine()
    for seed in range(8):
        assert warm.serve([seed, *PROMPT]).num_hit == 40


def test_a_batch_that_was_loaded_for_and_put_off_comes_back(make_warm):
    warm = make_warm()
    warm.drops_batch = True
    assert warm.serve(PROMPT, max_new=4).num_hit == 36


def test_ends_and_reports_of_the_unknown_are_passed_over_as_are_second_ends(make_engine, version):
    engine = make_engine()
    request = engine.serve(PROMPT)
    for one in (request, request, engine.submit([1, 2, 3])):
        assert not engine.manager.request_finished(one, [[]])
    engine.run()
    unknown = version.RequestData(2**40, [1, 2, 3, 4, 5], [1, 2], 0, 5)
    engine.manager._scheduler_output = version.SchedulerOutput(
        new_requests=[unknown], cached_requests=[unknown]
    )
    engine.manager.handle_metadata()
    engine.ranks.start_load_kv(None)
    assert engine.serve(PROMPT[::-1]).num_hit == 0


def test_ids_are_returned_once_each_also_unknown_ones(make_engine):
    worker = make_engine().workers[0]
    assert worker.get_finished([7], [8, 9]) == ([7], [])
    assert worker.get_finished([], []) == ([], [])


def test_an_idle_engine_may_poll_for_ever(make_warm):
    engine = make_warm()
    assert engine.serve(PROMPT, max_new=2).num_hit == 36
    for _ in range(50):
        engine.step()


SHAPES = pytest.mark.parametrize("shape", [FLAT, WINDOWED], ids=lambda shape: shape.name)


@on(*WITH_GROUPS)
@SHAPES
def test_a_request_whose_blocks_were_taken_away_starts_over(make_warm, shape):
    warm = make_warm(shape=shape, num_pages=96)
    request = warm.submit(PROMPT, max_new=12)
    for num_passes in range(4):
        for _ in range(num_passes):
            warm.step()
        if not request.is_finished:
            warm.preempt(request)
    warm.run()
    assert request.is_finished


@on(*WITH_GROUPS)
def test_a_replay_within_its_first_pass_is_asked_about_and_loaded_again(make_warm):
    warm = make_warm(num_pages=96)
    request = warm.submit(PROMPT, max_new=4)

    def take_away(engine: Engine) -> None:
        engine.at.clear()
        engine.preempt(request)

    warm.at["asked"] = take_away
    warm.run()
    assert request.num_hit == 36


def submit_late(warm: Engine) -> LlmRequest:
    """Have the engine ask about a request, and leave it out of its batches."""
    late = warm.submit(PROMPT, max_new=4)
    warm.cache.defers = lambda request: request is late
    warm.step()
    return late


def run_all(warm: Engine) -> None:
    warm.cache.defers = lambda _request: False
    warm.run()


@on("feature_branch")
@SHAPES
def test_an_offer_waits_for_a_request_that_is_left_out_of_batches(make_warm, shape):
    warm = make_warm(shape=shape, num_pages=96)
    late = submit_late(warm)
    warm.submit(list(range(20)), max_new=8)
    for _ in range(5):
        warm.step()
    run_all(warm)
    assert late.num_hit == 36


@on("feature_branch")
def test_an_offer_that_nobody_comes_back_for_is_released(make_warm, shard):
    warm = make_warm()
    late = submit_late(warm)
    assert leased(shard) > 0
    warm.kill(late)
    assert leased(shard) == 0


@on("feature_branch")
@pytest.mark.parametrize("end", [8, 6, 5])
@SHAPES
def test_the_head_of_an_offer_may_be_handed_back(make_warm, shape, end):
    """Another request has computed it meanwhile; the tail is loaded."""
    warm = make_warm(shape=shape, num_pages=96)
    late = submit_late(warm)
    warm.overtake(late, end)
    run_all(warm)
    assert late.num_hit == 36 - end


@on("feature_branch")
@pytest.mark.parametrize("taken", [0, 1, 3])
@SHAPES
def test_the_tail_of_a_late_offer_may_be_handed_back(make_warm, shape, taken):
    warm = make_warm(shape=shape, num_pages=96)
    warm.cache.accept = lambda _request, offer: min(offer, taken * BLOCK)
    late = submit_late(warm)
    run_all(warm)
    assert late.num_hit == taken * BLOCK
