"""What a process of the bench does: kvray's work and the bare work, each over the same bytes."""

import hashlib
import mmap
import struct
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import default_rng

from kvray.block import BlockKey
from kvray.cli.bench.scale import TOKENS_PER_BLOCK
from kvray.errors import KVRayError
from kvray.keys import chain_keys, request_seed
from kvray.store import Arena, Lease
from kvray.store.prefault import mapping_of, populate
from kvray.store.tables import Array

_LOCK_WAIT_S = 1.0
"""Nothing here may end as a miss: the readers of one run take the lock in turn."""
_SEED = request_seed(b"kvray bench")
_TOKENS_IN_VOCABULARY = 128_000
_PATTERN_BYTES = 2**20

Span = tuple[float, float, float]
"""(began, ended, CPU seconds) of timed work; the clock is the machine's."""


class Work:
    """One process's arena and buffer, and the work on them; answers are plain data."""

    def __init__(self) -> None:
        """Start with neither an arena nor a buffer."""
        self._arena: Arena | None = None
        self._buffer = np.empty(0, dtype=np.uint8)

    def attach(self, *, directory: str) -> None:
        """Map the arena in `directory` in place of the one before, as an engine's link does."""
        self.detach()
        self._arena = Arena(Path(directory), lock_wait_s=_LOCK_WAIT_S)
        self._arena.join("bench")
        populate(mapping_of(self._arena.tables))

    def detach(self) -> None:
        """Unmap the arena. Twice is fine."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def allocate(self, *, num_bytes: int) -> None:
        """Make the buffer, page by page touched: what an engine's pinned memory is."""
        self._buffer = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
        pattern = np.frombuffer(default_rng(0).bytes(_PATTERN_BYTES), dtype=np.uint8)
        for at in range(0, num_bytes, _PATTERN_BYTES):
            self._buffer[at : at + _PATTERN_BYTES] = pattern[: num_bytes - at]

    # -- copies -------------------------------------------------------------------------------

    # A buffer and an arena have as many shelves of `num_blocks * block_bytes` as fit into them.

    def store(self, *, chain: int, num_blocks: int, block_bytes: int, shelf: int = 0) -> Span:
        """Store a shelf of the buffer as the blocks of a chain."""
        keys, pool = _block_keys(chain, num_blocks), self._pool(num_blocks, block_bytes, shelf)
        rows, arena = np.arange(num_blocks), self.arena

        def work() -> int:
            made = arena.reserve(keys, parent=None, depth=0, part=0, block_bytes=block_bytes)
            if made is None or len(made.rows) < num_blocks:
                return 0
            return num_blocks * arena.commit(made, arena.write(made, pool, rows))

        return _timed(work, expected=num_blocks)

    def retrieve(
        self, *, chain: int, num_blocks: int, block_bytes: int, shelf: int, verify: bool
    ) -> Span:
        """Copy the blocks of a chain into a shelf of the buffer."""
        keys, pool = _block_keys(chain, num_blocks), self._pool(num_blocks, block_bytes, shelf)
        rows, arena = np.arange(num_blocks), self.arena

        def work() -> int:
            leases = arena.lease(keys)
            if not leases or leases[0].num_slots < num_blocks:
                return 0
            arena.read(leases[0], pool, rows, verify=verify)
            return num_blocks * arena.release(*leases)

        return _timed(work, expected=num_blocks)

    def copy_in(self, *, num_bytes: int, shelf: int) -> Span:
        """Copy a shelf of the buffer into the arena's memory; what lay there is lost."""
        where = slice(shelf * num_bytes, (shelf + 1) * num_bytes)
        return self._copy(self.arena.tables.data[where], self._buffer[where])

    def copy_out(self, *, num_bytes: int, shelf: int) -> Span:
        """Copy a shelf of the arena's memory into the buffer."""
        where = slice(shelf * num_bytes, (shelf + 1) * num_bytes)
        return self._copy(self._buffer[where], self.arena.tables.data[where])

    # -- lookups ------------------------------------------------------------------------------

    def store_prompt(self, *, num_tokens: int, block_bytes: int) -> None:
        """Store blocks of zeros for every block of the prompt of that length."""
        keys = chain_keys(prompt(num_tokens), tokens_per_block=TOKENS_PER_BLOCK, seed=_SEED)
        made = self.arena.reserve(keys, parent=None, depth=0, part=0, block_bytes=block_bytes)
        if made is None or len(made.rows) < len(keys):
            raise KVRayError("The bench's arena is too small for its lookups; report this.")
        pool = np.zeros((len(keys), block_bytes), dtype=np.uint8)
        self.arena.commit(made, self.arena.write(made, pool, np.arange(len(keys))))

    def look_up(self, *, num_tokens: int, present: int, count: int) -> list[tuple[float, float]]:
        """Look a prompt up of which the first `present` tokens are stored, and hash it bare.

        Returns:
            `count` pairs of seconds, kvray's and the bare work's. Kvray's has all that an engine
            waits for, from the list of tokens to the lease; the lease's end is not in it.
        """
        tokens, arena = prompt(num_tokens, present), self.arena
        pairs = []
        for _ in range(count):
            began = time.perf_counter()
            keys = chain_keys(tokens, tokens_per_block=TOKENS_PER_BLOCK, seed=_SEED)
            leases = arena.lease(keys)
            seconds = time.perf_counter() - began
            arena.release(*leases or ())
            began = time.perf_counter()
            hash_bare(tokens)
            pairs.append((seconds, time.perf_counter() - began))
            _check_lookup(leases, present)
        return pairs

    # -- inside -------------------------------------------------------------------------------

    @property
    def arena(self) -> Arena:
        """The arena that was attached."""
        assert self._arena is not None
        return self._arena

    def _pool(self, num_blocks: int, block_bytes: int, shelf: int) -> Array:
        num_bytes = num_blocks * block_bytes
        on_shelf = self._buffer[shelf * num_bytes : (shelf + 1) * num_bytes]
        return on_shelf.reshape(num_blocks, block_bytes)

    def _copy(self, target: Array, source: Array) -> Span:
        def work() -> int:
            np.copyto(target, source)
            return len(target)

        return _timed(work, expected=len(source))


