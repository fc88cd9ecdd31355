"""Which blocks a bounded set has."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvray.routing import Lru


def test_leading_blocks_of_what_was_used_are_there() -> None:
    pool = Lru[str](10)
    pool.use("abc")
    assert pool.leading("abcd") == 3
    assert pool.leading("xyz") == 0


def test_the_oldest_prompt_goes_first_and_its_leaves_before_its_root() -> None:
    pool = Lru[str](4)
    pool.use("ab")
    pool.use("xy")
    assert pool.use("z") == ["b"]
    assert pool.use("w") == ["a"]
    assert pool.leading("xy") == 2


def test_what_is_used_again_stays() -> None:
    pool = Lru[str](4)
    pool.use("ab")
    pool.use("xy")
    pool.use("ab")
    assert pool.use("zw") == ["y", "x"]
    assert pool.leading("ab") == 2


def test_of_a_prompt_larger_than_the_pool_the_leading_blocks_stay() -> None:
    pool = Lru[str](3)
    assert pool.use("abcde") == ["e", "d"]
    assert pool.leading("abcde") == 3


@given(st.integers(1, 8), st.lists(st.lists(st.integers(0, 12), unique=True, max_size=10)))
def test_it_is_bounded_and_least_recently_used(size: int, prompts: list[list[int]]) -> None:
    pool, model = Lru[int](size), OrderedDict[int, None]()
    for prompt in prompts:
        gone = pool.use(prompt)
        for block in reversed(prompt):
            model.pop(block, None)
            model[block] = None
        assert gone == [model.popitem(last=False)[0] for _ in range(max(0, len(model) - size))]
        there = [block in model for block in prompt]
        assert pool.leading(prompt) == [*there, False].index(False)
