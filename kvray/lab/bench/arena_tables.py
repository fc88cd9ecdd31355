"""`kvray bench tables`: the cost of an arena's tables, as they grow to millions of slots."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil

from kvray.actors.shard.announcer import TierDelta
from kvray.config import load_config
from kvray.errors import KVRayError
from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.lab.bench.report import Report, Row, cores, time_rows, value_row
from kvray.lab.bench.runner import Duration, Runner, timed
from kvray.store import ArenaOwner, ArenaSpec
from kvray.store.arena import repair, slabs
from kvray.store.arena.layout import ALIGNMENT, DEFAULT_PRIORITY, READY
from kvray.store.retention import Retention

SLOTS = (65_536, 1_048_576, 8_388_608)

_SLOTS_PER_SLAB = 1024
_CHAIN = 64
"""Blocks of each prompt that is there."""
_STORED = 32
"""Blocks of one store."""
_STORES = 400
_WARM = 20
_STORES_PER_ROUND = 50
_LOOKS = 20
_FREE_TARGET = 0.05


def run(runner: Runner, *, config: Path | None, num_slots: Sequence[int]) -> Report:
    """Fill arenas of so many slots, store into them, and look after them as a shard does.

    Their blocks have no bytes: the file of such an arena has memory for its tables alone.

    Raises:
        KVRayError: the tables have no room, or a store was refused.
    """
    settings, sizes = load_config(config), list(num_slots) or list(SLOTS)
    runner.show("Starting", total=4 * len(sizes))
    rows: list[Row] = []
    for size in sizes:
        with runner.scope() as scope:
            bench = _Bench(scope, settings.arena.dir, size, policy=settings.arena.policy)
            rows += bench.take_all()
    return Report(
        rows=rows,
        note=f"Stores of {_STORED} blocks, without their bytes, on {cores()}. In a full arena each"
        " store evicts as many. Rounds and looks are what a shard does for its arena.",
        facts={"slots": sizes, "stores": _STORES},
    )


class _Bench:
    """One arena, its writer and its owner."""

    def __init__(self, runner: Runner, parent: Path, num_slots: int, *, policy: str) -> None:
        self._runner = runner
        self._num_slots = num_slots
        self._policy = policy
        self._random = np.random.default_rng(0)
        slab = _SLOTS_PER_SLAB * ALIGNMENT
        spec = ArenaSpec(
            cluster_name="bench",
            capacity=max(num_slots * ALIGNMENT, 4 * slab),
            slab=slab,
            slot_min=ALIGNMENT,
            holders_max=16,
            has_data=False,
        )
        self._arena = runner.make_arena(runner.make_directory(parent), spec)
        self._arena.join("bench")
        if not slabs.has_rows(self._arena.tables, ALIGNMENT):
            ArenaOwner(self._arena).add_rows()

    def take_all(self) -> Iterator[Row]:
        of, end = f"{self._num_slots:,} slots", f"{self._num_slots // 1024}k"
        self._show("half full")
        self._fill(0.5)
        yield from time_rows(f"store, half full, {of}", f"tables_half_{end}", self._stores())
        self._show("full")
        self._fill(1.0)
        gc.freeze()
        before = _private_bytes()
        owner = ArenaOwner(self._arena)
        adoption = timed(owner.adopt)
        retention = Retention(self._arena, self._policy, "all")
        delta = TierDelta(lambda: self._arena.tables, owner.section)

        def round_of(share: float) -> int:
            retention.observe()
            return owner.evict_ahead(share, retention.rank)

        round_of(0.0)
        stores = self._stores(lambda: round_of(0.0))
        yield from time_rows(f"store, full, {of}", f"tables_full_{end}", stores)
        self._show("evicting ahead")
        for title, share in (("0.1 %", 0.001), ("5 %", _FREE_TARGET)):
            round_of(0.0)
            name = f"tables_evict_{title.split()[0].replace('.', '')}_{end}"
            target = slabs.num_available(self._arena.tables, ALIGNMENT) / self._num_slots + share
            began, evicted = time.perf_counter(), round_of(target)
            took_s = time.perf_counter() - began
            yield value_row(f"evict {title} ahead, {of}", "ms", 1e3 * took_s, f"{name}_ms")
            if not evicted:
                raise KVRayError("Nothing was evicted from a full arena; this is a defect.")
        self._show("looking after it")
        yield value_row(f"adopt, {of}", "ms", 1e3 * adoption.seconds, f"tables_adopt_{end}_ms")
        first = []
        while delta.is_behind:
            first.append(timed(delta.collect))
        per_slot = (_private_bytes() - before) / self._num_slots
        for title, name, looks in (
            ("first looks for changes", "first_look", first),
            ("look for changes, none", "look", self._many(delta.collect)),
            ("round, nothing to do", "round", self._many(lambda: round_of(0.0))),
            ("figures for people", "stats", self._many(self._arena.stats)),
        ):
            yield from time_rows(f"{title}, {of}", f"tables_{name}_{end}", looks)
        yield value_row(f"shard's memory, {of}", "bytes/slot", per_slot, f"tables_bytes_{end}")
        self._runner.advance()

    def _show(self, what: str) -> None:
        self._runner.show(f"{self._num_slots:,} slots ({what})")
        self._runner.advance()

    def _fill(self, share: float) -> None:
        """Have READY blocks in a share of the slots, in chains that were used in any order."""
        tables = self._arena.tables
        num_blocks = int(self._num_slots * share) // _CHAIN * _CHAIN
        slabs.take_spare(tables, num_blocks, ALIGNMENT)
        tables.undo.settle()
        chosen = slabs.slots_of(tables, ALIGNMENT)[:num_blocks]
        at = np.arange(num_blocks)
        tables.slot_key[chosen] = self._random.integers(0, 2**63, (num_blocks, 4), dtype="u8")
        tables.slot_depth[chosen] = at % _CHAIN
        tables.slot_parent[chosen] = np.where(at % _CHAIN, np.roll(chosen, 1), -1)
        ticks = np.repeat(self._random.permutation(num_blocks // _CHAIN) + 1, _CHAIN)
        tables.slot_tick[chosen] = tables.slot_number[chosen] = ticks
        tables.slot_priority[chosen] = DEFAULT_PRIORITY
        tables.slot_state[chosen] = READY
        tables.tick = num_blocks
        repair.rebuild(tables, now=time.monotonic())

    def _stores(self, round_of: Callable[[], object] = lambda: None) -> list[Duration]:
        durations = [
            self._store(round_of if number % _STORES_PER_ROUND == 0 else None)
            for number in range(_WARM + _STORES)
        ]
        return durations[_WARM:]

    def _store(self, first: Callable[[], object] | None) -> Duration:
        """Do `first`, then reserve and commit blocks that are new, and time that."""
        if first is not None:
            first()
        keys = [BlockKey(self._random.bytes(KEY_BYTES)) for _ in range(_STORED)]

        def work() -> bool:
            made = self._arena.reserve(keys, parent=None, depth=0, part=0, block_bytes=ALIGNMENT)
            if made is None or len(made.slots) < _STORED:
                return False
            return self._arena.commit(made, np.zeros(_STORED, dtype="<u8"))

        began = time.perf_counter()
        stored = work()
        took_s = time.perf_counter() - began
        if not stored:
            raise KVRayError(
                "A store was refused; the bench's arena is nobody else's, so report it."
            )
        return Duration(took_s)

    def _many(self, work: Callable[[], object]) -> list[Duration]:
        return [timed(work) for _ in range(_LOOKS)]


def _private_bytes() -> int:
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)
