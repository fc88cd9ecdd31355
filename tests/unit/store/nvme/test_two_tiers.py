"""An arena above a store: what is to go is written before, and comes back as it was."""

import random
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.errors import ShardUnavailable
from kvray.identity.block import BlockKey, head_number
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import key_index
from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array, Tables
from kvray.store.demoter import Demoter, Promoter, paths_to
from kvray.store.nvme import NvmeStore
from kvray.store.nvme.terms import WriteBudget
from kvray.store.retention import Retention
from tests.examples import examples
from tests.unit.store.nvme.small_store import open_store, present, spec
from tests.unit.store.small_arena import SLOT, chain, make_arena, make_tables, put, served, store

FOREVER = float("inf")
UNKNOWN = -1e29
"""What is ranked lower is not known to the policy."""


@pytest.fixture
def arena(directory: Path) -> Iterator[Arena]:
    """An arena of 64 slots, on a real disk like the store."""
    (directory / "arena").mkdir()
    with closing(make_arena(directory / "arena")) as made:
        made.join("shard")
        yield made


@pytest.fixture
def below(directory: Path) -> Iterator[NvmeStore]:
    with closing(open_store(directory / "nvme", spec(num_segments=8))) as made:
        yield made


class Observing(Retention):
    """Has always looked at what was used last."""

    def rank(self, slots: Array) -> Array:
        self.observe()
        return super().rank(slots)


def demoter_of(
    arena: Arena,
    below: NvmeStore,
    *,
    high_watermark: float = 0.5,
    bytes_per_day: float | None = None,
) -> Demoter:
    retention = Observing(arena, "lru", "all")
    retention.put_below(below)
    budget = WriteBudget(bytes_per_day, now=time.time())
    return Demoter(arena, below, high_watermark=high_watermark, budget=budget, retention=retention)


def promote(arena: Arena, below: NvmeStore, keys: list[BlockKey]) -> int:
    promoter = Promoter(arena, below, lambda copies, slots: None)
    place: dict[str, Any] = {"parent": None, "depth": 0, "part": 0, "needs_parent": False}
    brought = promoter.promote(keys, **place, deadline=FOREVER)
    assert brought.num_bytes == brought.num_blocks * SLOT
    return brought.num_blocks


def flushed(arena: Arena, below: NvmeStore, keys: list[BlockKey]) -> None:
    """Have `keys` below, and nothing above."""
    store(arena, keys)
    demoter_of(arena, below).flush(until=FOREVER)
    ArenaOwner(arena).clear()


def test_a_block_that_has_lost_its_parent_is_still_announced_to_its_chain_s_partition(arena, below):
    keys = chain(3)
    store(arena, keys)
    arena.quarantine(key_index.find(arena.tables, key_index.pack_keys(keys[:1]), 0))
    demoter_of(arena, below).flush(until=FOREVER)
    found, _ = below.find(key_index.pack_keys(keys), 0)
    assert found[0] < 0
    assert below.tables.slot_head[found[1:]].tolist() == [head_number(keys[0])] * 2


def test_what_goes_next_is_written_above_the_watermark_with_ancestors_and_stays(arena, below):
    old, new = chain(30, seed="old"), chain(30, seed="new")
    store(arena, old)
    assert demoter_of(arena, below).demote_ahead() == 0
    assert below.stats().written_bytes == 0
    store(arena, new)
    demoter = demoter_of(arena, below)
    while demoter.demote_ahead():
        pass
    assert present(below, old) == 30, "28 blocks are above the watermark, with their trunk"
    assert present(below, new) == 0
    assert demoter.counts.demoted_blocks == 30
    assert served(arena, old) == served(arena, new) == 30
    assert arena.stats()["leased_blocks"] == 0


def test_what_a_quota_will_drive_out_of_a_half_empty_arena_is_written_before(arena, below):
    ArenaOwner(arena, {"": 20 * SLOT}).adopt()
    store(arena, chain(9), namespace=1)
    demoter = demoter_of(arena, below)
    assert demoter.demote_ahead() == 0, "it has half of its quota"
    store(arena, chain(9, seed="x"), namespace=1)
    assert demoter.demote_ahead() == 9
    assert present(below, chain(9)) == 9, "it goes first"
    assert demoter.demote_ahead() == 0


def test_a_prefix_is_promoted_up_to_its_first_gap_but_for_what_is_here(arena, below):
    keys = chain(30)
    flushed(arena, below, keys)
    leaf = key_index.find(below.tables, key_index.pack_keys(keys), 0)[20:]
    assert len(below.evict(leaf)) == 10
    store(arena, keys[:7])
    assert promote(arena, below, keys) == 13
    assert served(arena, keys) == 20


