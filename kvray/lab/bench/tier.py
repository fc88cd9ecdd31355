"""`kvray bench tier`: engines' load on a tier that runs and whose arena is full."""

import math
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path

import psutil

from kvray.config import KVRayConfig, format_size, load_config
from kvray.errors import ConfigError
from kvray.lab.bench.report import Row, bench_report, copy_row, cores, time_rows, value_row
from kvray.lab.bench.worker import BUFFER_BYTES, PREFIX_BYTES, Found, call_all, start
from kvray.lab.report import Report
from kvray.lab.runner import (
    LARGE_BYTES,
    SMALL_BYTES,
    Duration,
    Pair,
    Runner,
    cpu_seconds,
    require_room,
)
from kvray.reference.child_process import Child
from kvray.store import ArenaSpec

SIZES = (LARGE_BYTES, 2**20, SMALL_BYTES)

_CAPACITY_MIN = 512 * 2**20
_TURN_S = 5.0
"""How long the processes load the tier until the bar moves."""
_IDLE_S = 10.0
_SETTLE_S = 2.0
_ASKED_AT_ONCE = 16


def run(
    runner: Runner,
    *,
    config: Path | None,
    capacity: int,
    block: Sequence[int] | None,
    processes: Sequence[int] | None,
    seconds: float,
) -> Report:
    """Start a tier, fill its arena, and load it; KVRayError: no room, no start, or a death."""
    num_cores = len(os.sched_getaffinity(0))
    sizes = list(block or SIZES)
    steps = sorted(set(processes or ())) or [1 << n for n in range(4) if 1 << n <= num_cores]
    settings = own_settings(config, capacity=capacity)
    _check(settings, sizes, num_processes=steps[-1])
    names = ", ".join(map(format_size, sizes))
    return bench_report(
        _Bench(runner, settings, sizes, steps=steps, seconds=seconds).take_all(),
        note=f"Blocks of {names} in an arena of {format_size(capacity)} that is full,"
        f" {seconds:g} s for each number of processes, on {cores()}. Ratios are kvray's speed over"
        " the bare copy's.",
        facts={
            "capacity_bytes": capacity,
            "block_bytes": sizes,
            "processes": steps,
            "seconds": seconds,
        },
    )


def own_settings(config: Path | None, **arena: int) -> KVRayConfig:
    """Return `config` for a tier and a Ray of the bench's own, without a disk, and with `arena`."""
    settings = load_config(config)
    return settings.model_copy(
        update={
            "cluster_name": f"bench-{os.getpid()}",
            "arena": settings.arena.model_copy(update=arena),
            "nvme": settings.nvme.model_copy(update={"dir": None}),
            "ray": settings.ray.model_copy(update={"address": None}),
        }
    )


def _check(settings: KVRayConfig, sizes: Sequence[int], *, num_processes: int) -> None:
    """Raise ConfigError for options that cannot be measured, and CapacityError without room."""
    capacity = settings.arena.capacity
    if capacity < _CAPACITY_MIN:
        says = f"--capacity {format_size(capacity)} is too small"
        raise ConfigError(f"{says}; give at least {format_size(_CAPACITY_MIN)}.")
    for size in sizes:
        if PREFIX_BYTES % size or size < settings.arena.slot_min:
            raise ConfigError(
                f"--block {format_size(size)}: give a power of two from"
                f" {format_size(settings.arena.slot_min)} to {format_size(PREFIX_BYTES)}."
            )
    arena = ArenaSpec.of(settings).geometry().file_bytes
    directory, hint = settings.arena.dir, "give a smaller --capacity, or fewer --processes"
    require_room(arena, shutil.disk_usage(directory).free, str(directory), hint)
    buffers = num_processes * BUFFER_BYTES
    require_room(arena + buffers, psutil.virtual_memory().available, "memory", hint)


