"""A rank's half of a connector: copies promised blocks in, and computed blocks out.

The pool is written by the engine's executor thread alone, and only for requests of the metadata
of this pass. It is read by the saver's thread, fenced off as `saver` says.

A load goes from the slots that its lease names into the pages that the metadata names, and is
checked after its copies: its lease is still the promised one, its holder the one that took it, and
its blocks are the requested ones. Leased blocks cannot change, but the check does not trust that
the lease held all the while. On the host it runs before the pass, on a device after the copies,
before anything of their pass is returned or saved.
"""

from collections.abc import Iterator, Sequence
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
from kvray.store.arena.payload import runs
from kvray.store.arena.tables import Array
from kvray.trace.reasons import DropReason

_FLUSH_S = 1.0
"""For saves at the end; what the link takes after it is in `node.link`."""


class _Loading(NamedTuple):
    """A load of one request; its lease ends with it."""

    arena: Arena
    lease: Lease
    holder: Membership  # who had the lease before the first copy
    loads: list[Load]
    num_blocks: int


class RankWorker:
    """Of one rank. With an error in `failed` the connector must not let the engine go on."""

    def __init__(self, shared: SharedState) -> None:
        """Take `shared`, which `close` gives back; touches no device."""
        self.shared = shared
        self.failed: list[Exception] = []
        """Errors of loads whose bytes are not, or may not be, what was promised."""
        self.pool: Pool | None = None
        self.saver: Saver | None = None
        self._parts: dict[int, Sequence[Part]] = {}
        """What this rank reads, by the ranks that blocks are dealt to."""
        self._loading: list[tuple[_Loading, Ticket]] = []
        self._attended: Arena | None = None
        self.started: ConnectorMeta | None = None
        self._fenced: ConnectorMeta | None = None
        self._saved: ConnectorMeta | None = None
        self._jobs: list[Job] = []
        self._saving: list[int] = []
        self._is_closed = False

    def register(self, layout: CacheLayout) -> None:
        """Take the rank's KV cache; raises as `SharedState.register`."""
        shared, args = self.shared, self.shared.args
        rank, num_ranks, size = args.part_rank, args.num_parts_ranks, args.tokens_per_block
        self.close_pool()
        shared.register(layout)
        self._parts = {
            stored_by: resliced_parts(layout, rank, num_ranks, stored_by, size)
            for stored_by in sizes_read(args, layout)
        }
        self._parts[num_ranks] = layout.parts(
            rank, num_ranks, size, ranks_per_node=args.ranks_per_node
        )
        self.pool = open_pool(
            layout,
            list(chain(*self._parts.values())),
            has_hooks=not args.is_compiled,
            totals=shared.figures.totals,
        )
        self.saver = Saver(shared)
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
        # Nobody waits for the loads of a pass that was dropped, and its pages get other owners.
        was_dropped = self.started is not None and self.started is not self._saved
        if self.pool is not None and self.saver is not None and (meta.is_fenced or was_dropped):
            self.saver.fence()
            self.pool.fence(stream)
            if self.shared.args.refills_inputs:
                self.pool.settle()

    def begin(self, meta: ConnectorMeta, stream: Any) -> None:
        """Begin to copy what `meta` promises; what is saved of the pass is noted.

        Twice for one metadata is fine.
        """
        if meta is self.started:
            return
        self.fence(meta, stream)
        self.started, self._jobs = meta, []
        shared, pool = self.shared, self.pool
        # First, whatever fails below: nobody else will end these leases.
        for release in meta.releases:
            if release.rank == shared.args.part_rank:
                shared.release_at(release.arena_id, release.lease)
        if pool is None or not shared.may_load(meta):
            self._refuse(meta)
            return
        shared.follow(meta.replica)
        self._attend()
        self._load(meta.loads, pool, stream)
        if shared.args.refills_inputs and shared.args.is_compiled:
            self._settle()  # else the stream would wait here, and not in the layers' hooks
        if meta.saves and shared.identity.common:
            with shared.boundary.around("a save"):
                self._jobs = list(self._jobs_of(pool, meta))
                return
            shared.figures.drop(_num_saved(meta), DropReason.ERROR)
        elif meta.saves:
            shared.figures.drop(_num_saved(meta), DropReason.NO_POOL)

    def wait_for_layer(self, layer: int, stream: Any) -> None:
        """Have what follows on `stream` wait for the layer's loaded bytes."""
        if self.pool is not None:
            self.pool.wait_for_layer(layer, stream)

    def end(self, stream: Any) -> None:
        """Save the blocks that the pass filled; what can be read later is not waited for.

        Blocks in host memory are read before this returns: the engine may free those of a
        cancelled request right after, and tells nobody. On a device whatever writes them later
        waits, unless it goes by another stream of the engine's.
        If what the pass loaded may be wrong, nothing of it is saved.
        """
        meta, pool, saver = self.started, self.pool, self.saver
        if meta is None or meta is self._saved:
            return
        self._saved = meta
        if pool is None or saver is None:
            return
        mark = None
        try:
            mark = pool.mark(stream)
        except Exception as error:  # noqa: BLE001 - a layer did not wait, or the device failed
            self.failed.append(error)
        self._settle()
        if self.failed:
            self.shared.figures.drop(sum(len(job.keys) for job in self._jobs), DropReason.VOID)
            return
        self.shared.num_passes += 1
        with self.shared.boundary.around("a save"):
            for job in self._jobs:
                saver.submit(replace(job, mark=mark))
        if self._jobs and (pool.is_host or self.shared.args.has_writes_aside):
            saver.fence()  # a copy on the host is made when it is begun
            pool.settle()

    def read_ended(self, finished: list[int]) -> list[int]:
        """Return the requests, of these and of earlier ones, whose blocks are read no more.

        Each id is returned once. Takes no lock and makes no call, but for the loads of a pass that
        was dropped.
        """
        self._settle()
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
        for one, _ in self._loading:  # no pass will use it
            self.shared.release_leases(one.arena, one.lease)
        self._loading = []
        if self.saver is not None:
            self.saver.close(_FLUSH_S)
            self.saver = None
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def _load(self, plans: Sequence[LoadPlan], pool: Pool, stream: Any) -> None:
        """Begin to copy what was promised; on the host it has ended when this returns."""
        shared = self.shared
        alike = dict[tuple[str, int], list[_Loading]]()
        for plan in plans:
            arena_id, lease = plan.leased[shared.args.part_rank]
            arena = shared.link.arena_named(arena_id)
            if arena is None:
                error = LeaseExpired(
                    f"Arena {arena_id}, of which the leader promised blocks, was never attached"
                    " here, or nothing is leased in it now. Ranks on one node must see one arena,"
                    f" and an engine whose ranks are on several nodes needs"
                    f" {shared.args.spread_setting}."
                )
                self.failed.append(error)
                continue
            try:
                holder, slots = arena.held_by(lease)
                loads = list(self._loads_of(plan, slots))
            except Exception as error:  # noqa: BLE001 - the others may be loaded all the same
                self._fail(arena, lease, error)
                continue
            one = _Loading(arena, lease, holder, loads, plan.pages[0].num_blocks)
            alike.setdefault((arena_id, plan.stored_by), []).append(one)
        for some in alike.values():
            try:
                loads = [load for one in some for load in one.loads]
                ticket = pool.load(some[0].arena, loads, stream)
            except Exception as error:  # noqa: BLE001 - pages of any of them may have been written
                for one in some:
                    self._fail(one.arena, one.lease, error)
                continue
            for one in some:
                self._loading.append((one, ticket))
                shared.figures.totals["loaded_blocks"] += one.num_blocks
        if all(ticket.done() for _, ticket in self._loading):
            self._settle()  # on the host, before the pass

    def _loads_of(self, plan: LoadPlan, slots: Array) -> Iterator[Load]:
        """Yield what to copy of each part of the leased `slots`; behind a window is no page."""
        num_blocks, parts = plan.leased_blocks, self._parts[plan.stored_by]
        requests = [part.request for part in parts]
        found = places(requests, num_blocks, first=plan.first, stop=num_blocks)
        for part, (block, at) in zip(parts, found, strict=True):
            pages = plan.pages[part.group].ids()[block - plan.first :]
            here = pages >= 0
            yield Load(part, slots[at][: len(pages)][here], pages[here])

    def _settle(self) -> None:
        """Wait for all copies that were begun, check them and end their leases.

        A pass waits for its copies itself, so this is hardly ever waited for.
        """
        while self._loading:
            one, ticket = self._loading.pop()
            try:
                ticket.wait()
                slots = np.concatenate([load.slots for load in one.loads])
                verify = self.shared.identity.is_host and self.shared.verifies_loads
                one.arena.check(one.lease, slots, verify=verify, holder=one.holder)
            except Exception as error:  # noqa: BLE001 - a failed check is a failed load
                self.failed.append(error)
            finally:
                self.shared.release_leases(one.arena, one.lease)

    def _fail(self, arena: Arena, lease: Lease, error: Exception) -> None:
        self.failed.append(error)
        self.shared.release_leases(arena, lease)

    def _attend(self) -> None:
        arena, pool = self.shared.link.arena, self.pool
        if arena is not None and arena is not self._attended and pool is not None:
            with self.shared.boundary.around("the arena's registration"):
                pool.attend(arena)
            self._attended = arena

    def _refuse(self, meta: ConnectorMeta) -> None:
        """Release what was promised for a pool that is not this rank's."""
        self.shared.figures.drop(_num_saved(meta), DropReason.NO_POOL)
        error = LayoutMismatch(
            "The leader promised blocks of another namespace than this rank's pool; give every"
            " rank the same engine arguments."
        )
        # The engine counts on these blocks, so it must not go on; without loads it may.
        for plan in meta.loads:
            self.shared.release_at(*plan.leased[self.shared.args.part_rank])
            self.failed.append(error)

    def _jobs_of(self, pool: Pool, meta: ConnectorMeta) -> Iterator[Job]:
        """Yield a job for each run of blocks of each part that this rank stores."""
        own = self._parts[self.shared.args.num_parts_ranks]
        stored = [part for part in own if part.is_stored_here]
        for plan in meta.saves if stored else ():
            keys = split_keys(plan.keys)
            before = len(keys) - plan.pages[0].num_blocks
            for part in stored:
                pages = plan.pages[part.group].ids()
                here = pages >= 0
                for start, stop in runs(np.diff(here), len(here)):
                    if not here[start]:
                        continue
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
