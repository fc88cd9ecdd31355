"""Loads of one rank: from the slots that its leases name into the pages that the metadata names.

Each load is checked after its copies: its lease is still the promised one, its holder the one that
took it, and its blocks are the requested ones. Leased blocks cannot change, but the check does not
trust that the lease held all the while. On the host it runs before the pass, on a device after the
copies, before anything of their pass is returned or saved.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvray.engine.device.gpu import Pool
from kvray.engine.device.pool import Load, Ticket
from kvray.engine.meta import LoadPlan
from kvray.engine.model.cache_layout import Part
from kvray.engine.shared_state import SharedState
from kvray.errors import LeaseExpired
from kvray.store import Arena, Lease, Membership
from kvray.store.arena.lease import places
from kvray.store.arena.tables import Array

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
            arena_id, lease = plan.leased.of(rank)
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
