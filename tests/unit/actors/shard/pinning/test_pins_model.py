"""Pins against a model: pin, remove, expire, store under pressure, clear, restart."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvray.actors.shard.pinning.keeper import PinKeeper
from kvray.actors.shard.pinning.pin import Pin
from kvray.actors.staging.ask import ask_nobody
from kvray.actors.staging.peers import Peers
from kvray.config import PinsConfig
from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner
from tests.unit.store.small_arena import PATIENT_S, SLOT, chain, make_arena, spec, store

CHAINS = [chain(7, seed=str(at)) for at in range(6)]
NAMES = st.sampled_from("abcd")
SHARE, OWNER_SHARE = 0.25, 0.15  # 16 and 9 of 64 blocks


class PinsModel(RuleBasedStateMachine):
    """One shard's keeper, an engine that stores, and the owner that clears."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
        self.now = 1e9
        self.engine = make_arena(self.directory, asked=spec(holders_max=8))
        self.engine.join("engine")
        self.filled = 0
        self.pinned: dict[str, Pin] = {}
        self.held: dict[str, int] = {}
        """Name -> leading blocks of the pin that were there at the last look."""

    @initialize()
    def begin(self) -> None:
        self.arena = Arena(self.directory, lock_wait_s=PATIENT_S)
        peers = Peers("kvray-shard-a", ask_nobody, call_timeout_s=1.0)
        given = PinsConfig(share=SHARE, owner_share=OWNER_SHARE)
        self.keeper = PinKeeper(
            self.arena, self.directory, given, peers, renew_s=1e-9, wall=lambda: self.now
        )
        self.look()

    def look(self) -> None:
        self.keeper.look()
        self.held = {one["name"]: one["blocks_here"] for one in self.keeper.status()["pins"]}

    @rule(name=NAMES, at=st.integers(0, 5), owner=st.sampled_from("xy"), lasts=st.integers(1, 30))
    def pin(self, name: str, at: int, owner: str, lasts: int) -> None:
        self.now += 0.01
        made = Pin(
            name=name,
            owner=owner,
            made_at=self.now,
            until=self.now + lasts,
            num_tokens=224,
            block_bytes=SLOT,
            num_parts=2,
            keys=b"".join(CHAINS[at]),
        )
        self.keeper.take([made])
        self.pinned[name] = made
        self.look()

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.now += 0.01
        if self.is_live(name):
            self.keeper.remove(name)
            del self.pinned[name]
            self.look()

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.look()

    @rule(at=st.integers(0, 5))
    def store_what_is_pinned_perhaps(self, at: int) -> None:
        store(self.engine, CHAINS[at])
        self.look()

    @rule()
    def store_more_than_there_is_room_for(self) -> None:
        for _ in range(9):
            self.filled += 1
            store(self.engine, chain(8, seed=f"other {self.filled}"))

    @rule()
    def clear(self) -> None:
        ArenaOwner(self.engine).clear()

    @rule(is_sudden=st.booleans())
    def restart(self, is_sudden: bool) -> None:
        if not is_sudden:
            asyncio.run(self.keeper.close())
        self.arena.close()
        self.begin()

    def is_live(self, name: str) -> bool:
        return name in self.pinned and self.pinned[name].until > self.now

    def keys_of(self, name: str) -> list[BlockKey]:
        keys = self.pinned[name].keys
        return [BlockKey(keys[at : at + 32]) for at in range(0, len(keys), 32)]

    @invariant()
    def what_was_held_is_there_until_its_end(self) -> None:
        for name, count in self.held.items():
            if self.is_live(name):
                assert (self.engine.match(self.keys_of(name)) or 0) >= count

    @invariant()
    def no_share_is_exceeded(self) -> None:
        tables = self.engine.tables
        leased = (tables.slot_leases > 0).nonzero()[0]
        assert int(tables.block_bytes(leased).sum()) <= SHARE * tables.geometry.capacity

    @invariant()
    def only_live_pins_hold(self) -> None:
        if not any(map(self.is_live, self.pinned)):
            self.keeper.look()
            assert not self.engine.tables.slot_leases.any()

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            asyncio.run(self.keeper.close())
            self.arena.close()
        self.engine.close()
        shutil.rmtree(self.directory)


TestPinsModel = pytest.mark.long(PinsModel.TestCase)
TestPinsModel.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
