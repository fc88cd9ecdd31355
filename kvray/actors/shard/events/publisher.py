"""Publishes KV events of a shard's tiers, in a thread of its own.

Each namespace has one `ZmqPublisher`, bound on a pair of ports for each replica of the namespace on
this node: what a node has counts for all of them. Nobody waits for this thread: it reads the tiers'
tables as the lookup's announcer does, so that what it is late for is one change in the end, and
beyond a bound the tokens that engines tell are dropped and told again later.
"""

import contextlib
import logging
import os
import selectors
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvray.actors.owner.ownership import EVENTS_FILE, remove_events
from kvray.actors.shard.announcer import TierDelta
from kvray.actors.shard.events.described_blocks import (
    DISK,
    HOST,
    JOURNAL_BYTES,
    DescribedBlocks,
    NamespaceTerms,
    check_chain,
)
from kvray.actors.staging.replicas import Replicas
from kvray.errors import ConfigError, KVRayError
from kvray.events import Event
from kvray.events.publisher import BATCH_BLOCKS, ZmqPublisher
from kvray.events.zmtp import endpoint
from kvray.identity.block import namespace_id
from kvray.store import ArenaOwner
from kvray.store.arena.mapped import is_damage
from kvray.store.nvme import NvmeStore

_log = logging.getLogger("kvray.shard")

_POLL_S, _BUSY_S = 0.05, 0.002
_REPLICAS_S = 0.5  # how often it looks which replicas there are
_PRUNE_S = 30.0
_AGAIN_S = 10.0  # after an error of the file
_NEWS_STEPS = 16  # batches before subscribers have their turn
_WAITING_MAX = 16 * 2**20  # bytes of tokens that engines have told
_TOLD_BYTES_PER_S = 4 * 2**20  # of one connection: a million tokens
_PORTS_MAX = 64
_NAMESPACES_MAX = 8  # each has batches for replays, and clients
_JUMP = 10**6
"""From the last number of the former run that is known to the first of the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSettings:
    """Where events are published."""

    host: str
    """Address to listen on."""
    port: int
    """The first of the ports; each replica has two."""
    bytes_max: int
    """What is kept of blocks and their tokens in the arena's directory."""


class _Told(NamedTuple):
    """What an engine has told of its blocks."""

    namespace: int
    tokens_per_block: int
    chains: Sequence[Any]
    size: int


