"""What a rank holds is what the pass gets, whatever becomes of the arena meanwhile.

The scheduler counts its ranks' memory for them: they can take what it has them asked for.
"""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvray.engine.meta import PageIds
from kvray.errors import LeaseExpired
from kvray.store import Arena, Lease
from kvray.store.arena import payload
from kvray.store.arena.layout import QUARANTINED, READY
from kvray.vllm.held import Asked, HeldBlocks, HeldLoad, Hold, Holds
from tests.kit.apart import BLOCK, Apart
from tests.kit.connector import HIT, NUM_WANTED, PROMPT
from tests.kit.devices import HostDevice
from tests.unit.engine.conftest import MakeEngine
from tests.waiting import HANG_S, Gate, wait_for

ROOM = 2 * NUM_WANTED


@pytest.fixture(params=["host", "device"])
def engine(
    request: pytest.FixtureRequest,
    stored: Apart,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> Apart:
    """An engine whose tier has the prompt; its pool is of either kind."""
    if request.param == "device":
        monkeypatch.setattr("kvray.engine.cache_layout.CacheLayout.is_host", False)
        monkeypatch.setattr("kvray.engine.device.gpu.CudaDevice", lambda _: HostDevice())
    return make_engine(holds_loads=True, takes_offers_later=True)


@pytest.fixture
def held(engine: Apart) -> Iterator[HeldBlocks]:
    assert engine.rank.pool is not None
    (part,) = engine.rank._parts[1]
    made = HeldBlocks(engine.rank.shared, engine.rank.pool, part, num_blocks=ROOM)
    yield made
    made.close()


def leased(engine: Apart, *, first: int = 0) -> Hold:
    """Have the leader lease the prompt; return it as the ranks are told to hold it."""
    assert engine.ask(7, PROMPT, first * BLOCK) == (NUM_WANTED - first) * BLOCK
    promise = engine.leader.states[7].promise
    assert promise is not None
    return Hold(0, promise.lease.leased, promise.first, promise.end)


def answer(held: HeldBlocks, hold: Hold, *, are_ours: bool = True) -> int:
    """Have it held; return how many blocks are."""
    held.begin([hold], (), are_ours=are_ours)
    answers: dict[int, int] = {}
    wait_for(lambda: answers.update(held.answers()) or hold.hold_id in answers, "the copy")
    return answers[hold.hold_id]


def flip(arena: Arena, slots: Any) -> None:
    for slot in slots.tolist():
        arena.slot_bytes(slot)[5] ^= 16


def lease_of(hold: Hold) -> Lease:
    return hold.leased[0][1]


def slots_of(engine: Apart, hold: Hold) -> Any:
    return engine.arena.leased_slots(lease_of(hold))


def test_held_blocks_are_loaded_whatever_becomes_of_the_arena(engine, held):
    hold = leased(engine)
    assert answer(held, hold) == NUM_WANTED
    assert engine.leased == 0, "the lease ends with the copy"
    engine.leader.decline(7)  # twice is fine
    assert engine.leased == 0
    flip(engine.arena, engine.arena.tables.slots_in(READY))
    blocks = engine.new_blocks(PROMPT)
    held.load(HeldLoad(hold.hold_id, 0, PageIds.of(blocks[:NUM_WANTED])), None)
    engine.check(PROMPT, blocks, HIT)
    assert engine.rank.shared.figures.totals["loaded_blocks"] == NUM_WANTED


def test_what_the_engine_has_itself_is_passed_over(engine, held):
    hold = leased(engine, first=2)
    assert answer(held, hold) == NUM_WANTED - 2
    blocks = engine.new_blocks(PROMPT)
    held.load(HeldLoad(hold.hold_id, 3, PageIds.of(blocks[5:NUM_WANTED])), None)
    before = engine.pages[blocks[:5]].clone()
    engine.compute(PROMPT[: 5 * BLOCK], blocks)
    engine.check(PROMPT, blocks, HIT)
    assert (before == 255).all()


def test_a_block_that_is_wrong_ends_what_is_held(engine, held, monkeypatch):
    monkeypatch.setattr(engine.arena, "lock_wait_s", HANG_S)  # else the next reader takes it out
    hold = leased(engine, first=1)
    wrong = slots_of(engine, hold)[4:5]
    flip(engine.arena, wrong)
    assert answer(held, hold) == 3
    assert engine.arena.tables.slot_state[wrong] == QUARANTINED


def after_read(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have something happen once the bytes of blocks were read."""
    read = payload.read

    def read_and_act(*args: Any, **options: Any) -> Any:
        valid = read(*args, **options)
        act()
        return valid

    monkeypatch.setattr(payload, "read", read_and_act)


def test_nothing_is_held_of_a_lease_that_was_taken_away(engine, held, monkeypatch):
    hold = leased(engine)
    after_read(monkeypatch, lambda: engine.arena.release(lease_of(hold)))
    assert answer(held, hold) == 0
    assert answer(held, hold._replace(hold_id=1)) == 0, "it was gone before"


def test_nothing_is_held_of_a_lease_whose_holder_changes_during_the_copy(
    engine, held, monkeypatch, caplog
):
    hold = leased(engine)
    leader = Arena(engine.arena.directory, lock_wait_s=1)
    leader.join("leader")
    taken = leader.lease_slots(slots_of(engine, hold))

    def change() -> None:
        leader.tables.holder_generation[leader.holder] += 1

    after_read(monkeypatch, change)
    assert answer(held, hold._replace(leased=((leader.arena_id, taken),))) == 0
    assert "changed while its blocks were copied" in caplog.text
    leader.close()


def test_nothing_is_held_of_another_pool_s_blocks_or_of_an_arena_that_is_gone(engine, held, caplog):
    hold = leased(engine)
    assert answer(held, hold._replace(hold_id=1, leased=(("nowhere", lease_of(hold)),))) == 0
    assert answer(held, hold, are_ours=False) == 0
    assert "the same engine arguments" in caplog.text


def test_more_than_is_held_is_never_loaded(engine, held):
    hold = leased(engine)
    flip(engine.arena, slots_of(engine, hold)[2:3])
    assert answer(held, hold) == 2
    pages = PageIds.of(engine.new_blocks(PROMPT)[:3])
    for unknown in (hold.hold_id, 99):
        with pytest.raises(LeaseExpired, match="does not hold"):
            held.load(HeldLoad(unknown, 0, pages), None)


def test_requests_that_come_and_go_leave_all_memory_free(engine, held):
    chance, holds = random.Random(4), Holds(num_ranks=1, num_blocks=ROOM)
    living = {}
    for number in range(200):
        if chance.random() < 0.6 and engine.ask(number, PROMPT):
            promise = engine.leader.states[number].promise
            assert promise is not None
            made = holds.begin(promise.lease.leased, first=promise.first, stop=promise.end)
            if made is None:
                engine.leader.decline(number)
            else:
                living[number] = made
        ready = [one for one, made in living.items() if made.is_answered and chance.random() < 0.6]
        for one in [one for one in living if one not in ready and chance.random() < 0.2]:
            holds.drop(living.pop(one))
            engine.leader.finish(one)
        loads = []
        for one in ready:
            made = living.pop(one)
            assert made.num_valid == NUM_WANTED
            holds.loaded(made)
            pages = PageIds.of(engine.new_blocks(PROMPT)[:NUM_WANTED])
            loads.append(HeldLoad(made.hold.hold_id, 0, pages))
            engine.leader.finish(one)
        told = holds.take()
        held.begin(*told, are_ours=True)
        for load in loads:
            held.load(load, None)
            engine.check(PROMPT, load.pages.ids().tolist(), HIT)
        found = held.answers()
        holds.take_answers(found, dict.fromkeys(found, 1))
    for one, made in living.items():
        holds.drop(made)
        engine.leader.finish(one)
    held.begin(*holds.take(), are_ours=True)

    def is_free() -> bool:
        found = held.answers()
        holds.take_answers(found, dict.fromkeys(found, 1))
        return holds.room == ROOM

    wait_for(is_free, "the last copies")
    assert sorted(held._take_rows(ROOM).tolist()) == np.arange(ROOM).tolist()
    assert engine.leased == 0


def test_the_end_waits_for_the_present_copy_only(engine, held, monkeypatch):
    copied: list[int] = []
    monkeypatch.setattr(held, "_copy", lambda one: copied.append(one.hold.hold_id) or 0)
    gate = Gate(monkeypatch, held, "_copy")
    hold = leased(engine)
    held.begin([hold, hold._replace(hold_id=1)], (), are_ours=True)
    assert gate.reached.wait(HANG_S)
    closing = threading.Thread(target=held.close)
    closing.start()
    wait_for(lambda: held._is_closing, "the end")
    gate.open.set()
    closing.join(HANG_S)
    assert copied == [0]


def test_a_hold_has_what_all_ranks_have_and_its_room_comes_back_when_none_copies_into_it():
    holds = Holds(num_ranks=3, num_blocks=10)
    asked = holds.begin((), first=2, stop=8)
    assert asked is not None
    assert holds.take() == ((Hold(0, (), 2, 8),), ())
    holds.take_answers({0: 4}, {0: 1})
    holds.drop(asked)
    assert [holds.take(), holds.take()] == [((), (0,)), ((), ())]
    assert (asked.is_answered, holds.room) == (False, 4)
    holds.take_answers({0: 5}, {0: 2})
    assert (asked.is_answered, holds.room) == (True, 10)
    assert (asked.num_valid, asked.end) == (4, 6)


def test_after_any_life_all_room_is_back():
    for seed in range(50):
        chance, holds = random.Random(seed), Holds(num_ranks=2, num_blocks=20)
        living: list[Asked] = []
        silent: list[int] = []
        for _ in range(200):
            act = chance.randrange(4)
            if act == 0 and (made := holds.begin((), first=0, stop=chance.randrange(1, 9))):
                living.append(made)
            elif act == 1 and living:
                holds.drop(living.pop(chance.randrange(len(living))))
            elif act == 2:
                silent += [hold.hold_id for hold in holds.take()[0] for _ in range(2)]
            elif silent:
                hold_id = silent.pop(chance.randrange(len(silent)))
                holds.take_answers({hold_id: 1}, {hold_id: 1})
                for one in [one for one in living if one.is_answered and chance.random() < 0.5]:
                    living.remove(one)
                    holds.loaded(one)
        for one in living:
            holds.drop(one)
        silent += [hold.hold_id for hold in holds.take()[0] for _ in range(2)]
        for hold_id in silent:
            holds.take_answers({hold_id: 1}, {hold_id: 1})
        assert holds.room == 20, seed
