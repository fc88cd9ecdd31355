"""The objects of `kvray bench nvme`: an arena, a store on a disk, and the floor beside both."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import numpy as np

from kvray.errors import KVRayError
from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.lab.bench.bare_disk import BareDisk, check_cold
from kvray.lab.bench.runner import SLOT_MIN, Duration, Runner, bench_spec, reserve_all, timed
from kvray.store import ArenaOwner
from kvray.store.arena import key_index
from kvray.store.arena.layout import align
from kvray.store.arena.tables import Array
from kvray.store.machine.pages import mapped_file
from kvray.store.nvme import NvmeSpec, NvmeStore
from kvray.store.nvme.record import RECORD

_PATTERN_BYTES = 2**20
_SMALL_PAGE = 4096


class NvmeBench:
    """One arena of `num_bytes`, and blocks of one size that fill it; all ends with the run.

    It finds out first how the floor is fastest.
    """

    def __init__(self, num_bytes: int, arena_dir: Path, disk: Path, *, runner: Runner) -> None:
        self.num_bytes = num_bytes
        self._disk = runner.make_directory(disk)
        self._store: NvmeStore | None = None
        self._block_bytes = 0
        self._keys: list[BlockKey] = []
        directory = runner.make_directory(arena_dir)
        self._arena = runner.make_arena(directory, bench_spec(num_bytes))
        self._arena.join("bench")
        self._memory = self._arena.tables.data[:num_bytes]
        self._floor = BareDisk(self._disk / "floor", self._memory)
        runner.stack.callback(self._floor.close)
        runner.stack.callback(self._drop_store)
        self.page_bytes = _page_bytes(directory / "arena")
        self.is_direct = True
        self._fill()
        self.bare_stores, self.bare_retrieves = self._floor.fastest()

    def _drop_store(self) -> None:
        if self._store is not None:
            self.is_direct &= self._store.stats().is_direct
            self._store.close()
            shutil.rmtree(self._store.directory, ignore_errors=True)
            self._store = None

    def renew(self, block_bytes: int) -> None:
        """Make a store whose only file has room for one arena of blocks of that size.

        Nothing was ever written there, as in the floor's file.
        """
        self._drop_store()
        self._block_bytes = block_bytes
        stride = max(block_bytes, SLOT_MIN)
        # One slot more, for the block below: it makes the store create its file before any timing.
        payload = self.num_bytes + stride
        self._store = NvmeStore(
            self._disk / "tier",
            NvmeSpec(
                cluster_name="bench",
                capacity=payload + 2 * _SMALL_PAGE + align(payload // SLOT_MIN * RECORD.itemsize),
                segment=payload,
                slot_min=SLOT_MIN,
            ),
        )
        self._floor.renew()
        self._put(1)
        self.store(0)

    def put_new(self) -> None:
        """Fill the arena with the blocks of a chain that the store does not have."""
        self._put(self.num_bytes // self._block_bytes)

    def store(self, index: int) -> Duration:
        """Demote the arena's blocks, for good."""
        packed = key_index.pack_keys(self._keys)
        slots = key_index.find(self._arena.tables, packed, 0)
        stored = np.zeros(0, dtype=bool)

        def work() -> None:
            nonlocal stored
            demotion = self._tier.reserve(
                packed, slots, parent=None, depth=0, part=0, block_bytes=self._block_bytes
            )
            (stored,) = self._tier.write([demotion], self._arena.tables)
            self._tier.flush()

        duration = timed(work)
        _check(stored, "stored")
        return duration

    def store_into_full(self, index: int) -> Duration:
        """Demote blocks that the store lacks, so that each has to push another one out."""
        self.put_new()
        return self.store(index)

    def store_bare(self, index: int) -> Duration:
        """Write the arena's bytes to the floor's file."""
        return self._floor.store(self.bare_stores)

    def retrieve(self, index: int) -> Duration:
        """Promote the chain that was demoted last."""
        self._go_cold()
        packed = key_index.pack_keys(self._keys)
        sound = np.zeros(0, dtype=bool)

        def work() -> None:
            nonlocal sound
            made = reserve_all(self._arena, self._keys, block_bytes=self._block_bytes)
            got = self._tier.read(packed[made.rows], 0, self._arena.tables, made.slots)
            sound = got.sound
            if sound.all():
                self._arena.commit(made, got.checksums)

        duration = timed(work)
        _check(sound, "retrieved")
        return duration

    def retrieve_bare(self, index: int) -> Duration:
        """Read the floor's file into the arena's bytes."""
        self._go_cold()
        duration = self._floor.retrieve(self.bare_retrieves)
        starts = self._memory.view("<u8")[:: _SMALL_PAGE // 8]
        _check(starts != 0, "read bare")
        return duration

    @property
    def _tier(self) -> NvmeStore:
        assert self._store is not None
        return self._store

    def _go_cold(self) -> None:
        """Empty the arena, and drop both files from the page cache."""
        ArenaOwner(self._arena).clear()
        self._memory[:] = 0
        check_cold([self._floor.path, *sorted(self._tier.directory.glob("segment-*"))])

    def _put(self, num_blocks: int) -> None:
        ArenaOwner(self._arena).clear()
        self._fill()
        self._keys = [BlockKey(secrets.token_bytes(KEY_BYTES)) for _ in range(num_blocks)]
        made = reserve_all(self._arena, self._keys, block_bytes=self._block_bytes)
        self._arena.commit(made, self._arena.sums(made))

    def _fill(self) -> None:
        """Make all pages differ, and none of them zero: a disk might merge such pages."""
        chance = np.random.default_rng(self._memory.nbytes)
        pattern = chance.integers(1, 256, _PATTERN_BYTES, dtype="u1")
        for at in range(0, self._memory.nbytes, _PATTERN_BYTES):
            piece = self._memory[at : at + _PATTERN_BYTES]
            np.copyto(piece, pattern[: len(piece)])
            piece.view("<u8")[:: _SMALL_PAGE // 8] += np.uint64(at + 1)


def _check(done: Array, verb: str) -> None:
    if not len(done) or not done.all():
        raise KVRayError(
            f"Only {np.count_nonzero(done)} of {len(done)} blocks of the bench were {verb}; its"
            " figures would mean nothing. This is a defect, or the disk is failing."
        )


def _page_bytes(path: Path) -> int:
    """Return the size of the pages of which most of a mapped file is made."""
    file = mapped_file(Path("/proc/self/smaps").read_text(), path)
    if file is None or 2 * file.huge_bytes < file.mapped_bytes:
        return _SMALL_PAGE
    return file.huge_page_bytes