def test_a_damaged_block_ends_what_is_promoted(arena, below):
    keys = chain(12)
    flushed(arena, below, keys)
    slot = int(key_index.find(below.tables, key_index.pack_keys(keys), 0)[5])
    below.tables.slot_checksum[slot] ^= np.uint64(1)
    promote(arena, below, keys)
    assert served(arena, keys) == 5
    assert arena.stats()["blocks"] <= 11
    assert not (arena.tables.slot_state == 1).any(), "no slot stays reserved"


def test_slots_that_a_locked_arena_did_not_take_back_are_given_back_later(
    arena, below, monkeypatch
):
    keys = chain(4)
    flushed(arena, below, keys)
    promoter = Promoter(arena, below, lambda copies, slots: None)
    place: dict[str, Any] = {"parent": None, "depth": 0, "part": 0, "needs_parent": False}
    with monkeypatch.context() as locked:
        for name in ("commit", "abort"):
            locked.setattr(arena, name, lambda *args, **options: False)
        with pytest.raises(ShardUnavailable, match="stays locked"):
            promoter.promote(keys, **place, deadline=FOREVER)
    promoter.promote(keys, **place, deadline=FOREVER)
    assert promoter.promote(keys, **place, deadline=FOREVER).num_blocks == 4


def test_a_refused_block_is_asked_about_when_used_again_and_a_written_one_is_not(arena, below):
    keys = chain(40)
    store(arena, keys)
    demoter = demoter_of(arena, below)
    admits = demoter._retention.admits
    demoter._retention.admits = lambda slots: np.zeros(len(slots), dtype=bool)
    for _ in range(3):
        assert demoter.demote_ahead() == 0
    refused = demoter.counts.refused_blocks
    assert 0 < refused <= 40
    served(arena, keys)
    demoter.demote_ahead()
    assert demoter.counts.refused_blocks == 2 * refused
    demoter._retention.admits = admits
    served(arena, keys)
    assert demoter.demote_ahead() == 40
    served(arena, keys)
    assert demoter.demote_ahead() == 0
    assert below.stats().written_bytes == 40 * SLOT


def test_no_more_is_written_than_the_budget_has(arena, below):
    store(arena, chain(30, seed="a"))
    store(arena, chain(30, seed="b"))
    per_day = 24 * 10 * SLOT  # ten blocks can be saved up
    demoter = demoter_of(arena, below, high_watermark=0.1, bytes_per_day=per_day)
    for _ in range(5):
        demoter.demote_ahead()
    assert below.stats().written_bytes <= 30 * SLOT, "ancestors may go beyond, once"
    assert demoter.counts.postponed_rounds > 0


def test_a_clock_that_was_ahead_does_not_stop_the_writes(arena, below, monkeypatch):
    now = [time.time() + 8 * 3600]
    monkeypatch.setattr(time, "time", lambda: now[0])
    for seed in "abc":
        store(arena, chain(20, seed=seed))
    demoter = demoter_of(arena, below, high_watermark=0.1, bytes_per_day=24 * 10 * SLOT)
    while demoter.demote_ahead():
        pass
    written = below.stats().written_bytes
    now[0] -= 8 * 3600
    assert demoter.demote_ahead() == 0
    now[0] += 4 * 3600
    assert demoter.demote_ahead() > 0
    assert below.stats().written_bytes > written


def test_a_flush_begins_with_the_latest_and_ends_in_time(arena, below):
    old, new = chain(25, seed="old"), chain(25, seed="new")
    store(arena, old)
    store(arena, new)
    served(arena, old[:10])
    progress = Mock()
    assert demoter_of(arena, below).flush(until=0.0, progress=progress) == 0
    progress.assert_called_once_with(0, 50 * SLOT)
    assert demoter_of(arena, below, bytes_per_day=24 * 10 * SLOT).flush(until=FOREVER) == 10
    assert (present(below, old), present(below, new)) == (10, 0)


def test_a_block_that_is_too_large_for_a_segment_stays_above(arena, directory):
    with closing(open_store(directory / "small", spec(segment=4 * SLOT))) as small:
        store(arena, chain(6), block_bytes=8 * SLOT)
        demoter = demoter_of(arena, small, high_watermark=0.1)
        assert [demoter.demote_ahead() for _ in range(2)] == [0, 0]
    assert arena.stats()["leased_blocks"] == 0