class _Bench:
    """A tier on a local Ray, and processes that are attached to its arena."""

    def __init__(
        self,
        runner: Runner,
        settings: KVRayConfig,
        sizes: Sequence[int],
        *,
        steps: Sequence[int],
        seconds: float,
    ) -> None:
        self._runner = runner
        self._settings = settings
        self._sizes = sizes
        self._steps = steps
        self._seconds = seconds
        self._num_prefixes = 2 * settings.arena.capacity // PREFIX_BYTES
        self._turns = count(1)
        self._workers: list[Child] = []

    def take_all(self) -> list[Row]:
        runner, num_filled = self._runner, self._settings.arena.capacity * 5 // 6 // PREFIX_BYTES
        num_stored = self._settings.arena.capacity // 4 // PREFIX_BYTES
        turns = math.ceil(self._seconds / _TURN_S)
        asked = sum(
            math.ceil(one / _ASKED_AT_ONCE) for one in (num_filled, num_stored, self._num_prefixes)
        )
        runner.show("Starting a tier", total=1 + asked + turns * len(self._steps) + 1)
        shard = int(runner.start_tier(self._settings).shards[0]["pid"])
        self._workers = [start(runner) for _ in range(self._steps[-1])]
        call_all(self._workers, "allocate", num_bytes=BUFFER_BYTES)
        where, wait_s = str(self._settings.node_dir), self._settings.arena.lock_wait_s
        call_all(self._workers, "attach", directory=where, lock_wait_s=wait_s)
        runner.advance()
        first = self._num_prefixes
        self._ask(range(first, first + num_filled), [LARGE_BYTES], "Filling five sixths")
        first += num_filled
        small = self._ask(range(first, first + num_stored), [SMALL_BYTES], "Storing 128KiB blocks")
        title, names = "store, 128KiB blocks into large ones", "tier_small_into_large_{}"
        rows = [_copy_row(title, names, [one for one in small if one[0] == "store 128KiB"])]
        self._ask(range(self._num_prefixes)[::-1], self._sizes, "Filling the arena")
        for num_processes in self._steps:
            rows += self._load(num_processes, turns, shard)
        runner.show("Doing nothing")
        time.sleep(_SETTLE_S)
        idle_s, began = min(_IDLE_S, self._seconds), cpu_seconds(shard)
        time.sleep(idle_s)
        share = (cpu_seconds(shard) - began) / idle_s
        runner.advance()
        return [*rows, value_row("shard's CPU, idle", "cores", share, "tier_idle_cpu_share")]

    def _ask(self, prefixes: range, sizes: Sequence[int], title: str) -> Found:
        self._runner.show(title)
        found: Found = []
        for at in range(0, len(prefixes), _ASKED_AT_ONCE):
            some = list(prefixes[at : at + _ASKED_AT_ONCE])
            (more,) = call_all(self._workers[:1], "ask", prefixes=some, sizes=sizes)
            found += more
            self._runner.advance()
        return found

    def _load(self, num_processes: int, turns: int, shard: int) -> Iterator[Row]:
        title = f"{num_processes} process{'es' if num_processes > 1 else ''}"
        self._runner.show(f"Loading ({title})")
        found, workers = defaultdict[str, Found](list), self._workers[:num_processes]
        cpu_s, began = cpu_seconds(shard), time.monotonic()
        for _ in range(turns):
            own = [{"turn": next(self._turns)} for _ in workers]
            asked = {"num_prefixes": self._num_prefixes, "seconds": self._seconds / turns}
            answers = call_all(workers, "play", own, sizes=self._sizes, **asked)
            for one in chain.from_iterable(answers):
                found[one[0]].append(one)
            self._runner.advance()
        share = (cpu_seconds(shard) - cpu_s) / (time.monotonic() - began)
        counts = {name: int(sum(one[1] for one in some)) for name, some in found.items()}
        end, of_size = f"{num_processes}p", sorted(one.split()[::-1] for one in found if " " in one)
        for size, what in of_size:
            if counts[name := f"{what} {size}"]:
                row = f"tier_{what}_{{}}_{size.lower()}_{end}"
                yield _copy_row(f"{what}, {size} blocks, {title}", row, found[name])
        for size, what in of_size:
            if not counts[name := f"{what} {size}"]:
                durations = [Duration(ours) for _, _, ours, _ in found[name]]
                row = f"tier_{what}_{size.lower()}_{end}"
                yield from time_rows(f"{what}, {size} blocks, {title}", row, durations)
        hit_rate = counts["hit"] / counts["asked"]
        yield value_row(f"hit rate, {title}", "", hit_rate, f"tier_hit_rate_{end}")
        for name, what in (("dropped", "blocks dropped"), ("busy", "calls that found it busy")):
            yield value_row(f"{what}, {title}", "", counts.get(name, 0), f"tier_{name}_{end}")
        yield value_row(f"shard's CPU, {title}", "cores", share, f"tier_cpu_share_{end}")


def _copy_row(title: str, names: str, found: Found) -> Row:
    """Return the row of all these copies as one."""
    _, *columns = zip(*found, strict=True)
    num_bytes, ours, bare = map(sum, columns)
    return copy_row(title, names, [Pair(Duration(ours), Duration(bare))], num_bytes=int(num_bytes))
