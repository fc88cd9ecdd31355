"""A store against a dict, over any sequence of operations and starts."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvray.identity.block import BlockKey
from kvray.store.arena import payload
from kvray.store.arena.eviction import choose_victims
from kvray.store.arena.layout import READY
from kvray.store.nvme import Demotion
from tests.examples import examples
from tests.unit.store.invariants import check_invariants
from tests.unit.store.nvme.small_store import arena_tables, chain_for, open_store, promote, spec
from tests.unit.store.small_arena import SLOT, chain

SIZES = (SLOT, 3 * SLOT - 1)
CHAINS = [chain(20, seed=str(number)) for number in range(4)]
chains = st.integers(0, len(CHAINS) - 1)
"""The number of a chain is its part; the even ones have blocks of one size, the odd of another."""
Block = tuple[BlockKey, int]


def size_of(number: int) -> int:
    return SIZES[number % 2]


class NvmeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvray-nvme-"))
        self.store = open_store(self.directory, spec(num_segments=3))
        self.model: set[Block] = set()
        self.pending: list[Demotion] = []

    def ready(self) -> set[Block]:
        tables = self.store.tables
        slots = np.flatnonzero(tables.slot_state == READY)
        keys = [BlockKey(key.tobytes()) for key in tables.slot_key[slots]]
        return set(zip(keys, tables.slot_part[slots].tolist(), strict=True))

    @rule(number=chains, until=st.integers(1, 20))
    def store_chain(self, number: int, until: int) -> None:
        arena, keys = arena_tables(), CHAINS[number][:until]
        one = chain_for(self.store, arena, keys, part=number, block_bytes=size_of(number))
        before = self.ready()
        assert before <= self.model
        (mask,) = self.store.write([one], arena)
        assert mask.all()
        new = {(keys[row], number) for row in one.reservation.rows.tolist()}
        assert self.ready() == before | new
        self.model = before | new

    @rule(number=chains)
    def give_up_half_way(self, number: int) -> None:
        one = chain_for(
            self.store, arena_tables(), CHAINS[number], part=number, block_bytes=size_of(number)
        )
        self.model &= self.ready()
        self.store.abort(one)
        assert self.ready() == self.model

    @rule(number=chains, row=st.integers(0, 19))
    def store_what_is_wrong(self, number: int, row: int) -> None:
        arena = arena_tables()
        one = chain_for(self.store, arena, CHAINS[number], part=number, block_bytes=size_of(number))
        wrong: set[Block] = set()
        if row < len(one.arena_slots):
            payload.slot_bytes(arena, int(one.arena_slots[row]))[0] ^= 1
            wrong = {(CHAINS[number][one.reservation.rows[row]], number)}
        assert self.store.write([one], arena)[0].all()
        written = self.ready()
        assert wrong <= written
        promote(self.store, CHAINS[number], part=number, block_bytes=size_of(number))
        self.model = self.ready()
        assert self.model == written - wrong, "the read finds it"

    @rule(count=st.integers(1, 30))
    def evict(self, count: int) -> None:
        everything = np.arange(self.store.geometry.num_slots)
        victims = choose_victims(self.store.tables, count, within=everything, protect=victims_none)
        went = self.store.evict(victims)
        assert len(self.model) - len(self.ready()) == len(went)
        assert self.ready() <= self.model
        self.model = self.ready()

    @rule(number=chains)
    def read(self, number: int) -> None:
        keys = CHAINS[number]
        got = promote(self.store, keys, part=number, block_bytes=size_of(number))
        assert got.sound.tolist() == [(key, number) in self.model for key in keys]

    @rule(flush=st.booleans(), note_use=st.booleans())
    def start_again(self, flush: bool, note_use: bool) -> None:
        if flush:
            self.store.flush(note_use=note_use)
        self.store.close()
        self.store = open_store(self.directory, spec(num_segments=3))
        found = self.ready()
        assert found == self.model if flush else found >= self.model
        for number, keys in enumerate(CHAINS):
            # What was evicted and came back may have been overwritten: then it is refused.
            promote(self.store, keys, part=number, block_bytes=size_of(number))
        assert self.ready() >= self.model
        self.model = self.ready()

    @invariant()
    def tables_are_sound(self) -> None:
        check_invariants(self.store.tables)
        assert not self.store.tables.slot_leases.any()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)


victims_none = np.empty(0, dtype=np.int64)
NvmeMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=25)
test_store_is_a_dict_that_forgets = NvmeMachine.TestCase