def test_a_full_store_drops_what_was_used_longest_ago(arena, directory):
    small = open_store(directory / "small", spec(num_segments=4))
    demoter = demoter_of(arena, small)
    one, two, three = (chain(20, seed=name) for name in "abc")
    for keys in (one, two, three):
        store(arena, keys)
    assert demoter.flush(until=FOREVER) == 60
    served(arena, one)
    assert demoter.demote_ahead() == 0, "all is there; but it looks"
    ArenaOwner(arena).clear()
    store(arena, chain(20, seed="d"))
    assert demoter.flush(until=FOREVER) == 20
    assert present(small, one) == 20, "it was used last, though only above"
    assert present(small, chain(20, seed="d")) == 20
    assert present(small, two) < 20, "it was used longest ago"
    small.close()


@pytest.mark.parametrize("flushes", [False, True])
def test_what_a_busy_arena_held_up_is_written_later(arena, below, monkeypatch, flushes):
    store(arena, chain(40))
    demoter, lease_slots = demoter_of(arena, below), arena.lease_slots
    refusals = iter(range(3 if flushes else 1))
    monkeypatch.setattr(
        arena,
        "lease_slots",
        lambda slots: None if next(refusals, None) is not None else lease_slots(slots),
    )
    if flushes:
        assert demoter.flush(until=time.monotonic() + 30.0) == 40
    else:
        assert demoter.demote_ahead() == 0
        assert demoter.demote_ahead() > 0
    assert present(below, chain(40)) > 0


def test_a_full_store_forgets_the_blocks_that_leave_it(arena, directory):
    below = open_store(directory / "small", spec(num_segments=1))
    demoter = demoter_of(arena, below)
    retention = demoter._retention
    old, new = chain(16, seed="old"), chain(4, seed="new")
    store(arena, old)
    retention.observe()
    demoter.flush(until=FOREVER)
    slots = key_index.find(below.tables, key_index.pack_keys(old), 0)
    assert (retention.rank_below(slots) > UNKNOWN).all()
    numbers = below.tables.slot_number[slots]
    store(arena, new)
    retention.observe()
    demoter.flush(until=FOREVER)
    gone = below.tables.slot_state[slots] != READY
    taken = ~gone & (below.tables.slot_number[slots] != numbers)
    assert (present(below, new), np.count_nonzero(taken)) == (4, 4)
    assert ((retention.rank_below(slots) > UNKNOWN) == ~gone).all()
    below.close()


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


def test_slots_that_get_other_blocks_while_others_are_written_are_left_out(arena, below):
    store(arena, chain(40))
    demoter = demoter_of(arena, below)
    write, others = demoter._write, [chain(2, seed=str(number)) for number in range(32)]

    def write_once(paths: Any) -> int | None:
        done = write(paths)
        demoter._write = write  # type: ignore[method-assign]
        ArenaOwner(arena).clear()
        for number, keys in enumerate(others):
            store(arena, keys, namespace=10 + number)
        return done

    demoter._write = write_once  # type: ignore[method-assign]
    demoter.flush(until=FOREVER)
    tables = below.tables
    found = tables.slots_in(READY)
    places = {key: at for keys in others for at, key in enumerate(keys)}
    known = [slot for slot in found.tolist() if tables.slot_key[slot].tobytes() in places]
    assert known
    for slot in known:
        assert tables.slot_depth[slot] == places[tables.slot_key[slot].tobytes()]


def test_a_slab_that_empties_while_others_are_written_stops_nothing(arena, below):
    store(arena, chain(40))
    demoter = demoter_of(arena, below)
    paths = paths_to(arena.tables, arena.tables.slots_in(READY), demoter._is_below)
    ArenaOwner(arena).clear()
    assert [demoter._write(batch) for batch in demoter._by_batch(paths)] == [0]


@settings(max_examples=examples(150), derandomize=True)
@given(st.integers(0, 10**6), st.data())
def test_paths_bring_down_just_what_is_missing(seed, data):
    tables = forest(seed)
    used = np.flatnonzero(tables.slot_state).tolist()
    wanted = data.draw(st.lists(st.sampled_from(used), max_size=12))
    # What is below has its ancestors there, too, or has not.
    below = set(data.draw(st.lists(st.sampled_from(used), max_size=6)))
    if data.draw(st.booleans()):
        below = {one for slot in below for one in ancestry(tables, slot)}
    is_below = np.zeros(tables.geometry.num_slots, dtype=bool)
    is_below[list(below)] = True
    asked = np.array(wanted, dtype=np.int64)
    found = [path.tolist() for path, _ in paths_to(tables, asked, is_below.__getitem__)]

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
    parents = {int(tables.slot_parent[slot]) for slot in expected}
    # The fewest paths that cover a forest: one for each of its leaves.
    assert len(expected - parents) == len(found), "no path could go on with another"
