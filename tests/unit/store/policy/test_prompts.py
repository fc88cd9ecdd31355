"""Prompts: which goes on with which, what became of their blocks, and that few are remembered."""

import math

import numpy as np
import pytest

from kvray.store.policy import Gittins, prompts
from kvray.store.policy.prompts import Prompts
from tests.unit.store.policy.small_cache import use


def turn_of(known: Prompts, number: int) -> int:
    return int(known._turn[number % prompts._PROMPTS])


def returned_after(known: Prompts, number: int, place: int) -> float:
    return float(known._returned[number % prompts._PROMPTS, place])


def is_watched(known: Prompts, number: int, place: int) -> bool:
    return bool(known._hits[number % prompts._PROMPTS, place] >= 0)


@pytest.fixture
def known() -> Prompts:
    return Prompts()


def ended(known: Prompts, names: list[int], *, now: float = 0.0) -> int:
    """Enter a prompt of these blocks; return its number."""
    number = known.begin(now=now)
    known.use(number, names, now=now)
    known.measure(number, length=len(names), num_stored=len(names), num_new=len(names))
    known.end(number, names[-min(4, len(names))])
    return number


def test_a_prompt_that_goes_on_with_another_is_its_next_turn(known):
    numbers = [ended(known, list(range(5 * turn + 5)), now=float(turn)) for turn in range(5)]
    assert [turn_of(known, number) for number in numbers] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("num_equal", "turn"), [(7, 1), (6, 0)])
def test_the_last_three_blocks_may_differ_but_no_more(known, num_equal, turn):
    ended(known, list(range(10)))
    assert turn_of(known, ended(known, [*range(num_equal), 100, 101, 102, 103])) == turn


def test_of_two_that_it_goes_on_with_the_later_turn_counts(known):
    for turn in range(3):
        ended(known, list(range(5 * turn + 5)))
    ended(known, [*range(15), *range(100, 110)])  # turn 3
    assert turn_of(known, ended(known, [*range(15), *range(100, 120)])) == 4
    assert turn_of(known, ended(known, [*range(12), *range(200, 210)])) >= 1


def test_turns_are_counted_though_earlier_blocks_were_evicted():
    policy = Gittins(64)
    for turn in range(4):  # nothing is ever found, all is stored again
        names = list(range(6 * turn + 6))
        policy.stored(use(range(len(names)), names, now=10.0 * turn))
    assert [turn_of(policy._prompts, number) for number in range(4)] == [0, 1, 2, 3]
    policy = Gittins(64)  # only the tail was evicted
    policy.stored(use(range(10), range(10)))
    policy.used(use(range(3), range(3), length=15, now=5.0))
    policy.stored(use(range(20, 32), range(3, 15), depth=3, now=5.0, parent=2))
    assert turn_of(policy._prompts, 1) == 1


def test_a_watched_block_returns_when_it_is_used_again(known):
    number = known.begin(now=100.0)
    known.watch(number, 2, 77, hits=0, depth=3)
    assert is_watched(known, number, 2)
    assert returned_after(known, number, 2) == math.inf
    known.use(known.begin(now=130.0), [1, 77, 2], now=130.0)
    assert returned_after(known, number, 2) == 30.0
    known.use(known.begin(now=190.0), [77], now=190.0)
    assert returned_after(known, number, 2) == 30.0, "it is watched for one return"


def test_a_block_takes_the_place_of_another_and_has_one_place_of_a_prompt(known):
    number = known.begin(now=0.0)
    for place, name in ((1, 70), (1, 71), (0, 72), (3, 72)):
        known.watch(number, place, name, hits=0, depth=0)
    known.use(known.begin(now=9.0), [70], now=9.0)
    assert returned_after(known, number, 1) == math.inf
    known.use(known.begin(now=11.0), [71, 72], now=11.0)
    assert [returned_after(known, number, place) for place in (1, 3)] == [11.0, 11.0]
    assert not is_watched(known, number, 0)


def test_use_tells_how_many_leading_blocks_were_known(known):
    number = known.begin(now=0.0)
    known.watch(number, 0, 10, hits=0, depth=0)
    known.watch(number, 3, 15, hits=0, depth=5)
    later = known.begin(now=1.0)
    assert known.use(later, [10, 11, 12], now=1.0) == 1
    assert known.use(later, [10, 11, 12, 13, 14, 15, 16], now=1.0) == 6
    assert known.use(later, [90, 91], now=1.0) == 0


def test_a_prompt_is_forgotten_when_so_many_came_after_it(monkeypatch):
    monkeypatch.setattr(prompts, "_PROMPTS", 16)
    known = Prompts()
    number = ended(known, list(range(10)))
    known.watch(number, 0, 500, hits=0, depth=0)
    assert known.num_stored(number) == 10
    for at in range(16):
        ended(known, [1000 + at])
    assert known.num_stored(number) == -1
    assert turn_of(known, ended(known, list(range(12)))) == 0
    assert known.use(known.begin(now=0.0), [500], now=0.0) == 0


def test_blocks_of_forgotten_prompts_are_worth_nothing(monkeypatch):
    monkeypatch.setattr(prompts, "_PROMPTS", 128)
    known = Prompts()
    for at in range(400):
        number = known.begin(now=float(at))
        known.use(number, [at % 3], now=float(at))
        known.measure(number, length=1, num_stored=1, num_new=0)
        known.watch(number, 0, at % 3, hits=1, depth=0)
    numbers, ones = np.array([100, 398]), np.ones(2, dtype=np.int64)
    forgotten, known_still = known.worth(numbers, 0 * ones, ones, now=400.0)
    assert forgotten == 0 < known_still
    assert known.chance(numbers, 0 * ones, ones, now=400.0)[0] == 0


def test_classes_part_where_the_prompts_do():
    """Short prompts come back here, long ones do not; no length is written down anywhere."""
    for scale in (1, 40):
        known = Prompts()
        for at in range(600):
            length = scale * (3 if at % 2 else 60)
            names = [100_000 * at + block for block in range(length)]
            number = ended(known, names, now=10.0 * at)
            known.watch(number, 0, names[0], hits=0, depth=0)
            if at % 2:
                known.use(ended(known, [-at], now=10.0 * at + 4), names[:1], now=10.0 * at + 4)
        short = ended(known, list(range(10**10, 10**10 + 3 * scale)), now=1e4)
        long = ended(known, list(range(10**9, 10**9 + 60 * scale)), now=1e4)
        numbers, zeros = np.array([short, long]), np.zeros(2, dtype=np.int64)
        worth = known.worth(numbers, zeros, zeros, now=1e4)
        assert worth[0] > 3 * worth[1]
