"""`kvray bench local`: stores, retrieves and lookups in an arena of this node, beside bare work."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from kvray.config import format_size
from kvray.errors import CapacityError, ConfigError
from kvray.lab.bench.report import Report, Row, copy_row, cores, cpu_row, hash_rows
from kvray.lab.bench.runner import (
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
)
from kvray.lab.bench.worker import Worker, call_all
from kvray.store import Arena, ArenaOwner, ArenaSpec

NUM_READERS = 4

_CAPACITY_MIN = 64 * 2**20
_LOOKUP_BLOCK_BYTES = 4096
_SMALL_PAIRS = 5
"""Pairs of small blocks for each of large ones: they take a thirtieth of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalScale:
    """How much a run measures."""

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
    def fit(cls, capacity: int, *, repeat: int | None, quick: bool) -> LocalScale:
        """Return the counts for an arena of `capacity` bytes and `repeat` pairs of each kind.

        Raises:
            ConfigError: the capacity is too small to measure anything.
        """
        if capacity < _CAPACITY_MIN:
            raise ConfigError(
                f"--capacity {format_size(capacity)} is too small to measure anything; give at"
                f" least {format_size(_CAPACITY_MIN)}."
            )
        if quick:
            capacity = _CAPACITY_MIN
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

    def num_blocks(self, block_bytes: int) -> int:
        """Return how many blocks of that size one store or retrieve copies."""
        return self.num_large if block_bytes == LARGE_BYTES else self.num_small

    def pairs_of(self, block_bytes: int) -> int:
        """Return how many pairs of copies there are of blocks of that size."""
        return self.pairs * (1 if block_bytes == LARGE_BYTES else _SMALL_PAIRS)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a process's buffer: all large blocks."""
        return self.num_large * LARGE_BYTES

    def num_sections(self, block_bytes: int) -> int:
        """Return into how many parts of one copy each a buffer falls.

        Copies of few bytes take turns on them: the blocks of a request are not in the cache.
        """
        return self.buffer_bytes // (self.num_blocks(block_bytes) * block_bytes)

    def lookup_spec(self) -> ArenaSpec:
        """Return the arena of the lookups; its blocks are as small as they can be."""
        return bench_spec(self.lookup_slots * _LOOKUP_BLOCK_BYTES, slot_min=_LOOKUP_BLOCK_BYTES)

    def check_memory(self, directory: Path) -> None:
        """Make sure that the run fits.

        Raises:
            CapacityError: it does not; the message has the arithmetic.
            ConfigError: there is no such directory.
        """
        specs = (bench_spec(self.capacity), self.lookup_spec())
        arena = max(spec.geometry().file_bytes for spec in specs)
        try:
            stat = os.statvfs(directory)
        except OSError as error:
            raise ConfigError(
                f"No arena can be made in {directory} ({error.strerror}); set arena.dir."
            ) from None
        room, memory = stat.f_bavail * stat.f_frsize, psutil.virtual_memory().available
        needed = arena + (1 + NUM_READERS) * self.buffer_bytes
        if arena > room:
            raise CapacityError(
                f"The bench's arena takes {format_size(arena)} and {directory} has"
                f" {format_size(room)} free; give a smaller --capacity, or --quick."
            )
        if needed > memory:
            raise CapacityError(
                f"The bench takes {format_size(needed)} of memory ({format_size(arena)} for the"
                f" arena, {1 + NUM_READERS} x {format_size(self.buffer_bytes)} for the buffers of"
                f" its writer and its readers) and {format_size(memory)} are available; give a"
                " smaller --capacity, or --quick."
            )


def measure_local(scale: LocalScale, *, arena_dir: Path, runner: Runner) -> Report:
    """Take all measurements.

    Raises:
        KVRayError: there is no room, or a step failed.
    """
    scale.check_memory(arena_dir)
    rows = LocalBench(scale, arena_dir, runner).take_all()
    return Report(
        rows=rows,
        note=f"{scale.num_large} blocks of 4 MiB and {scale.num_small} of 128 KiB in an arena of"
        f" {format_size(scale.capacity)}, on {cores()}. Ratios are medians over pairs: for copies"
        " kvray's speed over the bare copy's, for lookups kvray's time over that of hashing"
        " alone.",
        facts={
            "capacity_bytes": scale.capacity,
            "blocks_4mib": scale.num_large,
            "blocks_128kib": scale.num_small,
            "pairs": scale.pairs,
        },
    )


