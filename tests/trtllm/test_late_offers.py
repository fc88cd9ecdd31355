"""Offers that are resolved late, in part or never, and requests whose blocks are taken away."""

import pytest

from tests.trtllm.conftest import MakeEngine, leased
from tests.trtllm.engine import Engine
from tests.trtllm.shapes import BLOCK, FLAT, WINDOWED, Shape
from tests.trtllm.version import WITH_GROUPS, on

SHAPES = pytest.mark.parametrize("shape", [FLAT, WINDOWED], ids=lambda shape: shape.name)

PROMPT = list(range(100, 140))


def warm_engine(make_engine: MakeEngine, shape: Shape = FLAT) -> Engine:
    """Return a new engine whose tier has PROMPT."""
    cold = make_engine(shape=shape)
    cold.serve(PROMPT, max_new=9)
    cold.close()
    return make_engine(shape=shape, num_pages=96)


@on(*WITH_GROUPS)
@SHAPES
def test_a_request_whose_blocks_were_taken_away_starts_over(
    make_engine: MakeEngine, shape: Shape
) -> None:
    warm = warm_engine(make_engine, shape)
    request = warm.submit(PROMPT, max_new=12)
    for num_passes in range(4):
        for _ in range(num_passes):
            warm.step()
        if not request.is_ended:
            warm.preempt(request)
    warm.run()
    assert request.is_ended


@on(*WITH_GROUPS)
def test_a_replay_within_its_first_pass_is_asked_about_and_loaded_again(
    make_engine: MakeEngine,
) -> None:
    warm = warm_engine(make_engine)
    request = warm.submit(PROMPT, max_new=4)

    def take_away(engine: Engine) -> None:
        engine.at.clear()
        engine.preempt(request)

    warm.at["asked"] = take_away
    warm.run()
    assert request.num_hit == 36


@on("feature_branch")
@SHAPES
def test_an_offer_waits_for_a_request_that_is_left_out_of_batches(
    make_engine: MakeEngine, shape: Shape
) -> None:
    warm = warm_engine(make_engine, shape)
    late = warm.submit(PROMPT, max_new=4)
    warm.submit(list(range(20)), max_new=8)
    warm.admission.defers = lambda request: request is late
    for _ in range(5):
        warm.step()
    warm.admission.defers = lambda _request: False
    warm.run()
    assert late.num_hit == 36


@on("feature_branch")
def test_an_offer_that_nobody_comes_back_for_is_released(
    make_engine: MakeEngine, shard: object
) -> None:
    warm = warm_engine(make_engine)
    late = warm.submit(PROMPT, max_new=4)
    warm.admission.defers = lambda request: request is late
    warm.step()
    assert leased(shard) > 0
    warm.kill(late)
    assert leased(shard) == 0


@on("feature_branch")
@pytest.mark.parametrize("end", [8, 6, 5])
@SHAPES
def test_the_head_of_an_offer_may_be_handed_back(
    make_engine: MakeEngine, shape: Shape, end: int
) -> None:
    """Another request has computed it meanwhile; the tail is loaded."""
    warm = warm_engine(make_engine, shape)
    late = warm.submit(PROMPT, max_new=4)
    warm.admission.defers = lambda request: request is late
    warm.step()
    warm.overtake(late, end)
    warm.admission.defers = lambda _request: False
    warm.run()
    assert late.num_hit == 36 - end


@on("feature_branch")
@pytest.mark.parametrize("taken", [0, 1, 3])
@SHAPES
def test_the_tail_of_a_late_offer_may_be_handed_back(
    make_engine: MakeEngine, shape: Shape, taken: int
) -> None:
    warm = warm_engine(make_engine, shape)
    late = warm.submit(PROMPT, max_new=4)
    warm.admission.defers = lambda request: request is late
    warm.admission.accept = lambda _request, offer: min(offer, taken * BLOCK)
    warm.step()
    warm.admission.defers = lambda _request: False
    warm.run()
    assert late.num_hit == taken * BLOCK
