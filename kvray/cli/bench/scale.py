"""How much a run measures, and the memory that this takes."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvray.config import format_size
from kvray.errors import CapacityError, ConfigError
from kvray.store import ArenaSpec

LARGE_BYTES = 4 * 2**20
SMALL_BYTES = 128 * 2**10
NUM_READERS = 4
TOKENS_PER_BLOCK = 32
SHORT_TOKENS, LONG_TOKENS = 8_192, 131_072

_CAPACITY_MIN = 64 * 2**20
_SLAB_BYTES = 64 * 2**20
_SLOT_MIN = 64 * 2**10
_LOOKUP_BLOCK_BYTES = 4096
_SMALL_PAIRS = 5
"""Pairs of small blocks for each of large ones: they take a thirtieth of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The counts of a run."""

    capacity: int
    """Bytes of the arena that is stored into."""
    num_large: int
    num_small: int
    pairs: int
    """Pairs of copies of large blocks."""
    first_pairs: int
    """Fresh arenas that are stored into; each has to be made and touched first."""
    short_lookups: int
    long_lookups: int
    lookup_slots: int
    """Slots of the arena of the lookups."""

    @classmethod
    def fit(cls, capacity: int, *, repeat: int | None, quick: bool) -> "Scale":
        """Return the counts for an arena of `capacity` bytes and `repeat` pairs of each kind.

        Raises:
            ConfigError: the capacity is too small for anything to be measured.
        """
        if capacity < _CAPACITY_MIN:
            raise ConfigError(
                f"--capacity {format_size(capacity)} is too small to measure anything; give at"
                f" least {format_size(_CAPACITY_MIN)}."
            )
        if quick:
            capacity = min(capacity, _CAPACITY_MIN)
        return cls(
            capacity=capacity,
            num_large=min(256, capacity // LARGE_BYTES),
            num_small=32 if quick else 256,
            pairs=repeat or (3 if quick else 15),
            first_pairs=repeat or (2 if quick else 5),
            short_lookups=repeat or (20 if quick else 1000),
            long_lookups=repeat or (5 if quick else 100),
            # As many as a default arena of 4 GiB has: the tables, not the blocks, are looked up.
            lookup_slots=8_192 if quick else 65_536,
        )

    def pairs_of(self, block_bytes: int) -> int:
        """Return how many pairs of copies there are of blocks of that size."""
        return self.pairs * (1 if block_bytes == LARGE_BYTES else _SMALL_PAIRS)

    @property
    def large_bytes(self) -> int:
        """Bytes of all large blocks: what the writer stores, and what a reader retrieves."""
        return self.num_large * LARGE_BYTES

    def num_shelves(self, num_bytes: int) -> int:
        """Return into how many parts of `num_bytes` a buffer falls.

        Copies of few bytes take turns on them: the blocks of a request are not in the cache.
        """
        return self.large_bytes // num_bytes

    def block_spec(self) -> ArenaSpec:
        """Return the arena of the copies."""
        return _spec(self.capacity, slot_min=_SLOT_MIN)

    def lookup_spec(self) -> ArenaSpec:
        """Return the arena of the lookups: its blocks are as small as can be."""
        return _spec(self.lookup_slots * _LOOKUP_BLOCK_BYTES, slot_min=_LOOKUP_BLOCK_BYTES)

    def check_memory(self, directory: Path) -> None:
        """Make sure that the run fits.

        Raises:
            CapacityError: it does not; the message has the arithmetic.
            ConfigError: there is no such directory.
        """
        specs = (self.block_spec(), self.lookup_spec())
        arena = max(spec.geometry().file_bytes for spec in specs)
        try:
            stat = os.statvfs(directory)
        except OSError as error:
            raise ConfigError(
                f"No arena can be made in {directory} ({error.strerror}); set arena.dir."
            ) from None
        room, memory = stat.f_bavail * stat.f_frsize, psutil.virtual_memory().available
        needed = arena + (1 + NUM_READERS) * self.large_bytes
        if arena > room:
            raise CapacityError(
                f"The bench's arena takes {format_size(arena)} and {directory} has"
                f" {format_size(room)} free; give a smaller --capacity, or --quick."
            )
        if needed > memory:
            raise CapacityError(
                f"The bench takes {format_size(needed)} of memory ({format_size(arena)} for the"
                f" arena, {1 + NUM_READERS} x {format_size(self.large_bytes)} for the buffers of"
                f" its writer and its readers) and {format_size(memory)} are available; give a"
                " smaller --capacity, or --quick."
            )


def _spec(capacity: int, *, slot_min: int) -> ArenaSpec:
    return ArenaSpec(
        cluster_name="bench",
        capacity=capacity,
        slab=_SLAB_BYTES,
        slot_min=slot_min,
        holders_max=16,
    )
