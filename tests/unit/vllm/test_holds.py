"""The scheduler counts its ranks' memory for them: they can take what it has them asked for."""

import random

from kvray.engine.meta import RankLeases
from kvray.vllm.holds import Asked, Hold, Holds

LEASED = RankLeases(("arena",), ())


def begin(holds: Holds, num_blocks: int, *, first: int = 0) -> Asked:
    asked = holds.begin(LEASED, first=first, stop=first + num_blocks)
    assert asked is not None
    return asked


def test_a_hold_is_answered_once_every_rank_has_and_has_what_all_of_them_have() -> None:
    holds = Holds(num_ranks=3, num_blocks=10)
    asked = begin(holds, 6, first=2)
    holds.hear({0: 5}, {0: 1})
    assert not asked.is_answered
    holds.hear({0: 4}, {0: 2})
    assert asked.is_answered
    assert (asked.num_sound, asked.end) == (4, 6)


def test_the_ranks_are_told_once() -> None:
    holds = Holds(num_ranks=1, num_blocks=10)
    asked = begin(holds, 6)
    assert holds.take() == ((Hold(0, LEASED, 0, 6),), ())
    holds.drop(asked)
    assert holds.take() == ((), (0,))
    assert holds.take() == ((), ())


def test_what_is_dropped_before_they_are_told_is_never_told() -> None:
    holds = Holds(num_ranks=2, num_blocks=10)
    holds.drop(begin(holds, 6))
    assert holds.take() == ((), ())
    assert holds.room == 10


def test_no_more_is_held_than_there_is_room_for() -> None:
    holds = Holds(num_ranks=1, num_blocks=10)
    begin(holds, 6)
    assert holds.begin(LEASED, first=0, stop=5) is None
    assert holds.begin(LEASED, first=0, stop=4) is not None


def test_room_comes_back_with_the_load_of_an_answered_hold() -> None:
    holds = Holds(num_ranks=1, num_blocks=10)
    asked = begin(holds, 6)
    holds.take()
    holds.hear({0: 6}, {0: 1})
    assert holds.room == 4
    holds.loaded(asked)
    assert holds.room == 10


def test_room_of_a_dropped_hold_comes_back_when_no_rank_copies_into_it() -> None:
    holds = Holds(num_ranks=2, num_blocks=10)
    asked = begin(holds, 6)
    holds.take()
    holds.drop(asked)
    holds.hear({0: 6}, {0: 1})
    assert holds.room == 4
    holds.hear({0: 0}, {0: 1})
    assert holds.room == 10


def test_after_any_life_all_room_is_back() -> None:
    for seed in range(50):
        chance, holds = random.Random(seed), Holds(num_ranks=2, num_blocks=20)
        living: list[Asked] = []
        silent: list[int] = []
        for _ in range(200):
            act = chance.randrange(4)
            if act == 0 and (made := holds.begin(LEASED, first=0, stop=chance.randrange(1, 9))):
                living.append(made)
            elif act == 1 and living:
                holds.drop(living.pop(chance.randrange(len(living))))
            elif act == 2:
                silent += [hold.hold_id for hold in holds.take()[0] for _ in range(2)]
            elif silent:
                hold_id = silent.pop(chance.randrange(len(silent)))
                holds.hear({hold_id: 1}, {hold_id: 1})
                for one in [one for one in living if one.is_answered and chance.random() < 0.5]:
                    living.remove(one)
                    holds.loaded(one)
        for one in living:
            holds.drop(one)
        silent += [hold.hold_id for hold in holds.take()[0] for _ in range(2)]
        for hold_id in silent:
            holds.hear({hold_id: 1}, {hold_id: 1})
        assert holds.room == 20, seed
