"""kill -9 and power losses at any moment: what was promised is there, nothing wrong is served."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.store.invariants import check_invariants
from tests.unit.store.nvme.power import Event, RecordingDisk, after_kill, after_power_loss
from tests.unit.store.nvme.small_store import (
    Block,
    arena_tables,
    blocks_of,
    chain_for,
    demote,
    evict,
    open_store,
    promote,
    spec,
)
from tests.unit.store.small_arena import SLOT, chain

SIZES = (SLOT, 2 * SLOT + 300)
CHAINS = {(name, size): chain(24, seed=f"{name} {size}") for name in range(4) for size in SIZES}


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
            one = chain_for(self.store, arena, keys[:until], part=name, block_bytes=size)
            demotions.append(one)
            self._note()  # it may have evicted what the next one stores again
        self.store.write(demotions, arena)

    def _evict(self) -> None:
        evict(self.store, self._chance.randrange(1, 20))

    def _flush(self) -> None:
        ready = frozenset(blocks_of(self.store))
        self.store.flush(note_use=self._chance.random() < 0.3)
        self.disk.note("flushed", ready)

    def _note(self) -> None:
        self.disk.note("ready", frozenset(blocks_of(self.store)))


def promised(log: Sequence[Event], cut: int, kind: str) -> frozenset[Block]:
    """Return the blocks that were flushed before the cut and have not been evicted since.

    If only the process ends there: those that could be read.
    """
    kept: frozenset[Block] = frozenset()
    for event in log[:cut]:
        if event[0] == kind:
            kept = event[1]
        elif event[0] == "ready":
            kept &= event[1]
    # What was under way at the cut may already have evicted some.
    after = next((event[1] for event in log[cut:] if event[0] == "ready"), kept)
    return kept & after


def check(directory: Path, promised: frozenset[Block], *, is_torn: bool) -> None:
    """Open what a death has left, read all of it, and go on."""
    store = open_store(directory, spec(num_segments=4))
    check_invariants(store.tables)
    assert not store.report.aside, "a file had its name before it was whole"
    assert is_torn or (store.report.damaged, store.report.truncated) == (0, 0)
    valid: set[Block] = set()
    for (part, size), keys in CHAINS.items():
        got = promote(store, keys, part=part, block_bytes=size)
        valid |= {(key, part) for key, good in zip(keys, got, strict=True) if good}
    missing = promised - valid
    assert not missing, f"{len(missing)} blocks are lost"
    store.close()
    store = open_store(directory, spec(num_segments=4))
    (part, size), keys = next(iter(CHAINS.items()))
    demote(store, keys, part=part, block_bytes=size)  # as to any other store
    promote(store, keys, part=part, block_bytes=size)
    store.close()


@pytest.mark.parametrize(
    ("seed", "num_steps", "num_cuts"),
    [
        *((seed, 14, 12) for seed in range(3)),
        *(pytest.param(seed, 40, 60, marks=pytest.mark.long) for seed in range(100, 160)),
    ],
)
def test_a_power_loss_leaves_what_was_flushed_and_a_kill_what_could_be_read(
    directory, tmp_path_factory, seed, num_steps, num_cuts
):
    log = Life(directory, seed).live(num_steps)
    chance = random.Random(seed)
    for cut in [*(chance.randrange(len(log)) for _ in range(num_cuts)), len(log)]:
        for kind, leave in (("flushed", after_power_loss), ("ready", after_kill)):
            left = tmp_path_factory.mktemp("left")
            leave(log[:cut], chance, left)
            check(left, promised(log, cut, kind), is_torn=kind == "flushed")
            shutil.rmtree(left)


def test_record_is_never_written_before_its_payload_is_durable(directory):
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


def test_file_that_gives_way_is_gone_for_good_before_another_has_its_name(directory):
    disk = RecordingDisk()
    store = open_store(directory, spec(num_segments=1), disk=disk)
    for turn in range(4):
        size = SIZES[turn % 2]
        demote(store, CHAINS[0, size][:3], block_bytes=size)
    store.close()
    changes = [event[0] for event in disk.log if event[0] in ("remove", "rename", "sync_directory")]
    named = ["rename", "sync_directory"]
    assert changes == named + 3 * ["remove", "sync_directory", *named]
