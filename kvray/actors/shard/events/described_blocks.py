"""A node's blocks with their tokens, and what was published of them: one SQLite file.

The tiers know keys, engines know tokens; here they meet. A block is published of a tier while the
tier has all its parts that this node's ranks need, once somebody has told its tokens. The file
outlives the shard, so that a shard that starts again need not wait for prompts.
"""

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any

import numpy as np
import numpy.typing as npt

from kvray.errors import ConfigError
from kvray.events import BlockRemoved, BlockStored, Event
from kvray.events.message import DISK_MEDIUM, HOST_MEDIUM

HOST, DISK = "host", "disk"
"""The tiers, as columns."""
_TIERS = ((HOST, 1, HOST_MEDIUM), (DISK, 2, DISK_MEDIUM))
"""Column, bit in `told`, and medium of each tier."""
_PART_BITS = 62  # of a column; parts that share a bit count as one
_CHAIN_COST = 256
"""Bytes that a chain takes besides its own while it waits."""
_GONE_MAX = 200_000
"""Blocks that are gone and whose tokens are kept: most come back, and tokens are told once."""
_GONE_MIN = 1000
"""The same when the file is full: for fewer it is not worth to have engines tell again."""
_CHANGED_MAX = 100_000
"""Blocks that wait to be published; then tiers and engines wait."""
JOURNAL_BYTES = 8 * 2**20
"""What the file's journal may take beside it, as nothing is written in large pieces."""
_PIECE = 10_000
_SETTINGS = """
PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; PRAGMA wal_autocheckpoint=256;
PRAGMA journal_size_limit=1048576; PRAGMA cache_size=-65536; PRAGMA temp_store=MEMORY;
"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    id INTEGER PRIMARY KEY, key INTEGER UNIQUE NOT NULL,
    namespace INTEGER, parent INTEGER, tokens BLOB,
    host INTEGER NOT NULL DEFAULT 0, disk INTEGER NOT NULL DEFAULT 0,
    told INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS gone ON blocks (id) WHERE host = 0 AND disk = 0 AND told = 0;
CREATE INDEX IF NOT EXISTS told ON blocks (namespace, id) WHERE told != 0;
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS ports (replica TEXT PRIMARY KEY, port INTEGER UNIQUE NOT NULL);
CREATE TEMP TABLE namespaces (
    id INTEGER PRIMARY KEY, tokens_per_block INTEGER NOT NULL, parts INTEGER NOT NULL);
CREATE TEMP TABLE changed (id INTEGER PRIMARY KEY, key INTEGER UNIQUE NOT NULL);
"""
_OF_CHANGED = """
SELECT b.parent, b.tokens, b.namespace, n.tokens_per_block, b.told,
    n.parts != 0 AND b.host & n.parts = n.parts, n.parts != 0 AND b.disk & n.parts = n.parts
FROM blocks b JOIN namespaces n ON n.id = b.namespace
WHERE b.key = ? AND length(b.tokens) = 4 * n.tokens_per_block
"""
_WAITING_PARENT = "SELECT c.key FROM blocks b JOIN changed c ON c.key = b.parent WHERE b.key = ?"
_CLIMB_MAX = 2048
"""Parents that are looked for of a block that waits to be published."""
_TELL = """
UPDATE blocks SET told = ?1, id = iif(?2, id, (SELECT max(id) + 1 FROM blocks)) WHERE key = ?3
"""
"""What is published anew goes to the end, so that a snapshot has parents first, too."""
_GONE = "FROM blocks WHERE host = 0 AND disk = 0 AND told = 0"


@dataclass(frozen=True, slots=True)
class NamespaceTerms:
    """What blocks of a namespace are to this node's ranks."""

    tokens_per_block: int
    parts: frozenset[int]
    """The parts that some rank here needs of every block."""


def check_chain(chain: Any, *, tokens_per_block: int) -> int:
    """Return the bytes that a `Chain` takes; ConfigError: it is none."""
    match chain:
        case (bytes(parent), bytes(hashes), bytes(tokens)) if (
            len(parent) in (0, 8)
            and not len(hashes) % 8
            and len(tokens) * 2 == len(hashes) * tokens_per_block
        ):
            return len(parent) + len(hashes) + len(tokens) + _CHAIN_COST
    raise ConfigError(
        "The tokens of blocks come as (parent, hashes, tokens), of 8 bytes a hash and 4 a token."
    )


