"""A rank's half of a connector: copies promised blocks in, and computed blocks out.

The pool is written by the engine's executor thread alone, and only for requests of the metadata
of this pass. It is read by the saver's thread, fenced off as `saver` says.

A load goes from the slots that its lease names into the pages that the metadata names, and is
checked after its copies: its lease is still the promised one, its holder the one that took it, and
its blocks are the requested ones. Leased blocks cannot change, but the check does not trust that
the lease held all the while. On the host it runs before the pass, on a device after the copies,
before anything of their pass is returned or saved.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from kvray.engine.cache_layout import CacheLayout, Part, resliced_parts, sizes_read
from kvray.engine.device.gpu import Pool, open_pool
from kvray.engine.device.pool import Load, Ticket
from kvray.engine.meta import ConnectorMeta, LoadPlan
from kvray.engine.saver import Job, Saver
from kvray.engine.shared_state import SharedState
from kvray.errors import LayoutMismatch, LeaseExpired
from kvray.identity.block import split_keys
from kvray.store import Arena, Lease, Membership
from kvray.store.arena.lease import places
from kvray.store.arena.tables import Array
from kvray.trace.reasons import DropReason

_Planned = tuple[LoadPlan, Lease]
"""What is to be loaded, and this rank's lease of it."""


class _Begun(NamedTuple):
    arena: Arena
    lease: Lease
    holder: Membership  # who had the lease before the first copy
    slots: Array  # what is copied
    ticket: Ticket


class Loader:
    """Loads what was promised; why it cannot keep a promise is added to a list of errors."""

    def __init__(
        self,
        shared: SharedState,
        parts: Mapping[int, Sequence[Part]],
        pool: Pool,
        failed: list[Exception],
    ) -> None:
        """`parts`: what this rank reads, by the ranks that blocks are dealt to."""
        self._shared = shared
        self._parts = {
            stored_by: (each, [part.request for part in each]) for stored_by, each in parts.items()
        }
        self._pool = pool
        self._failed = failed
        self._begun: list[_Begun] = []

    def load(self, plans: Sequence[LoadPlan], stream: Any) -> None:
        """Begin to copy what was promised; `settle` ends it, on the host before this returns."""
        rank, alike = self._shared.args.part_rank, dict[tuple[str, int], list[_Planned]]()
        for plan in plans:
            arena_id, lease = plan.leased[rank]
            alike.setdefault((arena_id, plan.stored_by), []).append((plan, lease))
        for (arena_id, _), some in alike.items():
            self._load(arena_id, some, stream)
        if all(one.ticket.done() for one in self._begun):
            self.settle()  # on the host, before the pass

    def settle(self) -> None:
        """Wait for all copies that were begun, check them and end their leases.

        A pass waits for its copies itself, so this is hardly ever waited for.
        """
        verify = self._pool.is_host and self._shared.verifies_loads
        while self._begun:
            one = self._begun.pop()
            try:
                one.ticket.wait()
                one.arena.check(one.lease, one.slots, verify=verify, holder=one.holder)
            except Exception as error:  # noqa: BLE001 - a failed check is a failed load
                self._failed.append(error)
            finally:
                self._shared.release_leases(one.arena, one.lease)

    def close(self) -> None:
        """End the leases of what was begun; no pass will use it. Twice is fine."""
        for one in self._begun:
            self._shared.release_leases(one.arena, one.lease)
        self._begun = []

    def _load(self, arena_id: str, plans: Sequence[_Planned], stream: Any) -> None:
        arena = self._shared.link.arena_named(arena_id)
        if arena is None:
            setting = self._shared.args.spread_setting
            error = LeaseExpired(
                f"Arena {arena_id}, of which the leader promised blocks, was never attached here,"
                " or nothing is leased in it now. Ranks on one node must see one arena, and an"
                f" engine whose ranks are on several nodes needs {setting}."
            )
            self._failed.append(error)
            return
        ready = list[tuple[LoadPlan, Lease, Membership, list[Load]]]()
        for plan, lease in plans:
            try:
                holder, slots = arena.held_by(lease)
                ready.append((plan, lease, holder, list(self._loads_of(plan, slots))))
            except Exception as error:  # noqa: BLE001 - the others may be loaded all the same
                self._fail(arena, lease, error)
        if not ready:
            return
        try:
            ticket = self._pool.load(arena, [load for *_, each in ready for load in each], stream)
        except Exception as error:  # noqa: BLE001 - pages of any of them may have been written
            for _, lease, *_ in ready:
                self._fail(arena, lease, error)
            return
        for plan, lease, holder, each in ready:
            slots = np.concatenate([load.slots for load in each])
            self._begun.append(_Begun(arena, lease, holder, slots, ticket))
            self._shared.figures.totals["loaded_blocks"] += plan.pages[0].num_blocks

    def _fail(self, arena: Arena, lease: Lease, error: Exception) -> None:
        self._failed.append(error)
        self._shared.release_leases(arena, lease)

    def _loads_of(self, plan: LoadPlan, slots: Array) -> Iterator[Load]:
        """Yield what to copy of each part of the leased `slots`; behind a window is no page."""
        num_blocks = plan.leased_blocks
        parts, requests = self._parts[plan.stored_by]
        found = places(requests, num_blocks, first=plan.first, stop=num_blocks)
        for part, (block, at) in zip(parts, found, strict=True):
            pages = plan.pages[part.group].ids()[block - plan.first :]
            here = pages >= 0
            yield Load(part, slots[at][: len(pages)][here], pages[here])


