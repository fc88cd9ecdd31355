"""What decides which blocks of a node stay follows what happens in its arena."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import key_index
from kvray.store.arena.tables import Array
from kvray.store.policy import POLICIES
from kvray.store.retention import Retention
from tests.unit.store.small_arena import PATIENT_S, chain, make_arena, store


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = make_arena(tmp_path)
    made.join("shard")
    yield made
    made.close()


def slots_of(arena: Arena, keys: list[BlockKey]) -> Array:
    return key_index.find(arena.tables, key_index.pack_keys(keys), 0)


def use(arena: Arena, keys: list[BlockKey]) -> None:
    (held,) = arena.lease(keys) or [None]
    assert held is not None
    arena.release(held, wait_s=PATIENT_S)


def test_blocks_rank_by_their_last_use_and_what_was_given_up_goes_first(arena: Arena) -> None:
    retention = Retention(arena, "lru", "all")
    old, new = chain(4, seed="old"), chain(4, seed="new")
    store(arena, old)
    store(arena, new)
    retention.observe()
    assert (retention.rank(slots_of(arena, old)) < retention.rank(slots_of(arena, new))).all()
    use(arena, old)
    retention.observe()
    assert (retention.rank(slots_of(arena, old)) > retention.rank(slots_of(arena, new))).all()
    ArenaOwner(arena).give_up(b"".join(old[3:]), [0])
    assert retention.rank(slots_of(arena, old)).argmin() == 3
    assert retention.rank(slots_of(arena, old))[3] == -np.inf


@pytest.mark.parametrize("policy", POLICIES)
def test_what_came_since_the_last_look_goes_last(arena: Arena, policy: str) -> None:
    retention, owner = Retention(arena, policy, "all"), ArenaOwner(arena)
    for number in range(8):
        store(arena, chain(7, seed=str(number)))
        retention.observe()
    owner.evict_ahead(0.5, retention.rank)
    new, left = chain(7, seed="new"), arena.stats()["blocks"]
    store(arena, new)
    owner.evict_ahead(0.8, retention.rank)
    assert arena.stats()["blocks"] < left, "others went"
    (here,) = arena.present(new, [0])
    assert here.all()


def test_what_was_found_once_is_worth_its_write(arena: Arena) -> None:
    retention = Retention(arena, "lru", "twice")
    once, twice = chain(4, seed="once"), chain(4, seed="twice")
    store(arena, once)
    store(arena, twice)
    retention.observe()
    use(arena, twice)
    retention.observe()
    assert retention.admits(slots_of(arena, twice)).all()
    assert not retention.admits(slots_of(arena, once)).any()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_arena_is_kept_with_room_by_every_policy(arena: Arena, policy: str) -> None:
    retention, owner = Retention(arena, policy, "likely"), ArenaOwner(arena)
    for number in range(30):
        store(arena, chain(7, seed=str(number)))
        use(arena, chain(7, seed=str(number)))
        retention.observe()
        owner.evict_ahead(0.25, retention.rank)
        num_blocks = arena.stats()["blocks"]
        assert num_blocks <= 52
    assert num_blocks >= 40, "no more goes than has to"


def test_of_what_goes_next_duplicates_go_first_in_its_own_order(arena: Arena) -> None:
    retention = Retention(arena, "lru", "all")
    lots = [chain(8, seed=str(number)) for number in range(7)]
    for keys in lots:
        store(arena, keys)
        retention.observe()
    question = retention.ask(0.25)
    assert question.keys.tobytes() == b"".join(lots[0][1:]), "an eighth, from the tail"
    duplicate = np.arange(7) >= 3
    retention.answer(question, duplicate)
    slots = np.concatenate([slots_of(arena, keys) for keys in reversed(lots)])
    first = slots[np.argsort(retention.rank(slots), kind="stable")]
    assert set(first[:4]) == set(question.slots[duplicate])
    assert set(first[4:8]) == set(slots_of(arena, lots[0])) - set(first[:4])
    assert first[8:].tolist() == [slot for keys in lots[1:] for slot in slots_of(arena, keys)]
    assert retention.are_duplicates(slots).sum() == 4
    # What was given up goes before even that.
    ArenaOwner(arena).give_up(b"".join(lots[6][7:]), [0])
    assert slots[retention.rank(slots).argmin()] == slots_of(arena, lots[6])[7]


def test_duplicates_keep_the_order_in_which_they_were_used(arena: Arena) -> None:
    retention = Retention(arena, "lru", "all")
    for number in range(56):
        store(arena, chain(1, seed=str(number)))
        retention.observe()
    question = retention.ask(0.25)
    before = question.slots[np.argsort(retention.rank(question.slots))]
    retention.answer(question, np.ones(7, dtype=bool))
    ranks = retention.rank(np.arange(56))
    assert np.argsort(ranks)[:7].tolist() == before.tolist()


def test_duplicates_are_not_worth_its_write(arena: Arena) -> None:
    retention = Retention(arena, "lru", "all")
    slots = store(arena, chain(56)).slots
    retention.observe()
    question = retention.ask(0.25)
    retention.answer(question, np.arange(7) % 2 == 0)
    assert (retention.admits(slots) != retention.are_duplicates(slots)).all()
    assert retention.are_duplicates(slots).sum() == 4


def test_nothing_is_asked_about_while_there_is_room(arena: Arena) -> None:
    retention = Retention(arena, "lru", "all")
    store(arena, chain(40))
    retention.observe()
    assert len(retention.ask(0.25).slots) == 0
    store(arena, chain(9, seed="more"))
    retention.observe()
    assert len(retention.ask(0.25).slots) > 0


def test_what_was_said_is_forgotten_with_the_block_its_use_and_time(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("kvray.store.retention.time", SimpleNamespace(monotonic=lambda: now))
    retention = Retention(arena, "lru", "all")
    keys = [chain(1, seed=str(number)) for number in range(56)]
    slots = np.concatenate([store(arena, key).slots for key in keys])
    retention.observe()
    question = retention.ask(0.25)
    retention.answer(question, np.ones(7, dtype=bool))
    assert retention.are_duplicates(slots).sum() == 7
    used = np.flatnonzero(slots == question.slots[0])[0]
    use(arena, keys[used])
    assert retention.are_duplicates(slots).sum() == 6
    assert ArenaOwner(arena).evict_ahead(0.24, retention.rank) == 5
    assert retention.are_duplicates(slots).sum() == 1, "what was duplicate went"
    store(arena, chain(5, seed="new"))
    assert retention.are_duplicates(np.arange(64)).sum() == 1
    now += 31
    assert not retention.are_duplicates(np.arange(64)).any()