def prompt(num_tokens: int, present: int | None = None) -> list[int]:
    """Return a prompt as a list, the same in every process; after `present` tokens another one."""
    rng = default_rng(num_tokens)
    tokens: list[int] = rng.integers(0, _TOKENS_IN_VOCABULARY, num_tokens).tolist()
    if present is not None:
        others = default_rng(num_tokens + 1)
        tokens[present:] = others.integers(0, _TOKENS_IN_VOCABULARY, num_tokens - present).tolist()
    return tokens


def hash_bare(tokens: Sequence[int]) -> bytes:
    """Pack a prompt and run sha256 over its chained blocks: what no lookup can do without."""
    packed = struct.pack(f"<{len(tokens)}i", *tokens)
    parent, step = _SEED, 4 * TOKENS_PER_BLOCK
    for at in range(0, len(packed), step):
        parent = hashlib.sha256(parent + packed[at : at + step]).digest()
    return parent


@lru_cache(maxsize=2)
def _block_keys(chain: int, num_blocks: int) -> list[BlockKey]:
    tokens = np.full(num_blocks * TOKENS_PER_BLOCK, chain)
    return chain_keys(tokens, tokens_per_block=TOKENS_PER_BLOCK, seed=_SEED)


def _timed(work: Callable[[], int], *, expected: int) -> Span:
    """Do `work` and time it; it says how much it did.

    Raises:
        KVRayError: it did less than it should, so that its time says nothing.
    """
    cpu_s, began = time.process_time(), time.monotonic()
    done: Any = work()
    ended, cpu_s = time.monotonic(), time.process_time() - cpu_s
    if done != expected:
        raise KVRayError(
            f"A step of the bench did {done} of {expected}: the arena was busy or had no room;"
            " run it again, with a larger --capacity if it happens again."
        )
    return began, ended, cpu_s


def _check_lookup(leases: list[Lease] | None, present: int) -> None:
    found = sum(lease.num_slots for lease in leases or ())
    if leases is None or found != present // TOKENS_PER_BLOCK:
        raise KVRayError(
            f"A lookup found {found} blocks instead of {present // TOKENS_PER_BLOCK}; run the"
            " bench again."
        )