_FLUSH_S = 1.0
"""For saves at the end; what the link takes after it is in `node.link`."""


class RankWorker:
    """Of one rank. With an error in `failed` the connector must not let the engine go on."""

    def __init__(self, shared: SharedState) -> None:
        """Take `shared`, which `close` gives back; touches no device."""
        self.shared = shared
        self.failed: list[Exception] = []
        """Errors of loads whose bytes are not, or may not be, what was promised."""
        self.pool: Pool | None = None
        self.saver: Saver | None = None
        self._loader: Loader | None = None
        self._parts: tuple[Part, ...] = ()
        self._attended: Arena | None = None
        self.started: ConnectorMeta | None = None
        self._fenced: ConnectorMeta | None = None
        self._saved: ConnectorMeta | None = None
        self._jobs: list[Job] = []
        self._saving: list[int] = []
        self._is_closed = False

    def register(self, layout: CacheLayout) -> None:
        """Take the rank's KV cache; raises as `RegisteredPool.register`."""
        shared = self.shared
        self.close_pool()
        shared.register(layout)
        self._parts = layout.parts(
            shared.args.part_rank,
            shared.args.num_parts_ranks,
            shared.args.tokens_per_block,
            ranks_per_node=shared.args.ranks_per_node,
        )
        args = shared.args
        parts = {args.num_parts_ranks: self._parts} | {
            other: resliced_parts(
                layout, args.part_rank, args.num_parts_ranks, other, args.tokens_per_block
            )
            for other in sizes_read(args, layout)[1:]
        }
        self.pool = open_pool(
            layout,
            list(chain(*parts.values())),
            has_hooks=not shared.args.is_compiled,
            totals=shared.figures.totals,
        )
        self.saver = Saver(
            shared.link,
            saves_max=shared.config.connector.saves_max,
            figures=shared.figures,
            boundary=shared.boundary,
            reads=shared.pending_reads,
        )
        self._loader = Loader(shared, parts, self.pool, self.failed)
        self._attended = None
        self._attend()

    def fence(self, meta: ConnectorMeta, stream: Any) -> None:
        """Have the pass of `meta` wait for copies of earlier ones that may meet its pages.

        `begin` does so, too; an engine whose pass may run before that calls this before. Once for
        each metadata, twice is fine.
        """
        if meta is self._fenced:
            return
        self._fenced = meta
        was_dropped = self.started is not None and self.started is not self._saved
        if self.pool is not None and self.saver is not None and (meta.is_fenced or was_dropped):
            self.saver.fence()
            self.pool.fence(stream)

    def begin(self, meta: ConnectorMeta, stream: Any) -> None:
        """Begin to copy what `meta` promises; what is saved of the pass is noted.

        Twice for one metadata is fine.
        """
        if meta is self.started:
            return
        self.fence(meta, stream)
        self.started, self._jobs = meta, []
        shared, pool, saver, loader = self.shared, self.pool, self.saver, self._loader
        for release in meta.releases:
            if release.rank == shared.args.part_rank:
                shared.release_at(release.arena_id, release.lease)
        if pool is None or saver is None or loader is None or not shared.may_load(meta):
            self._refuse(meta)
            return
        shared.follow(meta.replica)
        self._attend()
        loader.load(meta.loads, stream)
        if meta.saves and shared.identity.common:
            with shared.boundary.around("a save"):
                self._jobs = list(self._jobs_of(pool, meta))
                return
            self._drop(_num_saved(meta), DropReason.ERROR)
        elif meta.saves:
            self._drop(_num_saved(meta), DropReason.NO_POOL)

    def wait_for_layer(self, layer: int, stream: Any) -> None:
        """Have what follows on `stream` wait for the layer's loaded bytes."""
        if self.pool is not None:
            self.pool.wait_for_layer(layer, stream)

    def end(self, stream: Any) -> None:
        """Save the blocks that the pass filled; what can be read later is not waited for.

        Blocks in host memory are read before this returns: the engine may free those of a
        cancelled request right after, and tells nobody. On a device whatever writes them later
        waits, but for the copies of partly reused blocks, which go by a stream of the engine's.
        If what the pass loaded may be wrong, nothing of it is saved.
        """
        meta, pool, saver, loader = self.started, self.pool, self.saver, self._loader
        if meta is None or meta is self._saved:
            return
        self._saved = meta
        if pool is None or saver is None or loader is None:
            return
        mark = None
        try:
            mark = pool.mark(stream)
        except Exception as error:  # noqa: BLE001 - a layer did not wait, or the device failed
            self.failed.append(error)
        loader.settle()
        if self.failed:
            self._drop(sum(len(job.keys) for job in self._jobs), DropReason.VOID)
            return
        with self.shared.boundary.around("a save"):
            for job in self._jobs:
                saver.submit(replace(job, mark=mark))
        if self._jobs and pool.is_host:
            saver.fence()
        elif self._jobs and self.shared.args.partial_reuse:
            saver.drain()

    def read_ended(self, finished: list[int]) -> list[int]:
        """Return the requests, of these and of earlier ones, whose blocks are read no more.

        Each id is returned once. Takes no lock and makes no call, but for the loads of a pass that
        was dropped.
        """
        if self._loader is not None:
            self._loader.settle()
        self._saving += finished
        ended = [one for one in self._saving if not self.shared.is_being_read(one)]
        if ended:
            self._saving = [one for one in self._saving if one not in ended]
        return ended

    def close(self) -> None:
        """Flush saves for a bounded time and let go of the tier. Twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        self.close_pool()
        self.shared.unregister()
        self.shared.close()

    def close_pool(self) -> None:
        """Flush saves and let go of the engine's memory. Twice is fine."""
        if self._loader is not None:
            self._loader.close()
        if self.saver is not None:
            self.saver.close(_FLUSH_S)
            self.saver = self._loader = None
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def _attend(self) -> None:
        arena, pool = self.shared.link.arena, self.pool
        if arena is not None and arena is not self._attended and pool is not None:
            with self.shared.boundary.around("the arena's registration"):
                pool.attend(arena)
            self._attended = arena

    def _drop(self, num_blocks: int, reason: DropReason) -> None:
        self.shared.figures.drop(num_blocks, reason)

    def _refuse(self, meta: ConnectorMeta) -> None:
        """Release what was promised for a pool that is not this rank's."""
        self._drop(_num_saved(meta), DropReason.NO_POOL)
        error = LayoutMismatch(
            "The leader promised blocks of another namespace than this rank's pool; give every"
            " rank the same engine arguments."
        )
        for plan in meta.loads:
            self.shared.release_at(*plan.leased[self.shared.args.part_rank])
            self.failed.append(error)

    def _jobs_of(self, pool: Pool, meta: ConnectorMeta) -> Iterator[Job]:
        """Yield a job for each run of blocks of each part that this rank stores."""
        stored = [part for part in self._parts if part.is_stored_here]
        for plan in meta.saves if stored else ():
            keys = split_keys(plan.keys)
            before = len(keys) - plan.pages[0].num_blocks
            for part in stored:
                pages = plan.pages[part.group].ids()
                for start, stop in _runs(pages >= 0):
                    at = start + before
                    yield Job(
                        request_id=plan.request_id,
                        pool=pool,
                        part=part,
                        keys=keys[at : stop + before],
                        parent=keys[at - 1] if at else None,
                        depth=plan.depth + start,
                        pages=pages[start:stop],
                        priorities=plan.priorities[start:stop],
                        counts_for=plan.tenant_id or meta.number,
                    )


def _num_saved(meta: ConnectorMeta) -> int:
    return sum(plan.pages[0].num_blocks for plan in meta.saves if plan.pages)


def _runs(here: Any) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], here, [False])).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