class _Waiting:
    """What engines have told and nobody has taken yet, by connection; for two threads.

    Each connection has its turn, and a bounded speed. Beyond the limit the connection that has sent
    most loses its latest, so a flood from one engine does not cost another its notes.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._lock = threading.Lock()
        self._told: dict[int, deque[_Told]] = {}
        self._sizes: Counter[int] = Counter()
        self._due: dict[int, float] = {}
        """When a connection has its next turn."""

    def add(self, connection: int, told: _Told) -> bool:
        """Have something wait; False: there is no room for it."""
        with self._lock:
            self._told.setdefault(connection, deque()).append(told)
            self._sizes[connection] += told.size
            is_taken = True
            while self._sizes.total() > _WAITING_MAX:
                most = max(self._sizes, key=self._sizes.__getitem__)
                is_taken &= self._pop(most, -1) is not told
                self.num_dropped += 1
            return is_taken

    def take(self, now: float) -> _Told | None:
        """Return what comes next; None: nothing, or not yet."""
        with self._lock:
            for connection in self._told:
                if self._due.get(connection, 0.0) <= now:
                    told = self._pop(connection, 0)
                    if connection in self._told:  # the others first
                        self._told[connection] = self._told.pop(connection)
                    self._due = {one: at for one, at in self._due.items() if at > now}
                    self._due[connection] = now + told.size / _TOLD_BYTES_PER_S
                    return told
            return None

    def _pop(self, connection: int, at: int) -> _Told:
        waiting = self._told[connection]
        told = waiting[at]
        del waiting[at]
        self._sizes[connection] -= told.size
        if not waiting:
            del self._told[connection], self._sizes[connection]
        return told


class EventPublisher:
    """Of one shard that serves; `start`, then `close`."""

    def __init__(
        self,
        directory: Path,
        settings: EventSettings,
        owner: ArenaOwner,
        store: Callable[[], NvmeStore | None],
        replicas: Replicas,
    ) -> None:
        """Publish what the arena of `owner` and the disk's `store` have, for `replicas`."""
        self._path = directory / EVENTS_FILE
        self._settings = settings
        self._owner = owner
        self._store_now = store
        self._replicas = replicas
        self._told = _Waiting()
        self.generation = 0
        """The number of what engines were asked to tell."""
        self._terms: dict[int, NamespaceTerms] = {}
        self._store: NvmeStore | None = None
        self._deltas: list[tuple[str, TierDelta]] = []
        self._publishers: dict[int, ZmqPublisher] = {}
        self._ports: dict[str, tuple[int, int]] = {}
        """Replica -> its namespace and the first of its ports."""
        self._problem = self._refused = ""
        self._figures = {"batches": 0, "replays": 0}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvray-events", daemon=True)

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. Twice is fine."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def describe(
        self, connection: int, namespace: int, tokens_per_block: int, chains: Sequence[Any]
    ) -> int:
        """Take the tokens of blocks, from the event loop, and return the generation.

        A `namespace` is its `namespace_id`; the chains are as in `kvray.node.engine_log`.
        Engines tell everything again when the generation changes. ConfigError: no such chains.
        """
        if not isinstance(chains, list | tuple):
            raise ConfigError("The tokens of blocks come as a list of (parent, hashes, tokens).")
        size = sum(check_chain(one, tokens_per_block=tokens_per_block) for one in chains)
        is_taken = self._told.add(connection, _Told(namespace, tokens_per_block, chains, size))
        return self.generation if is_taken else self.generation - 1  # so they are told again

    def status(self) -> dict[str, Any]:
        """Return figures, and the addresses of each replica; from any thread."""
        problem = self._problem or self._refused
        if not self._thread.is_alive() and not self._is_over.is_set():
            problem = "The thread that publishes KV events has ended; restart the shard."
        return {
            **self._figures,
            "dropped": self._told.num_dropped,
            "problem": problem,
            "replicas": {
                replica: list(_addresses(self._settings.host, port))
                for replica, (_, port) in sorted(self._ports.copy().items())
            },
        }

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self._make_private()
                bytes_max = self._settings.bytes_max - JOURNAL_BYTES
                with (
                    contextlib.closing(DescribedBlocks(self._path, bytes_max=bytes_max)) as blocks,
                    selectors.EpollSelector() as selector,
                ):
                    self.generation, self._problem = blocks.generation, ""
                    self._publish(blocks, selector)
            except (sqlite3.Error, OSError) as error:
                self._problem = f"The file {self._path} failed ({error}) and is made again."
                _log.warning("%s", self._problem)
                remove_events(self._path.parent)
            except Exception as error:  # noqa: BLE001 - the thread's end, after which it begins again
                # Events are for others; the shard goes on without them. What is in the file may
                # be what has ended them.
                self._problem = f"A defect ended KV events; they begin again soon ({error!r})."
                _log.exception("%s", self._problem)
                remove_events(self._path.parent)
            finally:
                for publisher in self._publishers.values():
                    publisher.close()
                self._publishers, self._ports, self._deltas = {}, {}, []
            self._is_over.wait(_AGAIN_S)

    def _make_private(self) -> None:
        """Have the file before it is used: it has what people have written.

        What SQLite makes beside it gets its mode.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(self._path, flags, 0o600))
        for path in self._path.parent.glob(f"{self._path.name}*"):
            path.chmod(0o600)

    def _publish(self, blocks: DescribedBlocks, selector: selectors.EpollSelector) -> None:
        owner = self._owner
        self._deltas = [(HOST, TierDelta(lambda: owner.arena.tables, owner.section))]
        self._store = None
        look_at = prune_at = 0.0
        while not self._is_over.wait(_BUSY_S):
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _REPLICAS_S
                self._follow_replicas(blocks, selector)
            if now >= prune_at:
                prune_at = now + _PRUNE_S
                blocks.prune()
            self.generation = blocks.generation
            is_busy = blocks.is_behind
            if not is_busy:  # else what comes waits: tokens where they are, tiers in their tables
                is_busy = self._take_told(blocks, now) | self._take_changes(blocks)
            is_busy |= self._tell(blocks)
            for publisher in self._publishers.values():
                publisher.serve(now)
                is_busy |= publisher.is_busy
            selector.select(0 if is_busy else _POLL_S)

    def _follow_replicas(self, blocks: DescribedBlocks, selector: selectors.EpollSelector) -> None:
        """Have a publisher for each namespace, and ports for each replica, that is here."""
        self._refused = ""
        if blocks.is_full:
            self._refused = (
                f"There are more blocks than {self._settings.bytes_max >> 20} MiB can describe; the"
                " others are not published."
            )
        last = max((publisher.last for publisher in self._publishers.values()), default=0)
        if last > blocks.note("last"):
            blocks.set_note("last", last)
        # Those that ended lately keep their ports, as they may come back.
        replicas = {
            one["replica"]: namespace_id(bytes.fromhex(one["namespace"]))
            for one in self._replicas.status()
        }
        terms = {**self._terms, **_terms(self._replicas)}
        here = [one for one in dict.fromkeys(replicas.values()) if one in terms]
        here.sort(key=lambda one: one not in self._publishers)
        if len(here) > _NAMESPACES_MAX:
            self._refused = f"Only {_NAMESPACES_MAX} of {len(here)} namespaces are published."
        self._terms = {one: terms[one] for one in here[:_NAMESPACES_MAX]}
        blocks.set_terms(self._terms)
        for namespace in self._terms.keys() - self._publishers.keys():
            first = max(int(1000 * time.time()), blocks.note("last") + _JUMP)
            publisher = ZmqPublisher(_Content(blocks, namespace), first=first)
            self._publishers[namespace] = publisher
            selector.register(publisher, selectors.EVENT_READ)
        moved = [
            one
            for one, (its, _) in self._ports.items()
            if replicas.get(one) != its or its not in self._terms
        ]
        for replica in moved:
            namespace, port = self._ports.pop(replica)
            self._publishers[namespace].unbind(*_addresses(self._settings.host, port))
        for namespace in self._publishers.keys() - self._terms.keys():
            publisher = self._publishers.pop(namespace)
            selector.unregister(publisher)
            publisher.close()
        for replica in sorted(replicas.keys() - self._ports.keys()):
            if replicas[replica] in self._publishers:
                self._bind(blocks, replica, replicas[replica])
        self._figures = {
            "batches": sum(one.num_batches for one in self._publishers.values()),
            "replays": sum(one.num_replays for one in self._publishers.values()),
        }

    def _bind(self, blocks: DescribedBlocks, replica: str, namespace: int) -> None:
        """Give a replica ports: those that it had, or the next two that are free."""
        had, first = blocks.ports(), self._settings.port
        taken = {port for _, port in self._ports.values()}
        free = [at for at in range(first, first + 2 * _PORTS_MAX, 2) if at not in taken]
        # A replica that comes back finds its ports, unless there were no others.
        free.sort(key=lambda port: (port != had.get(replica), port in had.values()))
        for port in free:
            with contextlib.suppress(ConfigError):
                self._publishers[namespace].bind(*_addresses(self._settings.host, port))
                self._ports[replica] = namespace, port
                left = {other: its for other, its in had.items() if its != port}
                blocks.set_ports({**left, replica: port})
                return
        self._refused = (
            f"No two ports from {first} on are free on {self._settings.host} for {replica}; set"
            " events.host and events.port to others."
        )

    def _take_told(self, blocks: DescribedBlocks, now: float) -> bool:
        """Take what engines have told; return whether there may be more."""
        for _ in range(_NEWS_STEPS):
            told = self._told.take(now)
            if told is None:
                return False
            for chain in told.chains:
                if not blocks.describe(told.namespace, told.tokens_per_block, chain):
                    self._told.num_dropped += 1
        return True

    def _take_changes(self, blocks: DescribedBlocks) -> bool:
        """Note what has come to the tiers and left them; return whether there is more."""
        store = self._store_now()
        if store is not self._store:
            self._follow_store(blocks, store)
        for tier, delta in self._deltas:
            try:
                changed = delta.collect()
            except KVRayError:
                continue  # the disk has just failed, or the arena was closed
            except Exception as error:
                if not is_damage(error):
                    raise
                continue  # the shard mends its tables
            if changed is not None:
                gone, come = changed
                blocks.change(tier, gone.keys, gone.parts, has=False)
                blocks.change(tier, come.keys, come.parts, has=True)
        return any(delta.is_behind for _, delta in self._deltas)

    def _follow_store(self, blocks: DescribedBlocks, store: NvmeStore | None) -> None:
        """Look at this store from now on; what another one had is gone."""
        for _, delta in self._deltas[1:]:
            held = delta.held()
            blocks.change(DISK, held.keys, held.parts, has=False)
        del self._deltas[1:]
        if store is not None:
            self._deltas.append((DISK, TierDelta(lambda: store.tables, store.section)))
        self._store = store

    def _tell(self, blocks: DescribedBlocks) -> bool:
        """Publish what has changed; return whether there is more."""
        for _ in range(_NEWS_STEPS):
            news = blocks.take_news(BATCH_BLOCKS)
            if news is None:
                return False
            for namespace, events in news.items():
                if namespace in self._publishers:
                    self._publishers[namespace].publish(events)
        return True


class _Content:
    """What is published of one namespace."""

    def __init__(self, blocks: DescribedBlocks, namespace: int) -> None:
        self._blocks = blocks
        self._namespace = namespace

    def num_blocks(self) -> int:
        return self._blocks.num_told(self._namespace)

    def page(self, after: int, step: int) -> tuple[list[Event], int | None]:
        return self._blocks.page(self._namespace, after, step)


def _terms(replicas: Replicas) -> dict[int, NamespaceTerms]:
    sizes: dict[int, int] = {}
    parts: dict[int, set[int]] = {}
    for replica, rank in replicas.connected():
        reader = replicas.reader(replica, rank)
        if reader is not None:
            number = namespace_id(reader.namespace.digest())
            sizes[number] = reader.namespace.tokens_per_block
            whole = {one.part for one in reader.part_requests if one.window is None}
            parts.setdefault(number, set()).update(whole)
    return {number: NamespaceTerms(sizes[number], frozenset(parts[number])) for number in sizes}


def _addresses(host: str, port: int) -> tuple[str, str]:
    """Return the addresses of events and of replays."""
    return endpoint(host, port), endpoint(host, port + 1)
