"""LRU, gittins by which prompts came back, and admission to the disk; see also `check_policy`."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.store.arena.tables import Array
from kvray.store.policy import ADMISSIONS, LRU, POLICIES, Gittins, Policy, Use, hazard, prompts
from kvray.store.policy.admission import Admission, Everything, Likely, Twice
from kvray.store.policy.hazard import NUM_AGES
from kvray.store.policy.prompts import Prompts
from tests.conformance import POLICY_BEHAVIOURS, check_policy


def use(slots: Sequence[int], names: Sequence[int], *, depth: int = 0, **more: Any) -> Use:
    """Return a `Use` of all blocks of a prompt, or of those from `depth` on."""
    both = np.array([slots, names], dtype=np.int64)
    return Use(*both, **{"depth": depth, "length": depth + len(slots), "now": 0.0, **more})


@given(st.lists(st.integers(0, 9), max_size=60))
def test_the_block_that_was_used_longest_ago_goes_first(names):
    policy, order = LRU(10), list(range(10))
    for slot in order:
        policy.stored(use([slot], [slot]))
    for name in names:
        policy.used(use([name], [name]))
        order.remove(name)
        order.append(name)
    assert np.argsort(policy.rank(np.arange(10), now=0.0)).tolist() == order


def test_blocks_of_one_use_have_one_rank():
    policy = LRU(4)
    policy.stored(use([2, 0, 3], [10, 11, 12]))
    policy.used(use([2, 0], [10, 11]))
    ranks = policy.rank(np.array([2, 0, 3]), now=0.0)
    assert ranks[0] == ranks[1] > ranks[2]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("behaviour", POLICY_BEHAVIOURS, ids=lambda one: one.__name__)
def test_every_policy(behaviour, name, monkeypatch):
    monkeypatch.setattr(prompts, "_PROMPTS", 512)
    check_policy(behaviour, POLICIES[name])


HOT, COLD = np.arange(4), np.arange(100, 108)


def taught(*observers: Policy | Likely, hot: Array = HOT) -> float:
    """Have one prompt come back every 10 s, and others never; return the time after that."""
    now = 0.0
    for one in observers:
        one.stored(use(hot, hot, now=now))
    for turn in range(300):
        now += 10.0
        for one in observers:
            one.used(use(hot, hot, now=now))
            one.stored(use(COLD, COLD + 1000 * (turn + 1), now=now))
    return now


def test_before_the_first_lesson_the_oldest_goes_first():
    policy = Gittins(30)
    for slot in range(30):
        policy.stored(use([slot], [slot], now=float(slot)))
    policy.used(use([0], [0], now=30.0))
    order = np.argsort(policy.rank(np.arange(30), now=31.0))
    assert order.tolist() == [*range(1, 30), 0]


@pytest.mark.parametrize("hot", [HOT, HOT[:1]], ids=["a prompt", "a single block"])
def test_what_always_returns_outranks_what_never_does_and_is_likelier_to(hot):
    policy = Gittins(200)
    assert (policy.chance(hot, now=0.0) == 1).all(), "nothing is learned yet"
    now = taught(policy, hot=hot)
    soon = policy.rank(hot, now=now + 5).min()
    assert soon > 10 * policy.rank(COLD, now=now + 5).max()
    assert soon > 10 * policy.rank(hot, now=now + 500).max(), "it did not return when it used to"
    assert policy.chance(hot, now=now).min() > 0.8
    assert policy.chance(COLD, now=now).max() < 0.2


@pytest.mark.parametrize(("length", "num"), [(2, 1), (3, 2)])
def test_what_is_stored_after_a_prompts_last_block_belongs_to_it(length, num):
    policy = Gittins(20)
    policy.stored(use(range(length), range(10, 10 + length), now=1.0))
    policy.stored(use([3], [13], depth=2, now=2.0, parent=1))
    assert policy._prompts._count == num


def test_the_number_of_a_forgotten_prompt_means_nothing(monkeypatch):
    monkeypatch.setattr(prompts, "_PROMPTS", 8)
    policy = Gittins(20)
    policy.stored(use([0, 1], [10, 11]))
    for at in range(8):  # the last of these has the row that the first prompt had
        policy.stored(use([2, 3], [20 + 2 * at, 21 + 2 * at], now=1.0 + at))
    before = policy._prompts._count
    policy.stored(use([4], [12], depth=2, now=10.0, parent=1))
    assert policy._prompts._count == before + 1


def test_a_copy_promises_a_tenth_of_the_hits_and_counts_as_ten_times_as_old_before_that():
    assert Gittins(1).rank_of_copies(np.array([5.0, 0.0, -3.0])).tolist() == [0.5, 0.0, -30.0]


# -- prompts: which goes on with which, what became of their blocks, and that few are remembered --


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


@pytest.mark.parametrize(("num_equal", "turn"), [(7, 1), (6, 0)])
def test_the_last_three_blocks_may_differ_but_no_more(known, num_equal, turn):
    ended(known, list(range(10)))
    assert known._turn[ended(known, [*range(num_equal), 100, 101, 102, 103])] == turn


def test_a_prompt_that_goes_on_with_others_is_the_next_turn_of_the_latest(known):
    turns = [ended(known, list(range(5 * turn + 5))) for turn in range(3)]
    assert [known._turn[number] for number in turns] == [0, 1, 2]
    ended(known, [*range(15), *range(100, 110)])  # turn 3
    assert known._turn[ended(known, [*range(15), *range(100, 120)])] == 4
    assert known._turn[ended(known, [*range(12), *range(200, 210)])] >= 1


def test_turns_are_counted_though_earlier_blocks_were_evicted():
    policy = Gittins(64)
    for turn in range(4):  # nothing is ever found, all is stored again
        names = list(range(6 * turn + 6))
        policy.stored(use(range(len(names)), names, now=10.0 * turn))
    assert policy._prompts._turn[:4].tolist() == [0, 1, 2, 3]
    policy = Gittins(64)  # only the tail was evicted
    policy.stored(use(range(10), range(10)))
    policy.used(use(range(3), range(3), length=15, now=5.0))
    policy.stored(use(range(20, 32), range(3, 15), depth=3, now=5.0, parent=2))
    assert policy._prompts._turn[1] == 1


def test_a_watched_block_returns_when_it_is_used_again(known):
    number = known.begin(now=100.0)
    known.watch(number, 2, 77, hits=0, depth=3)
    assert known._returned[number, 2] == math.inf
    for now, names in ((130.0, [1, 77, 2]), (190.0, [77])):
        known.use(known.begin(now=now), names, now=now)
        assert known._returned[number, 2] == 30.0, "it is watched for one return"


def test_a_block_takes_the_place_of_another_and_has_one_place_of_a_prompt(known):
    number = known.begin(now=0.0)
    for place, name in ((1, 70), (1, 71), (0, 72), (3, 72)):
        known.watch(number, place, name, hits=0, depth=0)
    known.use(known.begin(now=9.0), [70], now=9.0)
    assert known._returned[number, 1] == math.inf
    known.use(known.begin(now=11.0), [71, 72], now=11.0)
    assert known._returned[number, [1, 3]].tolist() == [11.0, 11.0]
    assert known._hits[number, 0] < 0, "it is watched in its other place"


def test_use_tells_how_many_leading_blocks_were_known(known):
    number = known.begin(now=0.0)
    known.watch(number, 0, 10, hits=0, depth=0)
    known.watch(number, 3, 15, hits=0, depth=5)
    later = known.begin(now=1.0)
    for names, num_known in ((range(10, 13), 1), (range(10, 17), 6), (range(90, 92), 0)):
        assert known.use(later, list(names), now=1.0) == num_known


def test_a_prompt_is_forgotten_when_so_many_came_after_it(monkeypatch):
    monkeypatch.setattr(prompts, "_PROMPTS", 16)
    known = Prompts()
    number = ended(known, list(range(10)))
    known.watch(number, 0, 500, hits=0, depth=0)
    assert known.num_stored(number) == 10
    for at in range(16):
        ended(known, [1000 + at])
    assert known.num_stored(number) == -1
    assert known._turn[ended(known, list(range(12))) % 16] == 0
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


# -- rates -----------------------------------------------------------------------------------------

EDGES = [0.0, *(4.0 * 2.0**age for age in range(NUM_AGES))]
"""Where the ages begin, and where the last one ends."""


def lives(rates: Array, classes: Array, *, waited: tuple[int, int]) -> tuple[Array, Array]:
    """Return after how many seconds each came back, or for how long it was waited for.

    `rates` are the chances of a return in each class at each age, `classes` those of each life.
    Lives that have not come back end in the ages `waited`, from and below.
    """
    rng = np.random.default_rng(0)
    returns = rng.random((len(classes), NUM_AGES)) < rates[classes]
    age = np.where(returns.any(axis=1), returns.argmax(axis=1), NUM_AGES)
    last = rng.integers(*waited, len(classes))
    has_returned = age < last
    edges = np.array(EDGES)
    age = np.minimum(age, last)
    return rng.uniform(edges[age], edges[age + 1]), has_returned


def test_known_rates_are_found_again_and_those_of_an_unknown_class_from_its_factors():
    factors = (3, 2, 2)
    of_age = 0.02 + 0.1 * np.exp(-0.5 * ((np.arange(NUM_AGES) - 6) / 3) ** 2)
    of_class = np.array([a * b * c for a, b, c in product((0.3, 1, 3), (1, 1), (0.5, 1))])
    true = of_class[:, None] * of_age
    classes = np.random.default_rng(1).integers(0, 12, 200_000)
    classes, is_known = classes[classes != 4], np.arange(12) != 4
    seconds, has_returned = lives(true, classes, waited=(8, 18))
    found = hazard.rates_of(classes, seconds, has_returned, factors=factors)
    # Neighbouring ages are taken together, so a peak is found a little flatter. Later on hardly
    # any of the class with the highest rates is left.
    assert found[is_known, 1:11] == pytest.approx(true[is_known, 1:11], rel=0.25)
    means = found[:, 1:11].mean(axis=1)
    assert means == pytest.approx(true[:, 1:11].mean(axis=1), rel=0.1)


def test_one_return_is_not_believed():
    true = np.full((2, NUM_AGES), 0.01)
    classes = np.append(np.zeros(10_000, dtype=int), 1)
    seconds, has_returned = lives(true, classes, waited=(17, 18))
    seconds[-1], has_returned[-1] = 6.0, True
    found = hazard.rates_of(classes, seconds, has_returned, factors=(1, 2))
    assert found[0, 1] < found[1, 1] < 0.3


def test_rates_are_probabilities_whatever_was_seen_if_anything():
    rng = np.random.default_rng(0)
    for count in (0, 1, 10, 1000):
        classes = rng.integers(0, 12, count)
        seconds = rng.exponential(10.0 ** rng.integers(0, 7, count))
        seconds[: count // 5] = 0.0
        found = hazard.rates_of(classes, seconds, rng.random(count) < 0.9, factors=(2, 3, 2))
        assert found.shape == (12, NUM_AGES)
        assert ((found >= 0) & (found <= 1)).all()
        assert count or ((found > 0) & (found < 0.1)).all()
        assert np.isfinite(hazard.worth_of(found)).all()


def test_ages_share_with_their_neighbours():
    classes, seconds = np.zeros(10_000, dtype=int), np.full(10_000, 100.0)
    has_returned = np.arange(10_000) < 5000
    found = hazard.rates_of(classes, seconds, has_returned, factors=(1,))[0]
    age = int(np.searchsorted(EDGES, 100.0)) - 1
    assert found[age] > found[age - 1] > 10 * found[age - 2]
    assert found[age + 1] > 10 * found[age - 2]


def best_ratio(rates: list[float], age: int) -> float:
    """Try every span from `age` on: hits expected over seconds in the tier."""
    best, stays, hits, place = 0.0, 1.0, 0.0, 0.0
    for at in range(age, NUM_AGES):
        hits += stays * rates[at]
        # Who returns in an age does so in its middle.
        place += stays * (1 - rates[at] + rates[at] / 2) * (EDGES[at + 1] - EDGES[at])
        stays *= 1 - rates[at]
        best = max(best, hits / place)
    return best


def test_worth_is_the_best_ratio_over_all_spans():
    rates = np.random.default_rng(0).random((33, NUM_AGES)) ** 4
    rates[0], rates[1], rates[2] = 0.9, 0.0, 0.9 * (np.arange(NUM_AGES) == 8)
    worth = hazard.worth_of(rates)
    expected = [[best_ratio(one, age) for age in range(NUM_AGES)] for one in rates.tolist()]
    assert worth == pytest.approx(np.array(expected))


def test_chance_is_that_of_any_return_from_there_on():
    rates = np.random.default_rng(1).random((4, NUM_AGES)) * 0.2
    chance = hazard.chance_of(rates)
    for one, age in product(range(4), range(NUM_AGES)):
        assert chance[one, age] == pytest.approx(1 - np.prod(1 - rates[one, age:]))


def test_a_table_is_read_between_its_ages_and_goes_on_as_it_ends():
    table = np.arange(2.0 * NUM_AGES).reshape(2, NUM_AGES) ** 2
    seconds = np.array([*EDGES[1:4], EDGES[3] * 2**0.5, 0.0, 1.0, 1e7, 1e12])
    found = hazard.at(table, np.ones(8, dtype=int), seconds)
    assert found[:4] == pytest.approx([*table[1, 1:4], table[1, 3:5].mean()])
    assert found[4:] == pytest.approx([table[1, 0]] * 2 + [table[1, -1]] * 2, rel=1e-4)


# -- admission to the disk -------------------------------------------------------------------------


def admits(admission: Admission, slots: list[int], names: list[int]) -> list[int]:
    """Return the names that are admitted."""
    mask = admission.admits(*np.array([slots, names], dtype=np.int64), now=0.0)
    assert (mask.dtype, mask.shape) == (bool, (len(slots),))
    return list(np.array(names)[mask])


@pytest.mark.parametrize("name", ADMISSIONS)
@pytest.mark.parametrize("policy", [LRU(4), Gittins(4)], ids=["lru", "gittins"])
def test_every_admission_decides_on_no_blocks(name, policy):
    assert admits(ADMISSIONS[name](4, policy), [], []) == []


def test_everything_admits_everything_and_twice_what_was_found_since_it_was_stored():
    assert admits(Everything(4, LRU(4)), [2, 0], [10, 11]) == [10, 11]
    twice = Twice(4, LRU(4))
    twice.stored(use([0, 1, 2], [10, 11, 12]))
    twice.used(use([0, 1], [10, 11]))
    assert admits(twice, [0, 1, 2], [10, 11, 12]) == [10, 11]
    twice.stored(use([0], [13]))
    assert admits(twice, [0], [13]) == [], "it was another block that was found in its slot"


@pytest.mark.parametrize(
    ("num_slots", "leaving", "admitted"),
    [
        pytest.param(4, [10, 10], [10], id="for the second time"),
        pytest.param(3, [10, 11, 12, 13, 11, 13, 10], [11, 13], id="the latest"),
        pytest.param(2, [10, 11, 12, 10, 13, 10], [10], id="again unadmitted"),
    ],
)
def test_what_leaves_again_soon_is_admitted_also_from_another_slot(num_slots, leaving, admitted):
    twice, found = Twice(num_slots, LRU(num_slots)), list[int]()
    for slot, name in enumerate(leaving):
        twice.stored(use([slot % num_slots], [name]))
        found += admits(twice, [slot % num_slots], [name])
    assert found == admitted


@pytest.mark.parametrize("make", [LRU, Gittins])
def test_what_is_likely_to_come_back_is_admitted(make):
    policy, slots = make(200), np.concatenate((HOT, COLD))
    likely = Likely(200, policy)
    now = taught(policy, likely)
    assert slots[likely.admits(slots, slots, now=now)].tolist() == HOT.tolist()


def test_it_does_not_tell_the_policy_what_that_knows_already():
    alone, policy = Gittins(200), Gittins(200)
    now = taught(policy, Likely(200, policy))
    taught(alone)
    slots = np.concatenate((HOT, COLD))
    assert (policy.rank(slots, now=now) == alone.rank(slots, now=now)).all()
