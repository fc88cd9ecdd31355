"""A node's blocks with their tokens, and what was published of them: one SQLite file.

The tiers know keys, engines know tokens; here they meet. A block is published of a tier while the
tier has all its parts that this node's ranks need, once somebody has told its tokens. The file
outlives the shard, so that a shard that starts again need not wait for prompts.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any

import numpy as np
import numpy.typing as npt

from kvray.events import BlockRemoved, BlockStored, Event
from kvray.events.message import DISK_MEDIUM, HOST_MEDIUM

HOST, DISK = "host", "disk"
"""The tiers, as columns."""
_TIERS = ((HOST, 1, HOST_MEDIUM), (DISK, 2, DISK_MEDIUM))
"""Column, bit in `told`, and medium of each tier."""
_PART_BITS = 62  # of a column; parts that share a bit count as one
_GONE_MAX = 200_000
"""Blocks that are gone and whose tokens are kept: most come back, and tokens are told once."""
_SETTINGS = """
PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; PRAGMA wal_autocheckpoint=4096;
PRAGMA cache_size=-65536; PRAGMA temp_store=MEMORY;
"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    id INTEGER PRIMARY KEY, key INTEGER UNIQUE NOT NULL,
    namespace INTEGER, parent INTEGER, tokens BLOB,
    host INTEGER NOT NULL DEFAULT 0, disk INTEGER NOT NULL DEFAULT 0,
    told INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS gone ON blocks (id) WHERE host = 0 AND disk = 0;
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS ports (replica TEXT PRIMARY KEY, port INTEGER UNIQUE NOT NULL);
CREATE TEMP TABLE namespaces (
    id INTEGER PRIMARY KEY, tokens_per_block INTEGER NOT NULL, parts INTEGER NOT NULL);
CREATE TEMP TABLE changed (id INTEGER PRIMARY KEY, key INTEGER UNIQUE NOT NULL);
"""
_OF_CHANGED = """
SELECT b.id, b.key, b.parent, b.tokens, b.namespace, n.tokens_per_block, b.told,
    n.parts != 0 AND b.host & n.parts = n.parts, n.parts != 0 AND b.disk & n.parts = n.parts
FROM changed c JOIN blocks b ON b.key = c.key JOIN namespaces n ON n.id = b.namespace
WHERE c.id <= ? AND b.tokens IS NOT NULL ORDER BY c.id
"""


@dataclass(frozen=True, slots=True)
class NamespaceTerms:
    """What blocks of a namespace are to this node's ranks."""

    tokens_per_block: int
    parts: frozenset[int]
    """The parts that some rank here needs of every block."""


