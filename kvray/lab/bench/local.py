"""`kvray bench local`: stores, retrieves and lookups in an arena of this node, beside bare work.

Blocks that engines with more or fewer ranks have stored are loaded, too.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from kvray.config import format_size, load_config
from kvray.engine.device.pool import HostPool, Load
from kvray.engine.model.cache_layout import CacheLayout, Group, LayerRange, Part, Region
from kvray.engine.model.reslicing import resliced_parts
from kvray.errors import ConfigError
from kvray.identity.keys import chain_keys, request_seed
from kvray.lab.bench.report import Row, bench_report, copy_row, cores, cpu_row, hash_rows
from kvray.lab.bench.runner import (
    LARGE_BYTES,
    LONG_TOKENS,
    SHORT_TOKENS,
    SMALL_BYTES,
    TOKENS_PER_BLOCK,
    Duration,
    Pair,
    Runner,
    Timed,
    bench_spec,
    measure,
    over_all,
    require_room,
    reserve_all,
    timed,
)
from kvray.lab.bench.worker import Worker, call_all
from kvray.lab.report import Report
from kvray.store import Arena, ArenaOwner, ArenaSpec

_LAYERS, _KV_HEADS, _HEAD_BYTES = 32, 8, 256
"""Of a model with 8e9 parameters: a block has 4 MiB on all ranks together."""
_CASES = ((1, 2), (2, 1), (1, 4), (4, 1))
"""Ranks that have stored the blocks, and ranks of the engine that loads them."""
NUM_READERS = 4
_CAPACITY_MIN = 64 * 2**20
_LOOKUP_BLOCK_BYTES = 4096
_SMALL_PAIRS = 5
"""Pairs of small blocks for each of large ones: they take a thirtieth of the time."""


def _resliced_row(arena: Arena, stored_by: int, size: int, *, num_blocks: int, pairs: int) -> Row:
    layout = _layout(size, num_blocks)
    own = layout.parts(0, size, TOKENS_PER_BLOCK)
    others = resliced_parts(layout, 0, size, stored_by, TOKENS_PER_BLOCK)
    pool = HostPool([*own, *others])
    with ExitStack() as stack:
        resliced, plain = (
            [_load(arena, part, num_blocks, stack) for part in parts] for parts in (others, own)
        )
        found = measure(
            pairs,
            ours=lambda _: timed(lambda: pool.load(arena, resliced, None)),
            floor=lambda _: timed(lambda: pool.load(arena, plain, None)),
        )
    title = f"load by one of {size} ranks, stored by {stored_by}"
    num_bytes = num_blocks * own[0].block_bytes
    return copy_row(title, f"resliced_{stored_by}_to_{size}_{{}}", found, num_bytes=num_bytes)


def _layout(size: int, num_blocks: int) -> CacheLayout:
    """Return the pool of one of `size` ranks, with keys and values of each layer."""
    plane = _KV_HEADS // size * TOKENS_PER_BLOCK * _HEAD_BYTES
    pages = torch.zeros((num_blocks, 2 * _LAYERS * plane), dtype=torch.uint8)
    steps = tuple(
        LayerRange((layer,), 2 * layer * plane, 2 * (layer + 1) * plane) for layer in range(_LAYERS)
    )
    region = Region(pages=pages, steps=steps, num_planes=2 * _LAYERS)
    group = Group(layers=tuple(range(_LAYERS)), window=None, own=(region,))
    return CacheLayout(
        groups=(group,),
        dtype="bfloat16",
        kv_factor=2,
        tokens_per_block=TOKENS_PER_BLOCK,
        is_flat=True,
    )


def _load(arena: Arena, part: Part, num_blocks: int, stack: ExitStack) -> Load:
    """Return a load of fresh slots, to pages as scattered as those of an engine after a while."""
    tokens = np.arange(num_blocks * TOKENS_PER_BLOCK)
    seed = request_seed(f"kvray bench {part.num_ranks} {part.index}".encode())
    keys = chain_keys(tokens, tokens_per_block=TOKENS_PER_BLOCK, seed=seed)
    made = reserve_all(arena, keys, block_bytes=part.block_bytes)
    stack.callback(arena.abort, made)
    for slot in made.slots.tolist():
        arena.slot_bytes(slot)[:] = 1  # memory that nobody has written is not read from memory
    pages = np.random.default_rng(0).permutation(num_blocks).astype(np.int64)
    return Load(part, made.slots.astype(np.int64), pages)


class Copies(NamedTuple):
    """The blocks of one size that each store or retrieve copies."""

    title: str
    name: str
    """End of the figures' names."""
    shape: tuple[int, int]
    """Blocks, and the bytes of each."""
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
    """Bytes of the arena that is stored into."""
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
        pairs = repeat or (3 if quick else 15)
        large = (min(256, capacity // LARGE_BYTES), LARGE_BYTES)
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
        """Make sure that the arena fits into its directory, and all buffers into the memory.

        Raises:
            CapacityError: they do not.
        """
        specs = (bench_spec(self.capacity), self.lookup_spec)
        arena = max(spec.geometry().file_bytes for spec in specs)
        buffers = (1 + NUM_READERS) * self.large.num_bytes
        hint, available = "give a smaller --capacity, or --quick", psutil.virtual_memory().available
        require_room(arena, shutil.disk_usage(directory).free, str(directory), hint)
        require_room(arena + buffers, available, "memory", hint)


def run(
    runner: Runner, *, config: Path | None, capacity: int, repeat: int | None, quick: bool
) -> Report:
    """Take all measurements.

    Raises:
        KVRayError: there is no room, or a step failed.
    """
    settings = load_config(config)
    scale = LocalScale.fit(capacity, repeat=repeat, quick=quick)
    return bench_report(
        measure_local(scale, arena_dir=settings.arena.dir, runner=runner),
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


def measure_local(scale: LocalScale, *, arena_dir: Path, runner: Runner) -> list[Row]:
    """Return the rows of all measurements; raises as `run` does."""
    directory = runner.make_directory(arena_dir)
    scale.check_memory(directory)
    return _Bench(scale, directory, runner).take_all()


class _Bench:
    """An arena that this process owns, one process that stores, and four that retrieve."""

    def __init__(self, scale: LocalScale, directory: Path, runner: Runner) -> None:
        self._scale = scale
        self._runner = runner
        self._directory = directory
        self._arena: Arena | None = None
        self._arena_stack = runner.stack.enter_context(ExitStack())
        self._num_chains = 0
        self._workers = [Worker.start(runner) for _ in range(1 + NUM_READERS)]
        self._writer, self._reader = self._workers[:1], self._workers[1:2]

    def take_all(self) -> list[Row]:
        measurements: tuple[tuple[str, Callable[[], list[Row]]], ...] = (
            ("first stores", self._first_stores),
            ("stores", self._stores),
            ("retrieves of large blocks", self._large_retrieves),
            ("retrieves of small blocks", self._small_retrieves),
            ("loads of blocks of other ranks", self._resliced_loads),
            ("lookups", self._lookups),
        )
        self._runner.show("Starting", total=len(measurements))
        call_all(self._workers, "allocate", num_bytes=self._scale.large.num_bytes)
        rows = []
        for title, take in measurements:
            self._runner.show(f"Measuring {title}")
            rows += take()
            self._runner.advance()
        return rows

    def _first_stores(self) -> list[Row]:
        """Store into an arena that was made and mapped a moment ago; the floor comes after it."""
        large, pairs = self._scale.large, []
        for _ in range(self._scale.first_pairs):
            self._renew_arena(bench_spec(self._scale.capacity), users=self._writer)
            ours = self._store(large)
            pairs.append(Pair(ours, self._copy(self._writer, large)))
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

        return self._measure(self._writer, copies, store, is_store=True)

    def _large_retrieves(self) -> list[Row]:
        large = self._scale.large
        chains = self._fill(large)
        plain = self._retrieve_pairs(self._reader, chains, large)
        verified = self._retrieve_pairs(self._reader, chains, large, verify=True)
        at_once = self._retrieve_pairs(self._workers[1:], chains, large)
        names = ("retrieve_cpu_s_per_gb", "retrieve_floor_cpu_s_per_gb")
        title = f"CPU time of a retrieve, {large.title}"
        return [
            _row("retrieve", "retrieve", large, plain),
            _row("retrieve and verify", "retrieve_verified", large, verified),
            _row("four readers retrieve", "retrieve4", large, at_once, times=NUM_READERS),
            cpu_row(title, names, plain, num_bytes=large.num_bytes),
        ]

    def _small_retrieves(self) -> list[Row]:
        small = self._scale.small
        pairs = self._retrieve_pairs(self._reader, self._fill(small), small)
        return [_row("retrieve", "retrieve", small, pairs)]

    def _resliced_loads(self) -> list[Row]:
        large = self._scale.large
        self._clear()
        assert self._arena is not None
        # Blocks of the largest case and of its plain loads are in the arena together.
        num_blocks = max(2, min(large.shape[0] // 4, 64))
        self._arena.join("bench")
        try:
            return [
                _resliced_row(self._arena, *case, num_blocks=num_blocks, pairs=large.pairs)
                for case in _CASES
            ]
        finally:
            self._arena.leave()

    def _retrieve_pairs(
        self, readers: list[Worker], chains: list[int], copies: Copies, *, verify: bool = False
    ) -> list[Pair]:
        """Return the pairs of readers that retrieve chain after chain, each to its section."""

        def retrieve(index: int) -> Duration:
            section = index % len(chains)
            where = {"shape": copies.shape, "section": section}
            return _time(readers, "retrieve", chain=chains[section], verify=verify, **where)

        return self._measure(readers, copies, retrieve, is_store=False)

    def _measure(
        self, users: list[Worker], copies: Copies, ours: Timed, *, is_store: bool
    ) -> list[Pair]:
        def copy(index: int) -> Duration:
            return self._copy(users, copies, index, is_store=is_store)

        return measure(copies.pairs, ours=ours, floor=copy)

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
                title, name = (
                    f"lookup of {num_tokens:,} tokens, {percent} % stored",
                    prompt + suffix,
                )
                pairs = [Pair(Duration(ours), Duration(floor)) for ours, floor in found]
                name = prompt + suffix
                rows += hash_rows(title, name, pairs, has_spread=name == "lookup_8k")
        return rows

    def _renew_arena(self, spec: ArenaSpec, *, users: list[Worker]) -> None:
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
        self, workers: list[Worker], copies: Copies, index: int = 0, *, is_store: bool = True
    ) -> Duration:
        """Copy a section bare, far from the one that kvray takes in this pair."""
        section = (index + copies.num_sections // 2) % copies.num_sections
        return _time(workers, "copy", shape=copies.shape, section=section, is_store=is_store)


def _time(workers: list[Worker], name: str, **arguments: Any) -> Duration:
    """Have `workers` do a timed piece of work at once; return the duration of all of it."""
    return over_all(call_all(workers, name, **arguments))


def _row(title: str, name: str, copies: Copies, pairs: list[Pair], *, times: int = 1) -> Row:
    """Return the row of copies that `times` processes made at once."""
    title, names = f"{title}, {copies.title}", f"{name}_{{}}_{copies.name}"
    return copy_row(title, names, pairs, num_bytes=copies.num_bytes * times)