class LocalBench:
    """An arena that this process owns, one process that stores, and four that retrieve."""

    def __init__(self, scale: LocalScale, arena_dir: Path, runner: Runner) -> None:
        """Start the processes; there is no arena yet.

        Raises:
            ConfigError: no directory can be made in `arena_dir`.
        """
        self._scale = scale
        self._runner = runner
        self._directory = runner.make_directory(arena_dir)
        self._arena: Arena | None = None
        self._arena_stack = runner.stack.enter_context(ExitStack())
        self._num_chains = 0
        workers = []
        with runner.interrupts.held():
            for _ in range(1 + NUM_READERS):
                workers.append(Worker())
                runner.stack.callback(workers[-1].close)
        self._writer, *self._readers = workers

    def take_all(self) -> list[Row]:
        """Return the rows of all measurements, in the order in which they are taken."""
        measurements: tuple[tuple[str, Callable[[], list[Row]]], ...] = (
            ("first stores", self._first_stores),
            ("stores", self._stores),
            ("stores into a full arena", self._full_stores),
            ("retrieves of large blocks", self._large_retrieves),
            ("retrieves of small blocks", self._small_retrieves),
            ("lookups", self._lookups),
        )
        self._runner.show("Starting", total=len(measurements))
        call_all([self._writer, *self._readers], "allocate", num_bytes=self._scale.buffer_bytes)
        rows = []
        for title, take in measurements:
            self._runner.show(f"Measuring {title}")
            rows += take()
            self._runner.advance()
        return rows

    # -- measurements -------------------------------------------------------------------------

    def _first_stores(self) -> list[Row]:
        """Store into an arena that was made and mapped a moment ago; the floor comes after it."""
        num_bytes, pairs = self._scale.buffer_bytes, []
        for _ in range(self._scale.first_pairs):
            self._renew_arena(bench_spec(self._scale.capacity), readers=[])
            ours = self._store(LARGE_BYTES)
            pairs.append(Pair(ours=ours, floor=self._copy([self._writer], LARGE_BYTES)))
        title = "first store into a fresh arena"
        return [copy_row(title, "first_store_{}", pairs, num_bytes=num_bytes, least_gb_s=10)]

    def _stores(self) -> list[Row]:
        """Store into an empty arena, large blocks and small ones."""
        self._renew_arena(bench_spec(self._scale.capacity))
        return [
            self._store_row("store, 4 MiB blocks", "store_{}_4mib", LARGE_BYTES, least=0.90),
            self._store_row("store, 128 KiB blocks", "store_{}_128kib", SMALL_BYTES, least=0.85),
        ]

    def _full_stores(self) -> list[Row]:
        """Store into a full arena, where each block has to push another one out."""
        self._clear()
        for _ in range(-(-self._scale.capacity // self._scale.buffer_bytes)):
            self._store(LARGE_BYTES)
        title = "store into a full arena, 4 MiB blocks"
        return [self._store_row(title, "store_full_{}_4mib", LARGE_BYTES, least=0.85, is_full=True)]

    def _store_row(
        self, title: str, name: str, block_bytes: int, *, least: float, is_full: bool = False
    ) -> Row:
        """Return the row of stores; the arena is emptied before it is full, unless it should be."""
        num_sections = self._scale.num_sections(block_bytes)

        def store(index: int) -> Duration:
            section = index % num_sections
            if section == 0 and not is_full:
                self._clear()
            return self._store(block_bytes, section=section)

        def copy(index: int) -> Duration:
            section = _other_section(index, num_sections)
            return self._copy([self._writer], block_bytes, section=section)

        pairs = measure(self._scale.pairs_of(block_bytes), ours=store, floor=copy)
        num_bytes = self._scale.num_blocks(block_bytes) * block_bytes
        return copy_row(title, name, pairs, num_bytes=num_bytes, least=least)

    def _large_retrieves(self) -> list[Row]:
        """Retrieve large blocks: one reader, one that verifies, four at once."""
        chains, num_bytes = self._fill(LARGE_BYTES), self._scale.buffer_bytes
        one, all_four = self._readers[:1], self._readers
        plain = self._retrieves(one, chains, LARGE_BYTES)
        verified = self._retrieves(one, chains, LARGE_BYTES, verify=True)
        at_once = self._retrieves(all_four, chains, LARGE_BYTES)
        rows = [
            copy_row(
                f"{title}, 4 MiB blocks", name, pairs, num_bytes=num_bytes * times, least=least
            )
            for title, name, pairs, times, least in (
                ("retrieve", "retrieve_{}_4mib", plain, 1, 0.95),
                ("retrieve and verify", "retrieve_verified_{}_4mib", verified, 1, 0.88),
                ("four readers retrieve", "retrieve4_{}_4mib", at_once, len(all_four), 0.93),
            )
        ]
        title = "CPU time of a retrieve, 4 MiB blocks"
        names = ("retrieve_cpu_s_per_gb", "retrieve_floor_cpu_s_per_gb")
        return [*rows, cpu_row(title, names, plain, num_bytes=num_bytes)]

    def _small_retrieves(self) -> list[Row]:
        """Retrieve small blocks."""
        pairs = self._retrieves(self._readers[:1], self._fill(SMALL_BYTES), SMALL_BYTES)
        title, num_bytes = "retrieve, 128 KiB blocks", self._scale.num_small * SMALL_BYTES
        return [copy_row(title, "retrieve_{}_128kib", pairs, num_bytes=num_bytes, least=0.85)]

    def _retrieves(
        self, readers: list[Worker], chains: list[int], block_bytes: int, *, verify: bool = False
    ) -> list[Pair]:
        """Return the pairs of readers that retrieve chain after chain, each to its section."""

        def retrieve(index: int) -> Duration:
            section = index % len(chains)
            return _time(
                readers,
                "retrieve",
                chain=chains[section],
                num_blocks=self._scale.num_blocks(block_bytes),
                block_bytes=block_bytes,
                section=section,
                verify=verify,
            )

        def copy(index: int) -> Duration:
            section = _other_section(index, len(chains))
            return self._copy(readers, block_bytes, section=section, is_store=False)

        return measure(self._scale.pairs_of(block_bytes), ours=retrieve, floor=copy)

    def _lookups(self) -> list[Row]:
        """Look up a short and a long prompt of which all, half and nothing is stored."""
        self._renew_arena(self._scale.lookup_spec())
        rows: list[Row] = []
        for num_tokens, name, count, most, most_spread in (
            (SHORT_TOKENS, "lookup_8k", self._scale.short_lookups, 1.4, 3.0),
            (LONG_TOKENS, "lookup_128k", self._scale.long_lookups, 1.25, None),
        ):
            self._writer.call(
                "store_prompt", num_tokens=num_tokens, block_bytes=_LOOKUP_BLOCK_BYTES
            )
            for percent, suffix in ((100, ""), (50, "_half"), (0, "_none")):
                found = self._readers[0].call(
                    "look_up",
                    num_tokens=num_tokens,
                    present=num_tokens * percent // 100,
                    count=count,
                )
                rows += hash_rows(
                    f"lookup of {num_tokens:,} tokens, {percent} % stored",
                    name + suffix,
                    [Pair(ours=Duration(seconds=a), floor=Duration(seconds=b)) for a, b in found],
                    most_over_hash=None if suffix else most,
                    most_spread=None if suffix else most_spread,
                )
        return rows

    # -- steps --------------------------------------------------------------------------------

    def _renew_arena(self, spec: ArenaSpec, *, readers: list[Worker] | None = None) -> None:
        """Make an arena in place of the one before; attach the writer, and the readers."""
        call_all([self._writer, *self._readers], "detach")
        self._arena_stack.close()
        runner = replace(self._runner, stack=self._arena_stack)
        self._arena = runner.make_arena(self._directory, spec)
        users = self._readers if readers is None else readers
        call_all([self._writer, *users], "attach", directory=str(self._directory))

    def _clear(self) -> None:
        """Evict every block."""
        assert self._arena is not None
        ArenaOwner(self._arena).clear()

    def _fill(self, block_bytes: int) -> list[int]:
        """Store a chain from each section into the emptied arena; return their numbers."""
        self._clear()
        chains = []
        for section in range(self._scale.num_sections(block_bytes)):
            self._store(block_bytes, section=section)
            chains.append(self._num_chains)
        return chains

    def _store(self, block_bytes: int, *, section: int = 0) -> Duration:
        """Store a section under a chain that nothing has been stored under yet."""
        self._num_chains += 1
        return _time(
            [self._writer],
            "store",
            chain=self._num_chains,
            num_blocks=self._scale.num_blocks(block_bytes),
            block_bytes=block_bytes,
            section=section,
        )

    def _copy(
        self, workers: list[Worker], block_bytes: int, *, section: int = 0, is_store: bool = True
    ) -> Duration:
        num_bytes = self._scale.num_blocks(block_bytes) * block_bytes
        return _time(workers, "copy", num_bytes=num_bytes, section=section, is_store=is_store)


def _time(workers: list[Worker], name: str, **arguments: Any) -> Duration:
    """Have `workers` do a timed piece of work at once; return the duration of all of it."""
    return over_all([tuple(times) for times in call_all(workers, name, **arguments)])


def _other_section(index: int, num_sections: int) -> int:
    """Return the floor's section of a pair: far from the one that kvray takes."""
    return (index + num_sections // 2) % num_sections
