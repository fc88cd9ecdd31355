"""`kvray bench lookup`: memory and time of the lookup's index, as its actor uses it."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable

import numpy as np
import psutil

from kvray.actors.lookup.lookup import PART_BYTES, Announcement, Lookup
from kvray.actors.shard.announcer import ANNOUNCED_MAX
from kvray.errors import KVRayError
from kvray.identity.block import KEY_BYTES
from kvray.lab.bench.report import Report, Row, cores, time_rows, value_row
from kvray.lab.bench.runner import Duration, Runner, median_s, timed

MATCHED = 4096
"""Keys of one query: a prompt of 131,072 tokens."""

_CROWDED_KEYS = 20_000
_CHAIN = 200
"""Blocks of a chain that is cut at random; each of its holders has another number of them."""
_QUERIES = 300
_FIRST, _SECOND = "first", "second"


def run(runner: Runner, *, num_entries: int) -> Report:
    """Fill an index, ask it, and have a shard dropped.

    Raises:
        KVRayError: a block that was announced was not found.
    """
    return _Bench(max(1, num_entries // ANNOUNCED_MAX), runner).take_all()


class _Bench:
    """One lookup, and the announcements of two shards to it."""

    def __init__(self, num_batches: int, runner: Runner) -> None:
        self._num_batches = num_batches
        self._runner = runner
        runner.show("Starting", total=2 * num_batches + 3 * _QUERIES)
        self._random = random.Random(0)
        self._sequences = dict.fromkeys((_FIRST, _SECOND), 0)
        # The interpreter loads some code only at the first announcement.
        self._lookup = Lookup()
        for shard in self._sequences:
            self._announce(shard, _batch(-1))
        self._sequences = dict.fromkeys(self._sequences, 0)
        self._lookup = Lookup()
        gc.freeze()  # as the actor does

    def take_all(self) -> Report:
        num_entries = self._num_batches * ANNOUNCED_MAX
        empty = _resident_bytes()
        announce = self._announce_all(_FIRST)
        one_holder = (_resident_bytes() - empty) / num_entries
        match = self._ask("match", self._match)
        match_warm = self._ask("match again", self._match, chain=self._chain())
        locate = self._ask("locate", lambda keys: self._lookup.locate(keys, now=0.0)[-1].stop)
        self._announce_all(_SECOND)
        two_holders = (_resident_bytes() - empty) / num_entries
        drop_ms = 1000 * timed(lambda: self._lookup.drop(_FIRST)).seconds
        purge = []
        while not self._lookup.index.is_purged:  # the other shard's heartbeats purge it
            purge.append(self._announce(_SECOND, b""))
        entry = "lookup_bytes_per_entry"
        rows = [
            value_row("memory for each entry", "bytes", one_holder, entry),
            value_row("    with two holders", "bytes", two_holders, f"{entry}_2_holders"),
            *time_rows(f"match of {MATCHED:,} keys", "lookup_match", match),
            *time_rows("    the same keys again", "lookup_match_warm", match_warm),
            *time_rows(f"locate of {MATCHED:,} keys", "lookup_locate", locate),
            *time_rows(f"announcement of {ANNOUNCED_MAX:,} keys", "lookup_announce", announce),
            value_row("drop of a shard that had them all", "ms", drop_ms, "lookup_drop_ms"),
            *time_rows("heartbeat while it is purged", "lookup_purge", purge),
            *_crowd("80 nodes, 8 holders a block", "80x8", (80, 8, 1)),
            *_crowd("81 nodes, 50 holders a chain cut at random", "81x50", (81, 50, _CHAIN)),
        ]
        return Report(
            rows=rows,
            note=f"{num_entries:,} entries, on {cores()}; medians of times inside the lookup,"
            f" without Ray's part of a call. A dropped shard is purged within {len(purge):,}"
            " heartbeats or announcements of others.",
            facts={"entries": num_entries, "purge_heartbeats": len(purge)},
        )

    def _announce_all(self, shard: str) -> list[Duration]:
        self._runner.show(f"Announcing ({shard} holder)")
        durations = []
        for number in range(self._num_batches):
            durations.append(self._announce(shard, _batch(number)))
            self._runner.advance()
        return durations

    def _announce(self, shard: str, keys: bytes) -> Duration:
        self._sequences[shard] += 1
        announcement = _announcement(shard, self._sequences[shard], keys)
        return timed(lambda: self._lookup.announce(announcement, now=0.0))

    def _ask(
        self, title: str, ask: Callable[[bytes], int], *, chain: bytes | None = None
    ) -> list[Duration]:
        """Time queries, each for another chain unless one is given."""
        self._runner.show(f"Asking ({title})")
        durations = []
        for _ in range(_QUERIES):
            keys = chain or self._chain()
            began = time.perf_counter()
            found = ask(keys)
            durations.append(Duration(time.perf_counter() - began))
            if found != MATCHED:
                raise KVRayError(f"Only {found} of {MATCHED} blocks were found; this is a defect.")
            self._runner.advance()
        return durations

    def _chain(self) -> bytes:
        """Return keys that one shard has announced one after the other."""
        first = self._random.randrange(ANNOUNCED_MAX - MATCHED + 1) * KEY_BYTES
        return _batch(self._random.randrange(self._num_batches))[first:][: MATCHED * KEY_BYTES]

    def _match(self, keys: bytes) -> int:
        return self._lookup.match(keys, 1, now=0.0).num_blocks


def _crowd(title: str, name: str, shape: tuple[int, int, int]) -> list[Row]:
    """Fill an index whose blocks have holders of their own; time one more holder, and figures."""
    num_nodes, num_holders, chain = shape
    random = np.random.default_rng(0)
    is_held = np.zeros((_CROWDED_KEYS, num_nodes), dtype=bool)
    for start in range(0, _CROWDED_KEYS, chain):
        for node in random.permutation(num_nodes)[:num_holders].tolist():
            is_held[start : start + int(random.integers(1, chain + 1)), node] = True
    keys = np.frombuffer(_batch(0), dtype=f"V{KEY_BYTES}")[:_CROWDED_KEYS]
    lookup, num_entries = Lookup(), int(np.count_nonzero(is_held))

    def announce(node: int, sequence: int, added: bytes, removed: bytes = b"") -> float:
        one = _announcement(f"node {node}", sequence, added, removed)
        return timed(lambda: lookup.announce(one, now=0.0)).seconds

    fill_s = sum(announce(at, 1, keys[is_held[:, at]].tobytes()) for at in range(num_nodes))
    add_s = announce(num_nodes, 1, keys.tobytes())
    remove_s = announce(num_nodes, 2, b"", keys.tobytes())
    status_s = median_s([timed(lambda: lookup.status(0.0)) for _ in range(9)])
    num_bytes, name = lookup.index.num_bytes, f"lookup_{name}"
    return [
        value_row(title, "us/entry", 1e6 * fill_s / num_entries, f"{name}_us_per_entry"),
        value_row("    memory for each entry", "bytes", num_bytes / num_entries, f"{name}_bytes"),
        value_row(f"    {len(keys):,} keys added", "ms", 1e3 * add_s, f"{name}_announce_ms"),
        value_row("    and removed", "ms", 1e3 * remove_s, f"{name}_remove_ms"),
        value_row("    status", "ms", 1e3 * status_s, f"{name}_status_ms"),
    ]


def _announcement(shard: str, sequence: int, added: bytes, removed: bytes = b"") -> Announcement:
    return Announcement(
        shard=shard,
        arena_id="bench",
        shard_epoch=1,
        sequence=sequence,
        full=sequence == 1,
        added_keys=added,
        added_parts=bytes(PART_BYTES * (len(added) // KEY_BYTES)),
        removed_keys=removed,
        removed_parts=bytes(PART_BYTES * (len(removed) // KEY_BYTES)),
    )


def _batch(number: int) -> bytes:
    """Return the keys of an announcement: as uniform as digests, and the same ones each time."""
    return random.Random(number).randbytes(ANNOUNCED_MAX * KEY_BYTES)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
