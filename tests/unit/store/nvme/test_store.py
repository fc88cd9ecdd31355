"""Demote, promote, evict, and start again; and any sequence of these, and deaths, against a dict.

After a kill or a power loss at any moment all is there that was promised, and nothing wrong.
"""

import os
import random
import shutil
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvray.errors import CapacityError, ConfigError, LayoutMismatch, ShardUnavailable
from kvray.store.arena import key_index, payload
from kvray.store.arena.layout import Array
from kvray.store.nvme import NvmeSpec
from kvray.store.nvme.disk import Disk, DiskFile
from tests.examples import examples
from tests.unit.store.invariants import check_invariants
from tests.unit.store.nvme.small_store import (
    Block,
    arena_tables,
    blocks_of,
    chain_for,
    demote,
    evict,
    open_store,
    present,
    promote,
    put_in_arena,
    spec,
)
from tests.unit.store.small_arena import SLOT, chain


@pytest.mark.parametrize(
    "block_bytes", [1, 511, 4095, 4096, 4097, 3 * 4096 + 17, 16 * SLOT - 1, 16 * SLOT]
)
def test_blocks_of_any_size_come_back_and_each_counts_by_its_size(store, block_bytes):
    keys = chain(3)
    demote(store, chain(5, seed="others"))
    assert demote(store, keys, block_bytes=block_bytes).all()
    assert store.stats().block_bytes == 5 * SLOT + 3 * -(-block_bytes // SLOT) * SLOT
    assert promote(store, keys, block_bytes=block_bytes).all()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (replace(spec(), capacity=spec(num_segments=1).capacity - 1), "holds no file"),
        (NvmeSpec(cluster_name="x", capacity=2**20), r"nvme\.capacity"),
        (NvmeSpec(cluster_name="x", capacity=2**32, slot_min=100), r"nvme\.capacity"),
    ],
)
def test_capacity_of_no_segment_is_refused(asked, said):
    with pytest.raises(ConfigError, match=said):
        asked.geometry()


def test_slots_of_other_blocks_or_of_another_size_and_blocks_too_large_are_refused(store):
    with pytest.raises(CapacityError, match="raise nvme"):
        demote(store, chain(1), block_bytes=17 * SLOT)
    keys, others = chain(2), chain(2, seed="other")
    arena = arena_tables()
    here = put_in_arena(arena, others)
    one = chain_for(store, arena, keys)
    with pytest.raises(ConfigError, match="same blocks"):
        store.write([replace(one, arena_slots=here)], arena)
    assert not store.tables.slot_state.any(), "its reservation is settled all the same"
    demote(store, keys)
    with pytest.raises(ConfigError, match="same blocks"):
        store.read(key_index.pack_keys(keys), 0, arena, here)
    with pytest.raises(LayoutMismatch):
        promote(store, keys, block_bytes=2 * SLOT)
    assert not store.tables.slot_leases.any()


def test_directory_has_one_owner_and_a_closed_store_says_so(directory):
    first = open_store(directory)
    with pytest.raises(ShardUnavailable, match=f"Process {os.getpid()} owns"):
        open_store(directory)
    first.close()
    first.close()
    for call in (first.flush, first.stats, lambda: promote(first, chain(1))):
        with pytest.raises(ShardUnavailable, match="has closed"):
            call()
    open_store(directory).close()


@pytest.mark.parametrize("num_segments", [4, 2])
def test_use_is_known_after_a_restart_also_to_a_lowered_capacity(reopen, num_segments):
    store = reopen()
    chains = [chain(16, seed=str(number)) for number in range(4)]
    for keys in chains:
        demote(store, keys)
    promote(store, chains[0])
    store.flush(note_use=True)
    again = reopen(spec(num_segments=num_segments))
    assert len(again.report.surplus) == 4 - num_segments
    if num_segments == 4:
        assert evict(again, 32) == 32
    assert [present(again, keys) for keys in chains] == [16, 0, 0, 16]


