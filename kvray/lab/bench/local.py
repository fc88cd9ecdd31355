"""`kvray bench local`: stores, retrieves and lookups in an arena of this node, beside bare work."""

from __future__ import annotations

import math
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kvray.config import format_size, load_config
from kvray.errors import ConfigError
from kvray.lab.bench.report import Row, bench_report, copy_row, cores, cpu_row, hash_rows
from kvray.lab.bench.worker import call_all, start
from kvray.lab.report import Report
from kvray.lab.runner import (
    LARGE_BYTES,
    LONG_TOKENS,
    SHORT_TOKENS,
    SMALL_BYTES,
    Duration,
    Pair,
    Runner,
    bench_spec,
    measure,
    over_all,
    require_room,
)
from kvray.reference.child_process import Child
from kvray.store import Arena, ArenaOwner, ArenaSpec

NUM_READERS = 4
_CAPACITY_MIN = 64 * 2**20
_LOOKUP_BLOCK_BYTES = 4096
_SMALL_PAIRS = 5
"""Pairs of small blocks for each of large ones: they take a thirtieth of the time."""


class Copies(NamedTuple):
    """The blocks of one size that each store or retrieve copies."""

    title: str
    name: str  # end of the figures' names
    shape: tuple[int, int]  # blocks, and the bytes of each
    num_sections: int
    """Parts of a buffer. Copies of few bytes take turns on them, so that no cache has them."""
    pairs: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one copy."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalScale:
    """How much a run measures."""

    capacity: int
    large: Copies
    small: Copies
    first_pairs: int
    """Fresh arenas that are stored into; each has to be made and touched first."""
    short_lookups: int
    long_lookups: int
    lookup_spec: ArenaSpec
    """The arena of the lookups; its blocks are as small as they can be."""

    @classmethod
    def fit(cls, capacity: int, *, repeat: int | None, quick: bool) -> LocalScale:
        """Return the counts for `repeat` pairs each; ConfigError: `capacity` is too small."""
        if capacity < _CAPACITY_MIN:
            raise ConfigError(
                f"--capacity {format_size(capacity)} is too small to measure anything; give at"
                f" least {format_size(_CAPACITY_MIN)}."
            )
        if quick:
            capacity = _CAPACITY_MIN
        pairs = repeat or (3 if quick else 15)
        # An arena has whole slabs, so not quite the capacity that it was given.
        large = (min(256, bench_spec(capacity).geometry().capacity // LARGE_BYTES), LARGE_BYTES)
        small = (32 if quick else 256, SMALL_BYTES)
        sections = math.prod(large) // math.prod(small)
        # As many slots as a default arena of 4 GiB: the tables, not the blocks, are looked up.
        lookup_bytes = (8_192 if quick else 65_536) * _LOOKUP_BLOCK_BYTES
        return cls(
            capacity=capacity,
            large=Copies("4 MiB blocks", "4mib", large, 1, pairs),
            small=Copies("128 KiB blocks", "128kib", small, sections, pairs * _SMALL_PAIRS),
            first_pairs=repeat or (2 if quick else 5),
            short_lookups=repeat or (20 if quick else 1000),
            long_lookups=repeat or (5 if quick else 100),
            lookup_spec=bench_spec(lookup_bytes, slot_min=_LOOKUP_BLOCK_BYTES),
        )

    def check_memory(self, directory: Path) -> None:
        """Raise CapacityError unless the arena fits into its directory, and buffers into memory."""
        specs = (bench_spec(self.capacity), self.lookup_spec)
        arena = max(spec.geometry().file_bytes for spec in specs)
        buffers = (1 + NUM_READERS) * self.large.num_bytes
        hint, available = "give a smaller --capacity, or --quick", psutil.virtual_memory().available
        require_room(arena, shutil.disk_usage(directory).free, str(directory), hint)
        require_room(arena + buffers, available, "memory", hint)


def run(
    runner: Runner, *, config: Path | None, capacity: int, repeat: int | None, quick: bool
) -> Report:
    """Take all measurements; KVRayError: there is no room, or a step failed."""
    scale = LocalScale.fit(capacity, repeat=repeat, quick=quick)
    directory = runner.make_directory(load_config(config).arena.dir)
    scale.check_memory(directory)
    return bench_report(
        _Bench(scale, directory, runner).take_all(),
        note=f"{scale.large.shape[0]} blocks of 4 MiB and {scale.small.shape[0]} of 128 KiB in"
        f" an arena of {format_size(scale.capacity)}, on {cores()}. Ratios are medians over pairs:"
        " for copies kvray's speed over the bare copy's, for lookups kvray's time over that of"
        " hashing alone.",
        facts={
            "capacity_bytes": scale.capacity,
            "blocks_4mib": scale.large.shape[0],
            "blocks_128kib": scale.small.shape[0],
            "pairs": scale.large.pairs,
        },
    )


class _Bench:
    """An arena that this process owns, one process that stores, and four that retrieve."""

    def __init__(self, scale: LocalScale, directory: Path, runner: Runner) -> None:
        self._scale = scale
        self._runner = runner
        self._directory = directory
        self._arena: Arena | None = None
        self._arena_stack = runner.stack.enter_context(ExitStack())
        self._num_chains = 0
        self._workers = [start(runner) for _ in range(1 + NUM_READERS)]
        self._writer, self._reader = self._workers[:1], self._workers[1:2]

    def take_all(self) -> list[Row]:
        measures = {
            "first stores": self._first_stores,
            "stores": self._stores,
            "retrieves": self._retrieves,
            "lookups": self._lookups,
        }
        self._runner.show("Starting", total=len(measures))
        call_all(self._workers, "allocate", num_bytes=self._scale.large.num_bytes)
        rows: list[Row] = []
        for title, take in measures.items():
            self._runner.show(f"Measuring {title}")
            rows += take()
            self._runner.advance()
        return rows

    def _first_stores(self) -> list[Row]:
        """Store into an arena that was made and mapped a moment ago; the floor comes after it."""
        large, pairs = self._scale.large, []
        for _ in range(self._scale.first_pairs):
            self._renew_arena(bench_spec(self._scale.capacity), users=self._writer)
            pairs.append(Pair(self._store(large), self._copy(self._writer, large)))
        title = "first store into a fresh arena"
        return [copy_row(title, "first_store_{}", pairs, num_bytes=large.num_bytes)]

    def _stores(self) -> list[Row]:
        """Store into an arena with room, and into a full one, where each block evicts another."""
        large, small = self._scale.large, self._scale.small
        self._renew_arena(bench_spec(self._scale.capacity), users=self._workers)
        rows = [
            _row("store", "store", copies, self._store_pairs(copies)) for copies in (large, small)
        ]
        self._clear()
        for _ in range(-(-self._scale.capacity // large.num_bytes)):
            self._store(large)
        pairs = self._store_pairs(large, is_full=True)
        return [*rows, _row("store into a full arena", "store_full", large, pairs)]

    def _store_pairs(self, copies: Copies, *, is_full: bool = False) -> list[Pair]:
        """Return pairs of stores; the arena is emptied before it is full, unless it should be."""

        def store(index: int) -> Duration:
            section = index % copies.num_sections
            if section == 0 and not is_full:
                self._clear()
            return self._store(copies, section)

        copy = partial(self._copy, self._writer, copies)
        return measure(copies.pairs, ours=store, floor=copy)

    def _retrieves(self) -> list[Row]:
        large, small = self._scale.large, self._scale.small
        chains = self._fill(large)
        plain = self._retrieve_pairs(self._reader, chains, large)
        verified = self._retrieve_pairs(self._reader, chains, large, verify=True)
        at_once = self._retrieve_pairs(self._workers[1:], chains, large)
        names = ("retrieve_cpu_s_per_gb", "retrieve_floor_cpu_s_per_gb")
        title = f"CPU time of a retrieve, {large.title}"
        pieces = self._retrieve_pairs(self._reader, self._fill(small), small)
        return [
            _row("retrieve", "retrieve", large, plain),
            _row("retrieve and verify", "retrieve_verified", large, verified),
            _row("four readers retrieve", "retrieve4", large, at_once, times=NUM_READERS),
            _row("retrieve", "retrieve", small, pieces),
            cpu_row(title, names, plain, num_bytes=large.num_bytes),
        ]

    def _retrieve_pairs(
        self, readers: list[Child], chains: list[int], copies: Copies, *, verify: bool = False
    ) -> list[Pair]:
        """Return the pairs of readers that retrieve chain after chain, each to its section."""

        def retrieve(index: int) -> Duration:
            section = index % len(chains)
            where = {"shape": copies.shape, "section": section}
            return _time(readers, "retrieve", chain=chains[section], verify=verify, **where)

        copy = partial(self._copy, readers, copies, is_store=False)
        return measure(copies.pairs, ours=retrieve, floor=copy)

    def _lookups(self) -> list[Row]:
        """Look up a short and a long prompt of which all, half and nothing is stored."""
        self._renew_arena(self._scale.lookup_spec, users=self._workers)
        rows: list[Row] = []
        for num_tokens, prompt, count in (
            (SHORT_TOKENS, "lookup_8k", self._scale.short_lookups),
            (LONG_TOKENS, "lookup_128k", self._scale.long_lookups),
        ):
            block_bytes = _LOOKUP_BLOCK_BYTES
            call_all(self._writer, "store_prompt", num_tokens=num_tokens, block_bytes=block_bytes)
            for percent, suffix in ((100, ""), (50, "_half"), (0, "_none")):
                asked = {"num_tokens": num_tokens, "present": num_tokens * percent // 100}
                (found,) = call_all(self._reader, "look_up", count=count, **asked)
                title = f"lookup of {num_tokens:,} tokens, {percent} % stored"
                pairs = [Pair(Duration(ours), Duration(floor)) for ours, floor in found]
                name = prompt + suffix
                rows += hash_rows(title, name, pairs, has_spread=name == "lookup_8k")
        return rows

    def _renew_arena(self, spec: ArenaSpec, *, users: list[Child]) -> None:
        """Make an arena in place of the one before, and have `users` attach to it."""
        call_all(self._workers, "detach")
        self._arena_stack.close()
        runner = replace(self._runner, stack=self._arena_stack)
        self._arena = runner.make_arena(self._directory, spec)
        call_all(users, "attach", directory=str(self._directory))

    def _clear(self) -> None:
        assert self._arena is not None
        ArenaOwner(self._arena).clear()

    def _fill(self, copies: Copies) -> list[int]:
        """Store a chain from each section into the emptied arena; return their numbers."""
        self._clear()
        first = self._num_chains + 1
        for section in range(copies.num_sections):
            self._store(copies, section)
        return list(range(first, self._num_chains + 1))

    def _store(self, copies: Copies, section: int = 0) -> Duration:
        """Store a section under a chain that nothing has been stored under yet."""
        self._num_chains += 1
        where = {"shape": copies.shape, "section": section}
        return _time(self._writer, "store", chain=self._num_chains, **where)

    def _copy(
        self, workers: list[Child], copies: Copies, index: int = 0, *, is_store: bool = True
    ) -> Duration:
        """Copy a section bare, far from the one that kvray takes in this pair."""
        section = (index + copies.num_sections // 2) % copies.num_sections
        return _time(workers, "copy", shape=copies.shape, section=section, is_store=is_store)


def _time(workers: list[Child], name: str, **arguments: Any) -> Duration:
    """Have `workers` do a timed piece of work at once; return the duration of all of it."""
    return over_all(call_all(workers, name, **arguments))


def _row(title: str, name: str, copies: Copies, pairs: list[Pair], *, times: int = 1) -> Row:
    """Return the row of copies that `times` processes made at once."""
    title, names = f"{title}, {copies.title}", f"{name}_{{}}_{copies.name}"
    return copy_row(title, names, pairs, num_bytes=copies.num_bytes * times)
