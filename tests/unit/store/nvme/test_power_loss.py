"""Whatever a power loss leaves: nothing wrong is served, nothing that was flushed is missing."""

import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvray.identity.block import BlockKey
from kvray.store.arena.eviction import choose_victims
from kvray.store.arena.layout import READY
from kvray.store.nvme import NvmeStore
from tests.unit.store.invariants import check_invariants
from tests.unit.store.nvme.power import Event, RecordingDisk, after_power_loss
from tests.unit.store.nvme.small_store import (
    arena_tables,
    chain_for,
    open_store,
    promote,
    spec,
)
from tests.unit.store.small_arena import SLOT, chain

SIZES = (SLOT, 2 * SLOT + 300)
CHAINS = {(name, size): chain(24, seed=f"{name} {size}") for name in range(4) for size in SIZES}
Block = tuple[BlockKey, int]


class Life:
    """A store that does one thing after the other, on a disk that notes all of it."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.disk = RecordingDisk()
        self.store = open_store(directory, spec(num_segments=4), disk=self.disk)
        self._chance = random.Random(seed)
        self._note()

    def live(self, num_steps: int) -> Sequence[Event]:
        for _ in range(num_steps):
            self._chance.choice((self._store, self._store, self._store, self._evict, self._flush))()
            self._note()
        self.store.close()
        return self.disk.log

    def _store(self) -> None:
        arena, demotions = arena_tables(), []
        for _ in range(self._chance.randrange(1, 4)):
            (name, size), keys = self._chance.choice(list(CHAINS.items()))
            until = self._chance.randrange(1, len(keys) + 1)
            demotions.append(
                chain_for(self.store, arena, keys[:until], part=name, block_bytes=size)
            )
            self._note()  # it may have evicted what the next one stores again
        self.store.write(demotions, arena)

    def _evict(self) -> None:
        everything = np.arange(self.store.geometry.num_slots)
        count = self._chance.randrange(1, 20)
        victims = choose_victims(
            self.store.tables, count, within=everything, protect=everything[:0]
        )
        self.store.evict(victims)

    def _flush(self) -> None:
        ready = _ready(self.store)
        self.store.flush(note_use=self._chance.random() < 0.3)
        self.disk.note("flushed", ready)

    def _note(self) -> None:
        self.disk.note("ready", _ready(self.store))


def _ready(store: NvmeStore) -> frozenset[Block]:
    slots = np.flatnonzero(store.tables.slot_state == READY)
    keys = [BlockKey(key.tobytes()) for key in store.tables.slot_key[slots]]
    return frozenset(zip(keys, store.tables.slot_part[slots].tolist(), strict=True))


def promised(log: Sequence[Event], cut: int) -> frozenset[Block]:
    """Return the blocks that were flushed before the cut and have not been evicted since."""
    kept: frozenset[Block] = frozenset()
    for event in log[:cut]:
        if event[0] == "flushed":
            kept = event[1]
        elif event[0] == "ready":
            kept &= event[1]
    # What was under way at the cut may already have evicted some.
    after = next((event[1] for event in log[cut:] if event[0] == "ready"), kept)
    return kept & after


def check(log: Sequence[Event], cut: int, chance: random.Random) -> None:
    directory = Path(tempfile.mkdtemp(prefix="kvray-nvme-"))
    try:
        after_power_loss(log[:cut], chance, directory)
        store = open_store(directory, spec(num_segments=4))
        check_invariants(store.tables)
        assert not store.report.aside, "a file had its name before it was whole"
        sound: set[Block] = set()
        for (part, size), keys in CHAINS.items():
            got = promote(store, keys, part=part, block_bytes=size).sound
            sound |= {(key, part) for key, good in zip(keys, got, strict=True) if good}
        missing = promised(log, cut) - sound
        assert not missing, f"{len(missing)} flushed blocks are lost"
        store.close()
        _check_second_life(directory)
    finally:
        shutil.rmtree(directory)


def _check_second_life(directory: Path) -> None:
    """What was recovered can be written to like any other store."""
    store = open_store(directory, spec(num_segments=4))
    (part, size), keys = next(iter(CHAINS.items()))
    arena = arena_tables()
    one = chain_for(store, arena, keys, part=part, block_bytes=size)
    store.write([one], arena)
    promote(store, keys, part=part, block_bytes=size)
    store.close()


def run(directory: Path, seed: int, *, num_steps: int, num_cuts: int) -> None:
    log = Life(directory, seed).live(num_steps)
    chance = random.Random(seed)
    cuts = [*(chance.randrange(len(log)) for _ in range(num_cuts)), len(log)]
    for cut in cuts:
        check(log, cut, chance)


@pytest.mark.parametrize("seed", range(4))
def test_power_loss_leaves_what_was_flushed_and_nothing_wrong(directory: Path, seed: int) -> None:
    run(directory, seed, num_steps=14, num_cuts=12)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_power_losses(directory: Path, seed: int) -> None:
    run(directory, seed, num_steps=40, num_cuts=60)


def test_record_is_never_written_before_its_payload_is_durable(directory: Path) -> None:
    log = Life(directory, 1).live(10)
    pending: dict[int, bool] = {}
    for kind, *args in log:
        if kind == "write":
            inode, offset, _ = args
            is_record = 4096 <= offset < 8192
            assert not (is_record and pending.get(inode)), "a record overtook a payload"
            if offset >= 8192:
                pending[inode] = True
        elif kind == "sync":
            pending[args[0]] = False


def test_file_that_gives_way_is_gone_for_good_before_another_has_its_name(directory: Path) -> None:
    disk = RecordingDisk()
    store = open_store(directory, spec(num_segments=1), disk=disk)
    for turn in range(4):
        arena, size = arena_tables(), SIZES[turn % 2]
        store.write([chain_for(store, arena, CHAINS[0, size][:3], block_bytes=size)], arena)
    store.close()
    changes = [event[0] for event in disk.log if event[0] in ("remove", "rename", "sync_directory")]
    named = ["rename", "sync_directory"]
    assert changes == named + 3 * ["remove", "sync_directory", *named]