def test_reads_and_writes_go_on_at_once(reopen):
    store = reopen(spec(num_segments=8))
    kept = chain(20, seed="kept")
    demote(store, kept)

    def work(number: int) -> None:
        for turn in range(15):
            keys = kept if number % 2 else chain(10, seed=f"{number} {turn}")
            if keys is not kept:
                demote(store, keys)
            promote(store, keys)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not store.tables.slot_leases.any()


def test_slot_that_is_read_is_not_evicted(store):
    keys = chain(4)
    demote(store, keys)
    with store._leased(key_index.pack_keys(keys), 0) as found:
        assert evict(store, 4) == 0
        assert (found >= 0).all()
    assert evict(store, 4) == 4


# -- a disk that notes every write and sync, and what a death may have left of them ---------------

SECTOR = 512
IO_THREADS = 3
"""Of the store: each may have a write under way."""

Event = tuple[Any, ...]


class RecordingDisk(Disk):
    """Does what is asked for, and notes it in `log`.

    A drive keeps what was synced. Of what was written since, any sectors may have arrived, in any
    order, each of them whole; of names given or taken since the directory was synced, any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Event] = []
        self._lock = threading.Lock()
        self._num_files = 0
        self._inodes: dict[str, int] = {}

    def note(self, *event: Any) -> None:
        with self._lock:
            self.log.append(event)

    def create(self, path: Path, size: int) -> DiskFile:
        made = super().create(path, size)
        assert isinstance(made, _RecordingFile)
        self.note("create", made.inode, path.name, size)
        return made

    def rename(self, source: Path, target: Path) -> None:
        self.note("rename", source.name, target.name)
        self._inodes[target.name] = self._inodes.pop(source.name)
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self.note("remove", path.name)
        self._inodes.pop(path.name, None)
        super().remove(path)

    def sync_directory(self, directory: Path) -> None:
        super().sync_directory(directory)
        self.note("sync_directory")

    def _open(self, path: Path, flags: int) -> DiskFile:
        plain = super()._open(path, flags)
        if flags & os.O_CREAT or path.name not in self._inodes:
            self._num_files += 1
            self._inodes[path.name] = self._num_files
        inode = self._inodes[path.name]
        if not flags & os.O_CREAT and not any(event[:2] == ("create", inode) for event in self.log):
            content = path.read_bytes()  # it was there before this disk
            self.note("create", inode, path.name, len(content))
            self.note("write", inode, 0, content)
            self.note("sync", inode)
            self.note("sync_directory")
        return _RecordingFile(plain, self, inode)


class _RecordingFile(DiskFile):
    def __init__(self, plain: DiskFile, disk: RecordingDisk, inode: int) -> None:
        super().__init__(plain.path, plain._fd, disk)
        self._recorder = disk
        self.inode = inode

    def write(self, buffers: Sequence[Array], offset: int) -> None:
        # Before it is done: from here on any part of it may have arrived.
        self._recorder.note("write", self.inode, offset, b"".join(one.tobytes() for one in buffers))
        super().write(buffers, offset)

    def sync(self) -> None:
        super().sync()
        self._recorder.note("sync", self.inode)


@dataclass
class _Inode:
    size: int
    durable: bytearray
    is_synced: bool = False
    pending: list[tuple[int, bytes]] = field(default_factory=list)


def after_power_loss(log: Sequence[Event], chance: random.Random, directory: Path) -> None:
    """Write to `directory` what a drive may hold if the power fails after the events of `log`."""
    inodes: dict[int, _Inode] = {}
    names: dict[str, int] = {}
    changes: list[Event] = []
    for event in log:
        kind, *args = event
        if kind == "create":
            inode, _, size = args
            inodes[inode] = _Inode(size, bytearray(size))
            changes.append(event)
        elif kind in ("rename", "remove"):
            changes.append(event)
        elif kind == "sync_directory":
            for change in changes:
                _apply(names, change)
            changes.clear()
        elif kind == "write":
            inode, offset, written = args
            inodes[inode].pending.append((offset, written))
        elif kind == "sync":
            one = inodes[args[0]]
            for offset, written in one.pending:
                one.durable[offset : offset + len(written)] = written
            one.pending.clear()
            one.is_synced = True
    for change in changes:
        if chance.random() < 0.5:
            _apply(names, change)
    share = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    for name, inode in names.items():
        (directory / name).write_bytes(_left_of(inodes[inode], chance, share))


def after_kill(log: Sequence[Event], chance: random.Random, directory: Path) -> None:
    """Write to `directory` what a process leaves that is killed after the events of `log`.

    All that it has written arrives in the end, but of the writes that were under way any sectors.
    """
    done = list(log)
    while done and done[-1][0] == "write" and len(log) - len(done) < IO_THREADS:
        done.pop()
    synced = [("sync", event[1]) for event in done if event[0] == "create"]
    late = log[len(done) :]
    after_power_loss([*done, *synced, ("sync_directory",), *late], chance, directory)


def _apply(names: dict[str, int], change: Event) -> None:
    kind, *args = change
    if kind == "create":
        names[args[1]] = args[0]
    elif kind == "rename":
        if args[0] in names:
            names[args[1]] = names.pop(args[0])
    else:
        names.pop(args[0], None)


def _left_of(inode: _Inode, chance: random.Random, share: float) -> bytes:
    left = bytearray(inode.durable)
    sectors = [
        (offset + at, written[at : at + SECTOR])
        for offset, written in inode.pending
        for at in range(0, len(written), SECTOR)
    ]
    chance.shuffle(sectors)
    for at, sector in sectors:
        if chance.random() < share:
            left[at : at + SECTOR] = sector
    if not inode.is_synced and chance.random() < 0.5:
        return bytes(left[: chance.randrange(inode.size)])
    return bytes(left)


# -- any sequence of operations and deaths, against a dict ----------------------------------------

CHAINS = [chain(20, seed=str(number)) for number in range(4)]
KINDS = [{"part": at, "block_bytes": (SLOT, 3 * SLOT - 1)[at % 2]} for at in range(4)]
"""The number of a chain is its part; the even ones have blocks of one size, the odd of another."""
numbers = st.integers(0, 3)


class NvmeMachine(RuleBasedStateMachine):
    """The model is the blocks that are there, with their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = spec(num_segments=3)
        self.model: set[Block] = set()
        self.flushed: set[Block] = set()
        """Those of the model that survive a power loss."""
        self.open_in(Path(tempfile.mkdtemp(prefix="kvray-nvme-")))

    def open_in(self, directory: Path) -> None:
        self.directory, self.disk = directory, RecordingDisk()
        self.store = open_store(self.directory, self.asked, disk=self.disk)
        self.before = self.now = self.moment()

    def moment(self) -> tuple[int, set[Block], set[Block]]:
        self.disk.note("settled")  # no write is under way
        return len(self.disk.log), set(self.model), set(self.flushed)

    def ready(self) -> set[Block]:
        return blocks_of(self.store)

    @rule(number=numbers, until=st.integers(1, 20))
    def store_chain(self, number: int, until: int) -> None:
        arena, keys = arena_tables(), CHAINS[number][:until]
        one = chain_for(self.store, arena, keys, **KINDS[number])
        before = self.ready()
        assert before <= self.model
        (mask,) = self.store.write([one], arena)
        assert mask.all()
        new = {(keys[row], number) for row in one.reservation.rows.tolist()}
        assert self.ready() == before | new
        self.model = before | new

    @rule(number=numbers)
    def give_up_half_way(self, number: int) -> None:
        one = chain_for(self.store, arena_tables(), CHAINS[number], **KINDS[number])
        self.model &= self.ready()
        self.store.abort(one)
        assert self.ready() == self.model

    @rule(number=numbers, row=st.integers(0, 19))
    def store_what_is_wrong(self, number: int, row: int) -> None:
        arena = arena_tables()
        one = chain_for(self.store, arena, CHAINS[number], **KINDS[number])
        wrong: set[Block] = set()
        if row < len(one.arena_slots):
            payload.slot_bytes(arena, int(one.arena_slots[row]))[0] ^= 1
            wrong = {(CHAINS[number][one.reservation.rows[row]], number)}
        assert self.store.write([one], arena)[0].all()
        written = self.ready()
        assert wrong <= written
        promote(self.store, CHAINS[number], **KINDS[number])
        self.model = self.ready()
        assert self.model == written - wrong, "the read finds it"

    @rule(count=st.integers(1, 30))
    def evict(self, count: int) -> None:
        went = evict(self.store, count)
        assert len(self.model) - len(self.ready()) == went
        assert self.ready() <= self.model
        self.model = self.ready()

    @rule(number=numbers)
    def read(self, number: int) -> None:
        keys = CHAINS[number]
        got = promote(self.store, keys, **KINDS[number])
        assert got.tolist() == [(key, number) in self.model for key in keys]

    @rule(note_use=st.booleans())
    def flush(self, note_use: bool) -> None:
        self.store.flush(note_use=note_use)
        self.flushed = set(self.model)

    @rule(flush=st.booleans())
    def start_again(self, flush: bool) -> None:
        if flush:
            self.flush(note_use=False)
        self.store.close()
        self.store = open_store(self.directory, self.asked, disk=self.disk)
        found = self.ready()
        assert found == self.model if flush else found >= self.model
        self.read_all()

    def read_all(self) -> None:
        for number, keys in enumerate(CHAINS):
            # What was evicted and came back may have been overwritten: then it is refused.
            promote(self.store, keys, **KINDS[number])
        assert self.ready() >= self.model
        self.model = self.ready()

    @rule(
        flush=st.booleans(),
        place=st.just(1.0) | st.floats(0, 1),
        is_kill=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def die(self, flush: bool, place: float, is_kill: bool, seed: int) -> None:
        """End in what was done last, or after it: the process alone, or the whole machine."""
        if flush:
            self.flush(note_use=False)
            self.before, self.now = self.now, self.moment()
        self.store.close()
        start, model, flushed = self.before if place < 1 else self.now
        cut = start + int(place * (self.now[0] - start))
        # What was under way may already have evicted some.
        self.flushed &= flushed
        self.model = self.model & model if is_kill else set(self.flushed)
        left = Path(tempfile.mkdtemp(prefix="kvray-nvme-"))
        leave = after_kill if is_kill else after_power_loss
        leave(self.disk.log[:cut], random.Random(seed), left)
        shutil.rmtree(self.directory)
        self.open_in(left)
        report = self.store.report
        assert not report.aside, "a file had its name before it was whole"
        assert not is_kill or (report.damaged, report.truncated) == (0, 0)
        self.read_all()

    @invariant()
    def tables_are_valid_and_files_stay_within_the_capacity(self) -> None:
        check_invariants(self.store.tables)
        assert not self.store.tables.slot_leases.any()
        used = sum(path.stat().st_blocks * 512 for path in self.directory.glob("segment-*"))
        assert used <= self.asked.capacity
        self.flushed &= self.model
        self.before, self.now = self.now, self.moment()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)


NvmeMachine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=40)
test_store_is_a_dict_that_forgets = NvmeMachine.TestCase


def test_record_is_never_written_before_its_payload_is_durable(reopen):
    disk = RecordingDisk()
    store = reopen(disk=disk)
    for number, keys in enumerate(CHAINS):
        demote(store, keys, **KINDS[number])
        evict(store, 5)
        demote(store, keys, **KINDS[number])
    pending: dict[int, bool] = {}
    for kind, *args in disk.log:
        if kind == "write":
            inode, offset, _ = args
            is_record = 4096 <= offset < 8192
            assert not (is_record and pending.get(inode)), "a record overtook a payload"
            if offset >= 8192:
                pending[inode] = True
        elif kind == "sync":
            pending[args[0]] = False
    assert pending


def test_file_that_gives_way_is_gone_for_good_before_another_has_its_name(reopen):
    disk = RecordingDisk()
    store = reopen(spec(num_segments=1), disk=disk)
    for number, keys in enumerate(CHAINS):
        demote(store, keys[:3], **KINDS[number])
    changes = [event[0] for event in disk.log if event[0] in ("remove", "rename", "sync_directory")]
    named = ["rename", "sync_directory"]
    assert changes == named + 3 * ["remove", "sync_directory", *named]
