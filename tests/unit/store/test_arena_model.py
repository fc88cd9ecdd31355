"""Random lives of a small arena against a model: which keys are there, and with which bytes."""

import shutil
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvray.errors import CorruptBlock
from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner, Lease, Reservation
from kvray.store.arena import audit
from kvray.store.arena.layout import FREE, LIMBO, QUARANTINED, READY, RESERVED
from kvray.store.arena.payload import slot_bytes
from kvray.store.machine.side_file import HOLDER_BYTES
from tests.examples import examples
from tests.unit.store.invariants import check_contents, check_invariants
from tests.unit.store.small_arena import (
    SLOT,
    chain,
    fetch,
    make_arena,
    num_here,
    pool_of,
    reserved,
    served,
    spec,
    store,
)

TRUNK = chain(5, seed="trunk")
PREFIXES = [
    TRUNK + chain(6, seed="left", head=TRUNK[-1]),
    TRUNK[:3] + chain(7, seed="right", head=TRUNK[2]),
    chain(9, seed="other"),
    chain(6, seed="large"),
]
SIZES = [SLOT, SLOT, SLOT, 2 * SLOT]
SIZE_OF = {key: size for keys, size in zip(PREFIXES, SIZES, strict=True) for key in keys}

prefixes = st.sampled_from(range(len(PREFIXES)))
holders = st.integers(0, 1)


@dataclass(frozen=True, eq=False)
class Held:
    """A lease or a reservation, and in whose name."""

    holder: int
    keys: list[BlockKey]
    what: Any


