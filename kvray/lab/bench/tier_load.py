"""The load of `kvray bench tier` in one process: prefixes are leased, copied, and stored."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import count
from typing import TypedDict, TypeVar

import numpy as np
from numpy.random import default_rng

from kvray.config import format_size
from kvray.identity.block import BlockKey
from kvray.identity.keys import chain_keys, request_seed
from kvray.lab.bench.runner import LOCK_WAIT_S, TOKENS_PER_BLOCK
from kvray.store import Arena
from kvray.store.arena.tables import Array

PREFIX_BYTES = 32 * 2**20
"""Bytes of every prefix, whatever the size of its blocks: 256 blocks of 128 KiB."""

BUFFER_BYTES = 16 * PREFIX_BYTES
"""The pool, and as much shared memory for bare copies: more than a cache keeps."""

PREFIXES_PER_TURN = 2**17
"""Prefixes below have been stored before the load; each turn of a process has as many new ones."""

_SEED = request_seed(b"kvray bench")
_ZIPF_EXPONENT = 1.0
_NEW_SHARE = 0.1
_DRAWN = 256

_Result = TypeVar("_Result")


class Found(TypedDict):
    """What a process measured; sizes are those of a block, as text."""

    copies: dict[str, list[float]]
    """"store 4MiB" -> bytes, kvray's seconds, bare seconds."""
    calls: dict[str, list[float]]
    """"reserve 4MiB" -> the seconds of each call."""
    counts: dict[str, int]
    """Blocks asked for, hit and dropped; calls that found the arena busy."""


def merge(founds: Iterable[Found]) -> Found:
    """Return what several processes, or one in several turns, measured."""
    merged = Found(copies={}, calls={}, counts={})
    for found in founds:
        for name, sums in found["copies"].items():
            before = merged["copies"].get(name, [0.0] * len(sums))
            merged["copies"][name] = [a + b for a, b in zip(before, sums, strict=True)]
        for name, seconds in found["calls"].items():
            merged["calls"].setdefault(name, []).extend(seconds)
        for name, number in found["counts"].items():
            merged["counts"][name] = merged["counts"].get(name, 0) + number
    return merged


@lru_cache(maxsize=4096)
def block_keys(chain: int, num_blocks: int) -> list[BlockKey]:
    """Return the keys of a chain; chains of other numbers share none."""
    tokens = np.full(num_blocks * TOKENS_PER_BLOCK, chain)
    return chain_keys(tokens, tokens_per_block=TOKENS_PER_BLOCK, seed=_SEED)


class Load:
    """One process's requests to an arena, each beside a bare copy of as many bytes."""

    def __init__(self, arena: Arena, buffer: Array) -> None:
        """Begin with a prefaulted buffer of BUFFER_BYTES."""
        self._arena = arena
        sections = buffer[:BUFFER_BYTES].reshape(2, -1, PREFIX_BYTES)
        self._pool, self._shared = sections
        self._asks, self._turns = count(), count()
        self._place = 0
        self._copies: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._calls: defaultdict[str, list[float]] = defaultdict(list)
        self._counts = dict.fromkeys(("asked", "hit", "dropped", "busy"), 0)

    def take(self) -> Found:
        """Return what has been measured so far."""
        return Found(copies=self._copies, calls=self._calls, counts=self._counts)

    def play(self, sizes: Sequence[int], *, num_prefixes: int, turn: int, seconds: float) -> None:
        """Ask for prefixes for so long; the sizes of blocks take turns from hot to cold.

        One in ten is new: no other turn, from 1 on, has it.
        """
        deadline, rng = time.monotonic() + seconds, default_rng(turn)
        weights = 1 / np.arange(1, num_prefixes + 1) ** _ZIPF_EXPONENT
        weights /= weights.sum()
        new = count(turn * PREFIXES_PER_TURN)
        while True:
            for drawn in rng.choice(num_prefixes, _DRAWN, p=weights).tolist():
                prefix = next(new) if rng.random() < _NEW_SHARE else drawn
                if time.monotonic() > deadline:
                    return
                self.ask(prefix, sizes[prefix % len(sizes)])

    def ask(self, prefix: int, size: int) -> None:
        """Lease a prefix and copy what is here; reserve, write and commit what is not."""
        arena, name = self._arena, format_size(size)
        keys = block_keys(prefix, PREFIX_BYTES // size)
        self._counts["asked"] += len(keys)
        self._place = next(self._asks) % len(self._pool)
        pool = self._pool[self._place].reshape(-1, size)
        rows = np.arange(len(keys))
        leases, seconds = self._call(f"lease {name}", lambda: arena.lease(keys))
        if leases is None:
            self._counts["busy"] += 1
            return
        hit = leases[0].num_slots if leases else 0
        self._counts["hit"] += hit
        if hit:
            read, bare = self._beside(
                lambda: arena.read(leases[0], pool, rows[:hit], verify=False),
                is_store=False,
                num_bytes=hit * size,
            )
        if tail := keys[hit:]:
            self._store(tail, keys[hit - 1] if hit else None, pool[hit:], depth=hit)
        _, released = _timed(lambda: arena.release(*leases, wait_s=LOCK_WAIT_S))
        if hit:
            self._add(f"retrieve {name}", hit * size, seconds + read + released, bare)

    def _store(
        self, keys: list[BlockKey], parent: BlockKey | None, pool: Array, *, depth: int
    ) -> None:
        arena, size = self._arena, pool.shape[1]
        name = format_size(size)
        made, reserved = self._call(
            f"reserve {name}",
            lambda: arena.reserve(keys, parent=parent, depth=depth, part=0, block_bytes=size),
        )
        if made is None:
            self._counts["busy"] += 1
            return
        self._counts["dropped"] += made.dropped
        if not len(made.slots):
            return
        sums: list[Array] = []
        num_bytes = len(made.slots) * size
        written, bare = self._beside(
            lambda: sums.append(arena.write(made, pool, made.rows)),
            is_store=True,
            num_bytes=num_bytes,
        )
        _, committed = self._call(f"commit {name}", lambda: arena.commit(made, sums[0]))
        self._add(f"store {name}", num_bytes, reserved + written + committed, bare)

    def _beside(
        self, work: Callable[[], object], *, is_store: bool, num_bytes: int
    ) -> tuple[float, float]:
        """Return the seconds of `work` and of a bare copy; they take turns at going first."""
        place = self._place - len(self._pool) // 2  # in no cache
        source, target = self._pool[place, :num_bytes], self._shared[place, :num_bytes]
        if not is_store:
            source, target = target, source
        sides = [lambda: np.copyto(target, source), work]
        if next(self._turns) % 4 < 2:  # a request may take two turns
            bare, ours = (_timed(side)[1] for side in sides)
        else:
            ours, bare = (_timed(side)[1] for side in reversed(sides))
        return ours, bare

    def _add(self, name: str, *figures: float) -> None:
        self._copies[name] = [a + b for a, b in zip(self._copies[name], figures, strict=True)]

    def _call(self, name: str, work: Callable[[], _Result]) -> tuple[_Result, float]:
        result, seconds = _timed(work)
        self._calls[name].append(round(seconds, 7))
        return result, seconds


def _timed(work: Callable[[], _Result]) -> tuple[_Result, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began
