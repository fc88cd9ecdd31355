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


class _Begun(NamedTuple):
    plan: LoadPlan
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
        alike: dict[tuple[str, int], list[LoadPlan]] = {}
        for plan in plans:
            alike.setdefault((self._place(plan)[0], plan.stored_by), []).append(plan)
        for (arena_id, _), some in alike.items():
            self._load(arena_id, some, stream)
        if all(one.ticket.done() for one in self._begun):
            self.settle()  # on the host, before the pass

    def settle(self) -> None:
        """Wait for all copies that were begun, check them and end their leases.

        A pass waits for its copies itself, so this is hardly ever waited for.
        """
        while self._begun:
            one = self._begun.pop()
            try:
                one.ticket.wait()
                self._check(one)
            except Exception as error:  # noqa: BLE001 - a failed check is a failed load
                self._failed.append(error)
            finally:
                self._shared.release_leases(one.arena, one.lease)

    def close(self) -> None:
        """End the leases of what was begun; no pass will use it. Twice is fine."""
        for one in self._begun:
            self._shared.release_leases(one.arena, one.lease)
        self._begun = []

    def _load(self, arena_id: str, plans: Sequence[LoadPlan], stream: Any) -> None:
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
        ready = list[tuple[LoadPlan, Membership, list[Load]]]()
        for plan in plans:
            try:
                holder = arena.holder_of(self._place(plan)[1])
                ready.append((plan, holder, list(self._loads_of(arena, plan))))
            except Exception as error:  # noqa: BLE001 - the others may be loaded all the same
                self._fail(arena, plan, error)
        if not ready:
            return
        try:
            ticket = self._pool.load(arena, [load for *_, each in ready for load in each], stream)
        except Exception as error:  # noqa: BLE001 - pages of any of them may have been written
            for plan, *_ in ready:
                self._fail(arena, plan, error)
            return
        for plan, holder, each in ready:
            lease = self._place(plan)[1]
            self._begun.append(_Begun(plan, arena, lease, holder, _slots_of(each), ticket))
            self._shared.figures.totals["loaded_blocks"] += plan.pages[0].num_blocks

    def _fail(self, arena: Arena, plan: LoadPlan, error: Exception) -> None:
        self._failed.append(error)
        self._shared.release_leases(arena, self._place(plan)[1])

    def _check(self, one: _Begun) -> None:
        """Check the bytes that were copied; CorruptBlock, LeaseExpired: they may be wrong."""
        if one.arena.holder_of(one.lease) != one.holder:
            raise LeaseExpired(
                f"The holder of lease {one.lease.lease_id} changed while its blocks were copied for"
                f" request {one.plan.request_id}; they may be wrong, so the engine must not go on."
            )
        verify = self._pool.is_host and self._shared.verifies_loads
        one.arena.check(one.lease, one.slots, verify=verify)

    def _loads_of(self, arena: Arena, plan: LoadPlan) -> Iterator[Load]:
        """Yield what to copy of each part; blocks behind a window have no page."""
        slots = arena.leased_slots(self._place(plan)[1])
        num_blocks = plan.leased_blocks
        parts, requests = self._parts[plan.stored_by]
        found = places(requests, num_blocks, first=plan.first, stop=num_blocks)
        for part, (block, at) in zip(parts, found, strict=True):
            pages = plan.pages[part.group].ids()[block - plan.first :]
            here = pages >= 0
            yield Load(part, slots[at][: len(pages)][here], pages[here])

    def _place(self, plan: LoadPlan) -> tuple[str, Lease]:
        return plan.leased.of(self._shared.args.part_rank)


def _slots_of(loads: Sequence[Load]) -> Array:
    return np.concatenate([load.slots for load in loads])
