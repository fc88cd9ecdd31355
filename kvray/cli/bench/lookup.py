"""`kvray bench lookup`: memory and time of the lookup's index, as its actor uses it."""

from __future__ import annotations

import gc
import json
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
from rich.console import Console
from rich.progress import Progress

from kvray import __version__
from kvray.actors.announcer import ANNOUNCED_MAX
from kvray.actors.lookup import Announcement, Lookup
from kvray.block import KEY_BYTES
from kvray.cli.bench.pairs import Timing, median_s, percentile_s
from kvray.cli.bench.report import make_table
from kvray.cli.bench.results import Result, Target
from kvray.cli.interrupts import Interrupts
from kvray.cli.progress import counting_progress
from kvray.errors import KVRayError

MATCHED = 4096
"""Keys of one query: a prompt of 131,072 tokens."""

_QUERIES = 300
_BYTES_MOST = 250.0
_QUERY_MS_MOST = 2.0
_ANNOUNCE_MS_MOST = 50.0
_FIRST, _SECOND = "first", "second"


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupFound:
    """What a run found."""

    num_entries: int
    bytes_per_entry: float
    bytes_per_entry_2_holders: float
    announce: Sequence[Timing]
    """Announcements of `ANNOUNCED_MAX` keys each, into an index that grows."""
    match: Sequence[Timing]
    match_warm: Sequence[Timing]
    locate: Sequence[Timing]
    drop: Timing
    purge: Sequence[Timing]
    """Heartbeats of the other shard until nothing is left of the dropped one."""

    def rows(self) -> list[Result]:
        """Return the rows of the table."""
        return [
            _row(
                "memory for each entry",
                "bytes",
                self.bytes_per_entry,
                "lookup_bytes_per_entry",
                most=_BYTES_MOST,
            ),
            _row(
                "    with two holders",
                "bytes",
                self.bytes_per_entry_2_holders,
                "lookup_bytes_per_entry_2_holders",
            ),
            *_timing_rows(
                f"match of {MATCHED:,} keys", "lookup_match", self.match, most=_QUERY_MS_MOST
            ),
            *_timing_rows("    the same keys again", "lookup_match_warm", self.match_warm),
            *_timing_rows(
                f"locate of {MATCHED:,} keys", "lookup_locate", self.locate, most=_QUERY_MS_MOST
            ),
            *_timing_rows(
                f"announcement of {ANNOUNCED_MAX:,} keys",
                "lookup_announce",
                self.announce,
                most=_ANNOUNCE_MS_MOST,
            ),
            _row(
                "drop of a shard that had them all",
                "ms",
                1000 * self.drop.seconds,
                "lookup_drop_ms",
            ),
            *_timing_rows("heartbeat while it is purged", "lookup_purge", self.purge),
        ]

    def to_json(self) -> str:
        """Return all figures as one JSON object."""
        rows = self.rows()
        found: dict[str, object] = {}
        for row in rows:
            found |= {name: float(f"{value:.5g}") for name, value in row.figures.items()}
        found |= {
            "missed": [row.title.strip() for row in rows if row.is_met is False],
            "entries": self.num_entries,
            "purge_heartbeats": len(self.purge),
            "cpu_cores": psutil.cpu_count(),
            "machine": platform.machine(),
            "version": __version__,
        }
        return json.dumps(found, indent=2)

    def print_all(self, console: Console) -> None:
        """Print the table, and what it is a table of."""
        rows = self.rows()
        console.print(make_table(rows))
        console.print(
            f"{self.num_entries:,} entries, on {psutil.cpu_count()} cores; medians of times inside"
            f" the lookup, without Ray's part of a call. A dropped shard is purged within"
            f" {len(self.purge):,} heartbeats or announcements of others."
        )
        num_unmet = sum(row.is_met is False for row in rows)
        num_judged = sum(row.is_met is not None for row in rows)
        if num_unmet:
            console.print(f"[red]{num_unmet}[/] of {num_judged} targets are missed.")
        else:
            console.print(f"All {num_judged} targets are met.")