class DescribedBlocks:
    """Used by one thread; errors of the file are those of `sqlite3`.

    When the file is full, blocks that are gone are forgotten, and new ones are not taken.
    """

    def __init__(self, path: Path, *, bytes_max: int) -> None:
        """Open the file, or make it; nothing in it counts as held or published yet.

        It takes at most `bytes_max` bytes, and `JOURNAL_BYTES` more beside it.
        """
        self._bytes_max = bytes_max
        self._file = sqlite3.connect(path, isolation_level=None)
        # Pages that were written survive the process, which is all that is asked for.
        self._file.executescript(_SETTINGS + _SCHEMA)
        if self.note("generation") == 0:
            self.set_note("generation", SystemRandom().getrandbits(31) | 1)
        self._terms: Mapping[int, NamespaceTerms] = {}
        self._num_told: Counter[int] = Counter()
        """Blocks that are published of each namespace, counted once a tier."""
        self._forget_held()

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

    @property
    def is_full(self) -> bool:
        """Whether the file has as many bytes as it may have."""
        pages, free, size = (
            self._file.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return bool((pages - free) * size >= self._bytes_max)

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be published that nothing more should be taken."""
        last = self._file.execute("SELECT max(id) - min(id) FROM changed").fetchone()[0]
        return (last or 0) >= _CHANGED_MAX

    def _forget_held(self) -> None:
        """Let no tier hold anything, and count nothing as published."""
        last = self._file.execute("SELECT max(id) FROM blocks").fetchone()[0] or 0
        for start in range(0, last + 1, _PIECE):
            self._file.execute(
                "UPDATE blocks SET host = 0, disk = 0, told = 0"
                " WHERE id >= ? AND id < ? AND host + disk + told != 0",
                (start, start + _PIECE),
            )

    def describe(self, namespace: int, size: int, chain: Sequence[bytes]) -> bool:
        """Take the tokens of a `Chain`, of `size` tokens a block; False: there is no room."""
        if self.is_full and not self.prune():
            return False
        parent, hashes, tokens = chain
        keys = _keys(hashes)
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
        return True

    def change(
        self, tier: str, keys: npt.NDArray[Any], parts: npt.NDArray[Any], *, has: bool
    ) -> None:
        """Note that a tier has parts of blocks now, or has them no longer.

        `keys` are u64 of shape [num_blocks, 4], as tables have them.
        """
        if not len(keys):
            return
        takes_new = has and not self.is_full
        hashes = np.ascontiguousarray(keys[:, 0]).view(">i8").astype(np.int64).tolist()
        bits = (1 << (parts.astype(np.int64) % _PART_BITS)).tolist()
        with self._changing():
            self._file.executemany(
                f"INSERT INTO blocks (key, {tier}) VALUES (?, ?)"
                f" ON CONFLICT (key) DO UPDATE SET {tier} = {tier} | excluded.{tier}"
                if takes_new
                else f"UPDATE blocks SET {tier} = {tier} {'|' if has else '& ~'} ?2 WHERE key = ?1",
                zip(hashes, bits, strict=True),
            )
            self._mark(hashes)

    def take_news(self, step: int) -> dict[int, list[Event]] | None:
        """Return what of `step` changed blocks is to be published, by namespace; it counts as told.

        None: nothing has changed.
        """
        keys = self._next_changed(step)
        if not keys:
            return None
        news: dict[int, _Events] = {}
        with self._changing():
            for key in keys:
                row = self._file.execute(_OF_CHANGED, (key,)).fetchone()
                if row is None:
                    continue
                parent, tokens, namespace, size, was, *has = row
                now = sum(bit for held, (_, bit, _) in zip(has, _TIERS, strict=True) if held)
                if now != was:
                    self._file.execute(_TELL, (now, was, key))
                    self._num_told[namespace] += now.bit_count() - was.bit_count()
                    events = news.setdefault(namespace, _Events(size))
                    events.change(key, parent, tokens, stored=now & ~was, removed=was & ~now)
            done = [(key,) for key in keys]
            # A key of which nobody has told more leaves nothing behind.
            self._file.executemany(
                "DELETE FROM blocks WHERE key = ? AND tokens IS NULL AND host = 0 AND disk = 0",
                done,
            )
            self._file.executemany("DELETE FROM changed WHERE key = ?", done)
        return {namespace: events.all() for namespace, events in news.items()}

    def _next_changed(self, step: int) -> list[int]:
        """Return the keys of changed blocks that come next, each after its parent if that waits.

        Tiers tell of their blocks slot by slot, and routers take no block whose parent they lack.
        """
        found = self._file.execute("SELECT key FROM changed ORDER BY id LIMIT ?", (step,))
        taken: dict[int, None] = {}
        for row in found.fetchall():
            chain: dict[int, None] = {}
            while row and row[0] not in taken and row[0] not in chain and len(chain) < _CLIMB_MAX:
                chain[row[0]] = None
                row = self._file.execute(_WAITING_PARENT, row).fetchone()  # noqa: PLW2901
            taken |= dict.fromkeys(reversed(chain))
            if len(taken) >= step:
                break
        return [*taken][:step]

    def prune(self) -> bool:
        """Forget the tokens of half of the blocks that are gone, the oldest, if they are too many.

        Returns whether it has forgotten any.
        """
        num_gone = self._file.execute(f"SELECT count(*) {_GONE}").fetchone()[0]
        if num_gone <= (_GONE_MIN if self.is_full else _GONE_MAX):
            return False
        with self._changing():
            self._file.execute(
                f"DELETE FROM blocks WHERE id IN (SELECT id {_GONE} ORDER BY id LIMIT ?)",
                (num_gone // 2,),
            )
            self.set_note("generation", self.generation + 1)
        return True

    def num_told(self, namespace: int) -> int:
        """Return how many blocks are published, counted once a tier."""
        return self._num_told[namespace]

    def page(self, namespace: int, after: int, step: int) -> tuple[list[Event], int | None]:
        """Return events that store the next `step` blocks published; see `Content.page`."""
        rows = self._file.execute(
            "SELECT b.id, b.key, b.parent, b.tokens, n.tokens_per_block, b.told"
            " FROM blocks b JOIN namespaces n ON n.id = b.namespace"
            " WHERE b.id > ? AND b.told != 0 AND b.namespace = ?"
            " AND length(b.tokens) = 4 * n.tokens_per_block ORDER BY b.id LIMIT ?",
            (after, namespace, step),
        ).fetchall()
        if not rows:
            return [], None
        events = _Events(rows[0][4])
        for _, key, parent, tokens, _, told in rows:
            events.change(key, parent, tokens, stored=told, removed=0)
        return events.all(), rows[-1][0] if len(rows) == step else None

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
    return sum(1 << bit for bit in {part % _PART_BITS for part in parts})