class DescribedBlocks:
    """Used by one thread; errors of the file are those of `sqlite3`."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it; nothing in it counts as held or published yet."""
        self._file = sqlite3.connect(path, isolation_level=None)
        # Pages that were written survive the process, which is all that is asked for.
        self._file.executescript(_SETTINGS + _SCHEMA)
        if self.note("generation") == 0:
            self.set_note("generation", SystemRandom().getrandbits(31) | 1)
        self._terms: Mapping[int, NamespaceTerms] = {}
        self.forget_held()

    def close(self) -> None:
        """Close the file. Twice is fine."""
        self._file.close()

    @property
    def generation(self) -> int:
        """A number that changes whenever tokens that were told are forgotten."""
        return self.note("generation")

    def note(self, name: str) -> int:
        """Return a number that was kept under a name; 0: none was."""
        row = self._file.execute("SELECT value FROM notes WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else 0

    def set_note(self, name: str, value: int) -> None:
        """Keep a number under a name."""
        self._file.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))

    def ports(self) -> dict[str, int]:
        """Return the port of each replica that has one."""
        return dict(self._file.execute("SELECT replica, port FROM ports"))

    def set_ports(self, ports: Mapping[str, int]) -> None:
        """Keep the ports of replicas, in place of those that were kept."""
        with self._changing():
            self._file.execute("DELETE FROM ports")
            self._file.executemany("INSERT INTO ports VALUES (?, ?)", ports.items())

    def set_terms(self, terms: Mapping[int, NamespaceTerms]) -> None:
        """Take the namespaces' terms, by their numbers; those without are not published."""
        if terms == self._terms:
            return
        with self._changing():
            self._file.execute("DELETE FROM namespaces")
            self._file.executemany(
                "INSERT INTO namespaces VALUES (?, ?, ?)",
                ((at, one.tokens_per_block, _bits(one.parts)) for at, one in terms.items()),
            )
            for at in [at for at in terms if terms[at] != self._terms.get(at)]:
                self._file.execute(
                    "INSERT OR IGNORE INTO changed (key) SELECT key FROM blocks"
                    " WHERE namespace = ? ORDER BY id",
                    (at,),
                )
        self._terms = dict(terms)

    def forget_held(self) -> None:
        """Let no tier hold anything, and count nothing as published."""
        with self._changing():
            self._file.execute("UPDATE blocks SET host = 0, disk = 0, told = 0")
            self._file.execute("DELETE FROM changed")

    def describe(self, namespace: int, size: int, chain: Sequence[bytes]) -> None:
        """Take the tokens of a `Chain`, of `size` tokens a block; ValueError: it is none."""
        parent, hashes, tokens = chain
        keys = _keys(hashes)
        if len(hashes) % 8 or len(parent) not in (0, 8) or len(tokens) != 4 * size * len(keys):
            raise ValueError("the lengths of its hashes and its tokens differ")
        step, before = 4 * size, next(iter(_keys(parent)), None)
        parents = [before, *keys[:-1]]
        with self._changing():
            self._file.executemany(
                "INSERT INTO blocks (key, namespace, parent, tokens) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (key) DO UPDATE SET namespace = excluded.namespace,"
                " parent = excluded.parent, tokens = excluded.tokens WHERE tokens IS NULL",
                (
                    (key, namespace, parents[at], tokens[at * step : (at + 1) * step])
                    for at, key in enumerate(keys)
                ),
            )
            self._mark(keys)

    def change(
        self, tier: str, keys: npt.NDArray[Any], parts: npt.NDArray[Any], *, has: bool
    ) -> None:
        """Note that a tier has parts of blocks now, or has them no longer.

        `keys` are u64 of shape [num_blocks, 4], as tables have them.
        """
        hashes = np.ascontiguousarray(keys[:, 0]).view(">i8").astype(np.int64).tolist()
        bits = (1 << (parts.astype(np.int64) % _PART_BITS)).tolist()
        with self._changing():
            self._file.executemany(
                f"INSERT INTO blocks (key, {tier}) VALUES (?, ?)"
                f" ON CONFLICT (key) DO UPDATE SET {tier} = {tier} | excluded.{tier}"
                if has
                else f"UPDATE blocks SET {tier} = {tier} & ~?2 WHERE key = ?1",
                zip(hashes, bits, strict=True),
            )
            self._mark(hashes)

    def take_news(self, step: int) -> dict[int, list[Event]] | None:
        """Return what of `step` changed blocks is to be published, by namespace; it counts as told.

        None: nothing has changed.
        """
        changed = self._file.execute("SELECT id FROM changed ORDER BY id LIMIT ?", (step,))
        last = max((row[0] for row in changed.fetchall()), default=None)
        if last is None:
            return None
        news: dict[int, _Events] = {}
        with self._changing():
            told = []
            for row in self._file.execute(_OF_CHANGED, (last,)).fetchall():
                block, key, parent, tokens, namespace, size, was, *has = row
                now = sum(bit for held, (_, bit, _) in zip(has, _TIERS, strict=True) if held)
                if now != was:
                    told.append((now, block))
                    events = news.setdefault(namespace, _Events(size))
                    events.change(key, parent, tokens, stored=now & ~was, removed=was & ~now)
            self._file.executemany("UPDATE blocks SET told = ? WHERE id = ?", told)
            # A key of which nobody has told more leaves nothing behind.
            self._file.execute(
                "DELETE FROM blocks WHERE tokens IS NULL AND host = 0 AND disk = 0"
                " AND key IN (SELECT key FROM changed WHERE id <= ?)",
                (last,),
            )
            self._file.execute("DELETE FROM changed WHERE id <= ?", (last,))
        return {namespace: events.all() for namespace, events in news.items()}

    def prune(self) -> None:
        """Forget the tokens of half of the blocks that are gone, the oldest, if they are many."""
        gone = "FROM blocks WHERE host = 0 AND disk = 0"
        if self._file.execute(f"SELECT count(*) {gone}").fetchone()[0] <= _GONE_MAX:
            return
        with self._changing():
            self._file.execute(
                f"DELETE FROM blocks WHERE id IN (SELECT id {gone} ORDER BY id LIMIT ?)",
                (_GONE_MAX // 2,),
            )
            self.set_note("generation", self.generation + 1)

    def num_told(self, namespace: int) -> int:
        """Return how many blocks are published, counted once a tier."""
        found = self._file.execute(
            "SELECT sum((told & 1) + (told >> 1)) FROM blocks WHERE told AND namespace = ?",
            (namespace,),
        ).fetchone()
        return found[0] or 0

    def stored(self, namespace: int, step: int) -> Iterator[list[Event]]:
        """Yield events that store what is published, about `step` blocks at a time."""
        last = 0
        while True:
            rows = self._file.execute(
                "SELECT b.id, b.key, b.parent, b.tokens, n.tokens_per_block, b.told"
                " FROM blocks b JOIN namespaces n ON n.id = b.namespace"
                " WHERE b.id > ? AND b.told AND b.namespace = ? ORDER BY b.id LIMIT ?",
                (last, namespace, step),
            ).fetchall()
            if not rows:
                return
            events = _Events(rows[0][4])
            for _, key, parent, tokens, _, told in rows:
                events.change(key, parent, tokens, stored=told, removed=0)
            last = rows[-1][0]
            yield events.all()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Write all of it or nothing."""
        self._file.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._file.execute("ROLLBACK")
            raise
        self._file.execute("COMMIT")

    def _mark(self, keys: Sequence[int]) -> None:
        self._file.executemany(
            "INSERT OR IGNORE INTO changed (key) VALUES (?)", ((key,) for key in keys)
        )


class _Events:
    """Events of one namespace in the making: blocks that follow each other share one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._stored: dict[str, list[tuple[int | None, list[int], list[bytes]]]] = {}
        """For each medium, of each run of blocks the parent, the hashes and the tokens."""
        self._removed: dict[str, list[int]] = {}

    def change(
        self, key: int, parent: int | None, tokens: bytes, *, stored: int, removed: int
    ) -> None:
        """Add what has happened to a block; `stored` and `removed` are bits as in `_TIERS`."""
        for _, bit, medium in _TIERS:
            if removed & bit:
                self._removed.setdefault(medium, []).append(_unsigned(key))
            if not stored & bit:
                continue
            before = None if parent is None else _unsigned(parent)
            runs = self._stored.setdefault(medium, [])
            if not runs or before is None or runs[-1][1][-1] != before:
                runs.append((before, [], []))
            runs[-1][1].append(_unsigned(key))
            runs[-1][2].append(tokens)

    def all(self) -> list[Event]:
        """Return the events; what moved to another tier is stored there before it is removed."""
        stored = [
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=before,
                token_ids=np.frombuffer(b"".join(tokens), dtype="<u4").tolist(),
                block_size=self._size,
                medium=medium,
            )
            for medium, runs in self._stored.items()
            for before, hashes, tokens in runs
        ]
        removed = [
            BlockRemoved(block_hashes=hashes, medium=medium)
            for medium, hashes in self._removed.items()
        ]
        return [*stored, *removed]


def _keys(hashes: bytes) -> list[int]:
    """Return hashes as SQLite has them, which knows signed numbers only."""
    found: list[int] = np.frombuffer(hashes[: len(hashes) // 8 * 8], dtype=">i8").tolist()
    return found


def _unsigned(key: int) -> int:
    """Return a block's hash as an event has it: the first 8 bytes of its key, big-endian."""
    return key & (2**64 - 1)


def _bits(parts: frozenset[int]) -> int:
    found = 0
    for part in parts:
        found |= 1 << part % _PART_BITS
    return found