def measure_lookup(num_entries: int, *, console: Console, interrupts: Interrupts) -> LookupFound:
    """Fill an index, ask it, and have a shard dropped.

    Args:
        num_entries: blocks that it knows; as many whole announcements as that makes.
        console: where progress is shown.
        interrupts: what ends it early.

    Raises:
        KVRayError: something that was announced was not found.
    """
    num_batches = max(1, num_entries // ANNOUNCED_MAX)
    with interrupts.closing(), counting_progress(console) as progress:
        return _Run(num_batches, progress).take()


class _Run:
    """One lookup, and what two shards announce to it."""

    def __init__(self, num_batches: int, progress: Progress) -> None:
        self._num_batches = num_batches
        self._progress = progress
        self._bar = progress.add_task("Starting", total=2 * num_batches + 3 * _QUERIES)
        self._random = random.Random(0)
        self._sequences = dict.fromkeys((_FIRST, _SECOND), 0)
        # A first announcement of each brings what the interpreter loads only then.
        self._lookup = Lookup()
        for shard in self._sequences:
            self._announce(shard, _batch(-1))
            self._lookup.drop(shard)
        self._lookup = Lookup()
        gc.freeze()  # as the actor does

    def take(self) -> LookupFound:
        num_entries = self._num_batches * ANNOUNCED_MAX
        empty = _resident_bytes()
        announce = self._announce_all(_FIRST)
        one_holder = (_resident_bytes() - empty) / num_entries
        match, match_warm = self._match()
        locate = self._ask("locate", self._located)
        self._announce_all(_SECOND)
        two_holders = (_resident_bytes() - empty) / num_entries
        drop = _timed(lambda: self._lookup.drop(_FIRST))
        return LookupFound(
            num_entries=num_entries,
            bytes_per_entry=one_holder,
            bytes_per_entry_2_holders=two_holders,
            announce=announce,
            match=match,
            match_warm=match_warm,
            locate=locate,
            drop=drop,
            purge=self._purge(),
        )

    def _announce_all(self, shard: str) -> list[Timing]:
        self._progress.update(self._bar, description=f"Announcing ({shard} holder)")
        timings = []
        for number in range(self._num_batches):
            timings.append(self._announce(shard, _batch(number)))
            self._progress.advance(self._bar)
        return timings

    def _announce(self, shard: str, keys: bytes) -> Timing:
        self._sequences[shard] += 1
        announcement = Announcement(
            shard=shard,
            arena_id="bench",
            shard_epoch=1,
            sequence=self._sequences[shard],
            full=self._sequences[shard] == 1 or shard not in self._lookup.shards(),
            added_keys=keys,
            added_parts=[0] * (len(keys) // KEY_BYTES),
            removed_keys=b"",
            removed_parts=[],
        )
        return _timed(lambda: self._lookup.announce(announcement, now=0.0))

    def _match(self) -> tuple[list[Timing], list[Timing]]:
        return (
            self._ask("match", self._matched),
            self._ask("match again", self._matched, chain=self._chain()),
        )

    def _ask(
        self, title: str, ask: Callable[[bytes], int], *, chain: bytes | None = None
    ) -> list[Timing]:
        self._progress.update(self._bar, description=f"Asking ({title})")
        timings = []
        for _ in range(_QUERIES):
            keys = self._chain() if chain is None else chain
            began = time.perf_counter()
            found = ask(keys)
            timings.append(Timing(seconds=time.perf_counter() - began))
            if found != MATCHED:
                raise KVRayError(f"Only {found} of {MATCHED} blocks were found; this is a defect.")
            self._progress.advance(self._bar)
        return timings

    def _chain(self) -> bytes:
        """Return keys that one shard has announced one after the other."""
        first = self._random.randrange(ANNOUNCED_MAX - MATCHED + 1) * KEY_BYTES
        return _batch(self._random.randrange(self._num_batches))[first:][: MATCHED * KEY_BYTES]

    def _matched(self, keys: bytes) -> int:
        return self._lookup.match(keys, 1, now=0.0).num_blocks

    def _located(self, keys: bytes) -> int:
        return self._lookup.locate(keys, now=0.0)[-1].stop

    def _purge(self) -> list[Timing]:
        timings = []
        while not self._lookup.index.is_purged:
            timings.append(self._announce(_SECOND, b""))
        return timings


def _batch(number: int) -> bytes:
    """Return the keys of an announcement: as uniform as digests, and the same ones each time."""
    return random.Random(number).randbytes(ANNOUNCED_MAX * KEY_BYTES)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _timed(function: Callable[[], object]) -> Timing:
    began = time.perf_counter()
    function()
    return Timing(seconds=time.perf_counter() - began)


def _timing_rows(
    title: str, name: str, timings: Sequence[Timing], *, most: float | None = None
) -> list[Result]:
    indent = title[: len(title) - len(title.lstrip())] + "    "
    return [
        _row(title, "ms", 1000 * median_s(timings), f"{name}_ms", most=most),
        _row(f"{indent}99th percentile", "ms", 1000 * percentile_s(timings, 99), f"{name}_ms_p99"),
        _row(f"{indent}longest", "ms", 1000 * percentile_s(timings, 100), f"{name}_ms_max"),
    ]


def _row(title: str, unit: str, value: float, figure: str, *, most: float | None = None) -> Result:
    return Result(
        title=title,
        unit=unit,
        ours=value,
        floor=None,
        ratio=None,
        target=None if most is None else Target(limit=most, is_least=False),
        judged=value,
        figures={figure: value},
    )
