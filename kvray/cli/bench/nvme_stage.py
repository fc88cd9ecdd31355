"""What `kvray bench nvme` works with: an arena, a store on a disk, and the floor beside both."""

from __future__ import annotations

import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kvray.block import KEY_BYTES, BlockKey
from kvray.cli.bench.bare_disk import BareDisk, best_settings, check_cold, timed
from kvray.cli.bench.pairs import Timing
from kvray.cli.interrupts import Interrupts
from kvray.errors import KVRayError
from kvray.store import Arena, ArenaOwner, ArenaSpec, Reservation, key_index
from kvray.store.layout import align
from kvray.store.nvme import Demotion, NvmeSpec, NvmeStore
from kvray.store.nvme.record import RECORD
from kvray.store.pages import mapped_file
from kvray.store.tables import Array

_LOCK_WAIT_S = 1.0
_SLAB_BYTES = 64 * 2**20
_SLOT_MIN = 64 * 2**10
_PATTERN_BYTES = 2**20
_SMALL_PAGE = 4096


class NvmeStage:
    """One arena of `num_bytes`, and blocks of one size that fill it; all ends with `stack`."""

    def __init__(
        self,
        *,
        num_bytes: int,
        arena_directory: Path,
        disk_directory: Path,
        stack: ExitStack,
        interrupts: Interrupts,
    ) -> None:
        """Make the arena.

        Args:
            num_bytes: of the blocks that one store or retrieve moves.
            arena_directory: an empty directory in shared memory.
            disk_directory: an empty directory on a disk.
            stack: closes what is made here.
            interrupts: held back while something is made.
        """
        self.num_bytes = num_bytes
        self._disk_directory = disk_directory
        self._store: NvmeStore | None = None
        self._block_bytes = 0
        self._keys: list[BlockKey] = []
        with interrupts.held():
            self._arena = Arena.create(
                arena_directory,
                ArenaSpec(
                    cluster_name="bench",
                    capacity=num_bytes,
                    slab=_SLAB_BYTES,
                    slot_min=_SLOT_MIN,
                    holders_max=2,
                ),
                lock_wait_s=_LOCK_WAIT_S,
            )
            stack.callback(self._arena.close)
            stack.callback(ArenaOwner(self._arena).retire)
            self._arena.join("bench")
            self._memory = self._arena.tables.data[:num_bytes]
            self._floor = BareDisk(disk_directory / "floor", self._memory)
            stack.callback(self._floor.close)
            stack.callback(self.drop_store)
        self.page_bytes = _page_bytes(arena_directory / "arena")
        self.is_direct = True
        self._fill()
        self.store_setting, self.retrieve_setting = best_settings(
            self._floor, memory_bytes=num_bytes
        )

    def drop_store(self) -> None:
        """Close the store, and remove its files. Twice is fine."""
        if self._store is not None:
            self.is_direct &= self._store.stats().is_direct
            self._store.close()
            shutil.rmtree(self._store.directory, ignore_errors=True)
            self._store = None

    # -- before a measurement -----------------------------------------------------------------

    def renew(self, block_bytes: int) -> None:
        """Have a store whose one file was made for such blocks and has room for one arena of them.

        Nothing was ever written there, as in the floor's file.
        """
        self.drop_store()
        self._block_bytes = block_bytes
        stride = max(block_bytes, _SLOT_MIN)
        # One slot more: a block that is not timed has the store make its file.
        payload = self.num_bytes + stride
        self._store = NvmeStore(
            self._disk_directory / "tier",
            NvmeSpec(
                cluster_name="bench",
                capacity=payload + 2 * _SMALL_PAGE + align(payload // _SLOT_MIN * RECORD.itemsize),
                segment=payload,
                slot_min=_SLOT_MIN,
            ),
        )
        self._floor.renew()
        self._put(1)
        self.store_ours(0)

    def put_new(self) -> None:
        """Fill the arena with the blocks of a chain that the store does not have."""
        self._put(self.num_bytes // self._block_bytes)

    def go_cold(self) -> None:
        """Take everything out of the arena and out of the page cache."""
        ArenaOwner(self._arena).clear()
        self._memory[:] = 0
        check_cold([self._floor.path, *sorted(self.tier.directory.glob("segment-*"))])

    # -- measured -----------------------------------------------------------------------------

    def store_ours(self, index: int) -> Timing:
        """Demote the arena's blocks, for good."""
        packed = key_index.pack_keys(self._keys)
        slots = key_index.find(self._arena.tables, packed, 0)
        stored = np.zeros(0, dtype=bool)

        def work() -> None:
            nonlocal stored
            pending = self.tier.reserve(
                packed, parent=None, depth=0, part=0, block_bytes=self._block_bytes
            )
            rows = pending.reservation.rows
            demotion = Demotion(pending=pending, arena_slots=slots[rows])
            (stored,) = self.tier.write([demotion], self._arena.tables)
            self.tier.flush()

        timing = timed(work)
        self._check(stored, "stored")
        return timing

    def store_into_full(self, index: int) -> Timing:
        """Demote blocks that the store lacks, so that each has to push another one out."""
        self.put_new()
        return self.store_ours(index)

    def store_bare(self, index: int) -> Timing:
        """Write the arena's bytes to the floor's file."""
        return self._floor.store(self.store_setting)

    def retrieve_ours(self, index: int) -> Timing:
        """Promote the chain that was demoted last."""
        self.go_cold()
        packed = key_index.pack_keys(self._keys)
        sound = np.zeros(0, dtype=bool)

        def work() -> None:
            nonlocal sound
            made = self._reserve()
            got = self.tier.read(packed[made.rows], 0, self._arena.tables, made.slots)
            sound = got.sound
            if sound.all():
                self._arena.commit(made, got.checksums)

        timing = timed(work)
        self._check(sound, "retrieved")
        return timing

    def retrieve_bare(self, index: int) -> Timing:
        """Read the floor's file into the arena's bytes."""
        self.go_cold()
        timing = self._floor.retrieve(self.retrieve_setting)
        starts = self._memory.view("<u8")[:: _SMALL_PAGE // 8]
        self._check(starts != 0, "read bare")
        return timing

    # -- inside -------------------------------------------------------------------------------

    @property
    def tier(self) -> NvmeStore:
        """The store that `renew` has made."""
        assert self._store is not None
        return self._store

    def _put(self, num_blocks: int) -> None:
        ArenaOwner(self._arena).clear()
        self._fill()
        self._keys = [BlockKey(secrets.token_bytes(KEY_BYTES)) for _ in range(num_blocks)]
        made = self._reserve()
        self._arena.commit(made, self._arena.sums(made))

    def _reserve(self) -> Reservation:
        made = self._arena.reserve(
            self._keys, parent=None, depth=0, part=0, block_bytes=self._block_bytes
        )
        if made is None or len(made.slots) < len(self._keys):
            raise KVRayError("The bench's arena was busy or had no room; run it again.")
        return made

    def _fill(self) -> None:
        """Have bytes of which no page is like another, as far as a disk can tell, nor zero."""
        chance = np.random.default_rng(self._memory.nbytes)
        pattern = chance.integers(1, 256, _PATTERN_BYTES, dtype="u1")
        for at in range(0, self._memory.nbytes, _PATTERN_BYTES):
            piece = self._memory[at : at + _PATTERN_BYTES]
            np.copyto(piece, pattern[: len(piece)])
            piece.view("<u8")[:: _SMALL_PAGE // 8] += np.uint64(at + 1)

    def _check(self, done: Array, what: str) -> None:
        if not len(done) or not done.all():
            raise KVRayError(
                f"Only {np.count_nonzero(done)} of {len(done)} blocks of the bench were {what}; its"
                " figures would say nothing. This is a defect, or the disk is failing."
            )


def _page_bytes(path: Path) -> int:
    """Return the size of the pages of which most of a mapped file is made."""
    file = mapped_file(Path("/proc/self/smaps").read_text(), path)
    if file is None or 2 * file.huge_bytes < file.mapped_bytes:
        return _SMALL_PAGE
    return file.huge_page_bytes
