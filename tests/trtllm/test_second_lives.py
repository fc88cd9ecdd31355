"""Ids that come again: engines remember the first request of an id, and report deltas to it."""

from typing import Any

import pytest

from tests.trtllm.conftest import MakeEngine
from tests.trtllm.engine import Engine
from tests.trtllm.shapes import ALL_WINDOWS, BLOCK, FLAT, WINDOWED, Shape
from tests.trtllm.version import WITH_GROUPS, on

PROMPT = list(range(100, 140))
FIRST_LIVES = pytest.mark.parametrize("num_tokens", [1, 40, 41, 70], ids="of_{}_tokens".format)


def warm_engine(make_engine: MakeEngine, shape: Shape = FLAT, **options: Any) -> Engine:
    """Return a new engine whose tier has PROMPT."""
    cold = make_engine(shape=shape)
    cold.serve(PROMPT, max_new=9)
    cold.close()
    return make_engine(shape=shape, **options)


@FIRST_LIVES
@pytest.mark.parametrize("chunk", [None, 2 * BLOCK], ids=["whole", "chunked"])
def test_a_second_life_of_an_id_gets_what_it_was_promised(
    make_engine: MakeEngine, num_tokens: int, chunk: int | None
) -> None:
    warm = warm_engine(make_engine, chunk=chunk)
    first = warm.serve(list(range(num_tokens)), max_new=5)
    second = warm.submit([*PROMPT, *range(20)], max_new=9, request_id=first.request_id)
    other = warm.submit([*PROMPT[:20], 7], max_new=9)
    warm.run()
    assert (second.num_hit, other.num_hit) == (40, 20)


@on(*WITH_GROUPS)
@FIRST_LIVES
@pytest.mark.parametrize("shape", [WINDOWED, ALL_WINDOWS], ids=lambda shape: shape.name)
def test_so_does_one_with_several_layer_groups(
    make_engine: MakeEngine, shape: Shape, num_tokens: int
) -> None:
    warm = warm_engine(make_engine, shape, chunk=2 * BLOCK)
    first = warm.serve(list(range(num_tokens)), max_new=5)
    second = warm.submit(PROMPT, max_new=5, request_id=first.request_id)
    warm.run()
    assert second.num_hit == 36


@FIRST_LIVES
def test_what_a_second_life_computes_of_its_prompt_is_saved_under_its_own_keys(
    make_engine: MakeEngine, num_tokens: int
) -> None:
    cold = make_engine(is_flat=True)
    first = cold.serve(list(range(num_tokens)), max_new=9)
    cold.submit(PROMPT, max_new=9, request_id=first.request_id)
    cold.run()
    cold.close()
    warm = make_engine(is_flat=True)
    assert warm.serve(PROMPT, max_new=2).num_hit == 36
    answers = [*PROMPT, *first.tokens[40:]]
    warm.serve(answers, max_new=2)
    warm.serve(first.tokens, max_new=2)


def test_an_id_may_come_again_after_a_cancelled_request(make_engine: MakeEngine) -> None:
    warm = warm_engine(make_engine)
    victim = warm.submit(list(range(50)), max_new=20)
    for _ in range(3):
        warm.step()
    warm.kill(victim)
    second = warm.submit(PROMPT, max_new=5, request_id=victim.request_id)
    warm.run()
    assert second.num_hit == 36


@on(*WITH_GROUPS)
@pytest.mark.parametrize("num_tokens", [0, 10], ids=["a_new_id", "a_known_id"])
def test_nothing_is_saved_of_a_second_life_that_nobody_asked_about(
    make_engine: MakeEngine, num_tokens: int
) -> None:
    """The first was cancelled between the question and its report."""
    cold = make_engine()
    before = cold.serve([5] * num_tokens) if num_tokens else None
    first = cold.submit(PROMPT, request_id=before and before.request_id)
    cold.at["asked"] = lambda engine: engine.kill(first)
    cold.step()
    cold.at.clear()
    others = list(range(500, 540))
    cold.submit(
        others,
        max_new=9,
        request_id=first.request_id,
        is_generation_only_request=True,
        cache_salt="other",
    )
    cold.run()
    cold.close()
    warm = make_engine()
    assert [warm.serve(prompt).num_hit for prompt in (PROMPT, others)] == [0, 0]