class ArenaLife(RuleBasedStateMachine):
    """Two holders of one arena of 24 slots, too few for what they want to store."""

    leases = Bundle("leases")
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
        first = make_arena(self.directory, asked=spec(num_slabs=6, slots_per_slab=4))
        self.arenas = [first, Arena(self.directory, lock_wait_s=5)]
        for arena in self.arenas:
            arena.join("model")
        self.ready: dict[BlockKey, int] = {}
        """The model: key -> slot of every block that is there."""
        self.held: set[Held] = set()
        self.bad: set[int] = set()
        """Slots whose bytes were spoilt while they were leased."""

    def teardown(self) -> None:
        for arena in self.arenas:
            arena.close()
        shutil.rmtree(self.directory)

    # -- what may change ----------------------------------------------------------------------

    def settle(self, *, added: Iterable[BlockKey] = (), parentless: bool = False) -> None:
        """Bring the model up to date after a call that may have evicted, and stored `added`.

        `parentless`: a writer gave up, so blocks that others stored below its own may stand alone.
        """
        before, links = self.ready, self.links
        self.ready = self.look()
        gone = set(before) - set(self.ready)
        assert set(self.ready) - set(before) == set(added) - set(before)
        leased = np.flatnonzero(self.arenas[0].tables.slot_leases).tolist()
        assert not {before[key] for key in gone} & set(leased), "a leased block was evicted"
        used = self.look(READY, RESERVED)
        for child, parent in () if parentless else links.items():
            assert child not in used or parent in used, "a parent was evicted before its child"

    def look(self, *states: int) -> dict[BlockKey, int]:
        tables = self.arenas[0].tables
        slots = np.flatnonzero(np.isin(tables.slot_state, states or (READY,)))
        return {BlockKey(tables.slot_key[slot].tobytes()): int(slot) for slot in slots}

    def expected_match(self, keys: list[BlockKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.ready), len(keys))

    # -- rules --------------------------------------------------------------------------------

    @rule(target=reservations, holder=holders, which=prefixes, data=st.data())
    def reserve(self, holder: int, which: int, data: st.DataObject) -> Held:
        keys = PREFIXES[which]
        start = data.draw(st.integers(0, len(keys) - 1))
        stop = data.draw(st.integers(start + 1, len(keys)))
        used = self.look(READY, RESERVED)
        made = reserved(
            self.arenas[holder],
            keys[start:stop],
            parent=keys[start - 1] if start else None,
            depth=start,
            block_bytes=SIZES[which],
        )
        wanted = [keys[start + row] for row in made.rows]
        missing = [key for key in keys[start:stop] if key not in used]
        if start == 0 or keys[start - 1] in used:
            assert made.existing == stop - start - len(missing)
            assert wanted == missing[: len(wanted)], "not a prefix of what is missing"
            assert made.dropped == len(missing) - len(wanted)
        else:
            assert (wanted, made.dropped) == ([], stop - start)
        self.settle()
        one = Held(holder, wanted, made)
        self.held.add(one)
        return one

    @rule(one=consumes(reservations))
    def write_and_commit(self, one: Held) -> None:
        if one in self.held:
            self.held.discard(one)
            arena, size = self.arenas[one.holder], SIZE_OF[(one.keys or TRUNK)[0]]
            pool, rows = pool_of(one.keys, block_bytes=size), np.arange(len(one.keys))
            assert arena.commit(one.what, arena.write(one.what, pool, rows))
            self.settle(added=set(one.keys))

    @rule(holder=holders, which=prefixes, length=st.integers(1, 12))
    def store(self, holder: int, which: int, length: int) -> None:
        keys = PREFIXES[which][:length]
        made = store(self.arenas[holder], keys, block_bytes=SIZES[which])
        self.settle(added={keys[row] for row in made.rows})

    @rule(one=consumes(reservations))
    def abort(self, one: Held) -> None:
        if one in self.held:
            self.held.discard(one)
            assert self.arenas[one.holder].abort(one.what)
            self.settle(parentless=True)

    @rule(target=leases, holder=holders, which=prefixes, length=st.integers(1, 12))
    def lease(self, holder: int, which: int, length: int) -> object:
        keys = PREFIXES[which][:length]
        expected = self.expected_match(keys)
        taken = self.arenas[holder].lease(keys)
        assert taken is not None
        assert [one.num_slots for one in taken] == ([expected] if expected else [])
        self.settle()
        held = [Held(holder, keys[:expected], one) for one in taken]
        self.held.update(held)
        return multiple(*held)

    @rule(one=leases, reader=holders)
    def read(self, one: Held, reader: int) -> None:
        if one not in self.held:
            return
        arena = self.arenas[reader]
        spoilt = self.bad & set(arena.leased_slots(one.what).tolist())
        with pytest.raises(CorruptBlock) if spoilt else nullcontext():
            assert fetch(arena, one.keys, one.what, block_bytes=SIZE_OF[one.keys[0]])

    @rule(one=consumes(leases), by=holders)
    def release(self, one: Held, by: int) -> None:
        self.held.discard(one)
        assert self.arenas[by].release(one.what)
        self.settle()

    @rule(holder=holders, which=prefixes)
    def match(self, holder: int, which: int) -> None:
        keys = PREFIXES[which]
        assert num_here(self.arenas[holder], keys) == self.expected_match(keys)

    @precondition(lambda self: len(self.ready) > 4)
    @rule(holder=holders, share=st.sampled_from([0.1, 0.3, 0.9]))
    def evict_ahead(self, holder: int, share: float) -> None:
        ArenaOwner(self.arenas[holder]).evict_ahead(share)
        self.settle()

    @precondition(lambda self: len(self.ready) > 8)
    @rule(holder=holders)
    def clear(self, holder: int) -> None:
        before, went = len(self.ready), ArenaOwner(self.arenas[holder]).clear()
        self.settle()
        assert before - len(self.ready) == went

    @precondition(lambda self: len(self.ready) > 4)
    @rule(holder=holders, data=st.data())
    def spoil_and_quarantine(self, holder: int, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.ready)))
        slot = self.ready.pop(key)
        arena = self.arenas[holder]
        slot_bytes(arena.tables, slot)[5] ^= 1
        arena.quarantine(np.array([slot]))
        self.bad.add(slot)

    @precondition(lambda self: len(self.held) > 1)
    @rule(dead=holders, limbo_s=st.sampled_from([0.0, 1000.0]))
    def die_and_be_buried(self, dead: int, limbo_s: float) -> None:
        arena, survivor = self.arenas[dead], self.arenas[1 - dead]
        arena.side_file.unlock(HOLDER_BYTES + arena.holder)
        arena.stay()
        assert ArenaOwner(survivor).bury_dead(limbo_s=limbo_s) == ["model"]
        self.come_back(dead)

    @precondition(lambda self: len(self.held) > 1)
    @rule(leaver=holders)
    def leave_and_join(self, leaver: int) -> None:
        self.arenas[leaver].leave()
        self.come_back(leaver)

    def come_back(self, gone: int) -> None:
        self.held = {one for one in self.held if one.holder != gone}
        self.arenas[gone].join("model")
        self.settle(parentless=True)

    @precondition(lambda self: self.look(LIMBO, QUARANTINED))
    @rule(holder=holders)
    def reclaim(self, holder: int) -> None:
        assert ArenaOwner(self.arenas[holder]).bury_dead(limbo_s=0) == []
        self.settle()

    @precondition(lambda self: len(self.ready) > 4)
    @rule(holder=holders)
    def find_what_a_death_left_half_done(self, holder: int) -> None:
        tables = self.arenas[1 - holder].tables
        tables.put(np.array(sorted(self.ready.values())), slot_state=FREE, slot_parent=3)
        tables.add(np.array([0, 0, 1]), slot_children=1, slot_leases=2)
        assert served(self.arenas[holder], TRUNK) == self.expected_match(TRUNK)
        tables.undo.settle()
        self.settle()

    # -- what always holds --------------------------------------------------------------------

    @invariant()
    def tables_are_valid_and_not_taken_for_damaged(self) -> None:
        tables = self.arenas[0].tables
        check_invariants(tables)
        assert not any(audit.find(tables, share) for share in audit.shares(tables))
        self.bad = {slot for slot in self.bad if tables.slot_state[slot] == QUARANTINED}
        # Key -> its parent's key, for every block that has a parent link.
        names = {slot: key for key, slot in self.look(READY, RESERVED).items()}
        parents = {slot: int(tables.slot_parent[slot]) for slot in names}
        self.links = {names[slot]: names[up] for slot, up in parents.items() if up >= 0}

    @invariant()
    def every_ready_slot_has_the_bytes_of_its_key(self) -> None:
        assert self.look() == self.ready
        check_contents(self.arenas[0].tables)

    @invariant()
    def leases_name_the_slots_of_their_keys(self) -> None:
        tables = self.arenas[0].tables
        leases = [one for one in self.held if isinstance(one.what, Lease)]
        for one in leases:
            named = self.arenas[0].leased_slots(one.what)
            assert [key.tobytes() for key in tables.slot_key[named]] == one.keys
        assert int(tables.slot_leases.sum()) == sum(len(one.keys) for one in leases)

    @invariant()
    def slots_are_reserved_for_those_who_write(self) -> None:
        makers = [one for one in self.held if isinstance(one.what, Reservation)]
        writing = [key for one in makers for key in one.keys]
        reserved = self.arenas[0].tables.slot_state == RESERVED
        assert sorted(self.look(RESERVED)) == sorted(writing)
        assert np.count_nonzero(reserved) == len(writing)


ArenaLife.TestCase.settings = settings(
    max_examples=examples(80), stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
TestArenaLife = ArenaLife.TestCase
