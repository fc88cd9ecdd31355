"""What has to be written so that blocks are below with all their ancestors, and in which order."""

import random
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.identity.block import BlockKey
from kvray.store.arena.tables import Array, Tables
from kvray.store.demoter import paths_to
from tests.examples import examples
from tests.unit.store.small_arena import chain, make_tables, put


def paths(tables: Tables, wanted: Array | list[int], below: Array | list[int]) -> list[list[int]]:
    is_below = np.zeros(tables.geometry.num_slots, dtype=bool)
    is_below[np.array(below, dtype=np.int64)] = True
    found = paths_to(tables, np.array(wanted, dtype=np.int64), is_below.__getitem__)
    return [path.tolist() for path in found]


def test_a_block_takes_all_its_ancestors_along(tables: Tables) -> None:
    slots = put(tables, chain(5)).slots
    assert paths(tables, slots[3:4], []) == [slots[:4].tolist()]


def test_what_is_below_is_not_written_again(tables: Tables) -> None:
    slots = put(tables, chain(5)).slots
    assert paths(tables, slots, slots[:3]) == [slots[3:].tolist()]
    assert paths(tables, slots[:3], slots[:3]) == []


def test_nothing_is_written_for_nothing(tables: Tables) -> None:
    put(tables, chain(5))
    assert paths(tables, [], []) == []


def test_a_block_that_is_wanted_twice_is_written_once(tables: Tables) -> None:
    slots = put(tables, chain(2)).slots
    assert paths(tables, slots[[1, 1, 0]], []) == [slots.tolist()]


def test_the_trunk_of_a_fork_is_written_once(tables: Tables) -> None:
    trunk, keys = chain(2), {name: chain(2, seed=name) for name in "lr"}
    at = put(tables, trunk).slots.tolist()
    left = put(tables, keys["l"], parent=trunk[1], depth=2).slots.tolist()
    right = put(tables, keys["r"], parent=trunk[1], depth=2).slots.tolist()
    found = paths(tables, [left[1], right[1]], [])
    assert sorted(found) in (
        sorted([at + left, right]),
        sorted([at + right, left]),
    )
    assert found[0][:2] == at, "the trunk comes first"


def test_prompts_without_a_common_block_are_paths_of_their_own(tables: Tables) -> None:
    one, two = put(tables, chain(3, seed="a")).slots, put(tables, chain(2, seed="b")).slots
    found = paths(tables, [one[2], two[1]], [])
    assert sorted(found) == sorted([one.tolist(), two.tolist()])


def forest(seed: int) -> Tables:
    """Return tables with a random forest, of which each piece hangs from any block before it."""
    tables, rng = make_tables(), random.Random(seed)
    known: list[tuple[BlockKey, int]] = []
    for number in range(rng.randrange(1, 12)):
        parent, depth = rng.choice(known) if known and rng.random() < 0.7 else (None, -1)
        keys = chain(rng.randrange(1, 6), seed=f"{seed}, {number}")
        put(tables, keys, parent=parent, depth=depth + 1)
        known += [(key, depth + 1 + at) for at, key in enumerate(keys)]
    return tables


def ancestry(tables: Tables, slot: int) -> list[int]:
    """Return a block and those before it, up to its root."""
    line = [slot]
    while tables.slot_parent[line[-1]] >= 0:
        line.append(int(tables.slot_parent[line[-1]]))
    return line


@settings(max_examples=examples(150), derandomize=True)
@given(st.integers(0, 10**6), st.data())
def test_paths_bring_down_just_what_is_missing(seed: int, data: st.DataObject) -> None:
    tables = forest(seed)
    used = np.flatnonzero(tables.slot_state).tolist()
    wanted = data.draw(st.lists(st.sampled_from(used), max_size=12))
    # What is below has its ancestors there, too, or has not.
    below = set(data.draw(st.lists(st.sampled_from(used), max_size=6)))
    if data.draw(st.booleans()):
        below = {one for slot in below for one in ancestry(tables, slot)}
    found = paths(tables, wanted, sorted(below))

    expected = set()
    for slot in wanted:
        for one in ancestry(tables, slot):
            if one in below:
                break
            expected.add(one)
    written = [slot for path in found for slot in path]
    assert len(written) == len(set(written)), "a block is written once"
    assert set(written) == expected

    done = set(below)
    for path in found:
        before = int(tables.slot_parent[path[0]])
        assert before < 0 or before in done, "the block before a path is below by then"
        assert all(tables.slot_parent[b] == a for a, b in pairwise(path))
        done.update(path)
    assert num_paths(tables, expected) == len(found), "no path could go on with another"


def num_paths(tables: Tables, slots: set[int]) -> int:
    """Return the fewest paths that cover a forest: one for each of its leaves."""
    parents = {int(tables.slot_parent[slot]) for slot in slots}
    return len(slots - parents)
