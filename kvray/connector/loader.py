"""Loads of one rank: from the slots that its leases name into the pages that the metadata names."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvray.connector.cache_layout import Part
from kvray.connector.engine import Engine, release_leases
from kvray.connector.meta import LoadPlan
from kvray.connector.parking import Parking
from kvray.connector.pool import Load, Pool
from kvray.connector.saver import Saver
from kvray.errors import LeaseExpired
from kvray.store import Arena, Lease
from kvray.store.lease import places


class Loader:
    """Keeps what was promised; whatever cannot be kept is raised, and ends the engine."""

    def __init__(
        self, engine: Engine, parts: Sequence[Part], pool: Pool, saver: Saver, parking: Parking
    ) -> None:
        """Load `parts` into `pool`; `saver` ends the leases behind copies that take longer."""
        self._engine = engine
        self._parts = parts
        self._wanted = engine.wanted[engine.part_rank]
        self._pool = pool
        self._saver = saver
        self._parking = parking

    def load(self, plans: Sequence[LoadPlan], stream: Any) -> None:
        """Begin to copy all that was promised; each lease ends behind its copies.

        Raises:
            CorruptBlock, LayoutMismatch, LeaseExpired: it cannot be kept.
        """
        left = list(plans)
        try:
            for arena_id in dict.fromkeys(self._place(plan)[0] for plan in plans):
                self._load(arena_id, [one for one in plans if self._is_in(one, arena_id)], stream)
                left = [one for one in left if not self._is_in(one, arena_id)]
        except BaseException:
            release_plans(self._engine, left)
            raise

    def _load(self, arena_id: str, plans: Sequence[LoadPlan], stream: Any) -> None:
        engine = self._engine
        arena = engine.link.arena_named(arena_id)
        if arena is None:
            raise LeaseExpired(
                f"Arena {arena_id}, of which the leader promised blocks, is not attached here;"
                " ranks on one node must see one arena, and an engine whose ranks are on several"
                " nodes needs gpus_per_node."
            )
        loads = {plan.request_id: list(self._loads_of(arena, plan)) for plan in plans}
        flat = [load for each in loads.values() for load in each]
        ticket = self._pool.load(arena, flat, stream)
        for plan in plans:
            if self._pool.is_host:
                self._check(arena, plan, loads[plan.request_id], verify=engine.verifies_loads)
            engine.totals["loaded_blocks"] += _count(plan)
        leases = [self._place(plan)[1] for plan in plans]
        self._saver.finish(ticket, partial(release_leases, engine, arena, *leases))

    def _loads_of(self, arena: Arena, plan: LoadPlan) -> Iterator[Load]:
        """Yield what to copy of each part; blocks behind a window have no page."""
        slots = arena.leased_slots(self._place(plan)[1])
        num_blocks = plan.leased_blocks
        found = places(self._wanted, num_blocks, first=plan.first, stop=num_blocks)
        loads = []
        for part, (block, at) in zip(self._parts, found, strict=True):
            pages = plan.pages[part.group].ids()[block - plan.first :]
            here = pages >= 0
            loads.append(Load(part, slots[at][: len(pages)][here], pages[here]))
        is_checked = self._parking.is_checked(plan.request_id)
        if self._engine.verifies_loads and self._engine.loads_later and not is_checked:
            self._check(arena, plan, loads, verify=True)
        yield from loads

    def _check(self, arena: Arena, plan: LoadPlan, loads: list[Load], *, verify: bool) -> None:
        chosen = np.concatenate([load.slots for load in loads])
        arena.check(self._place(plan)[1], chosen, verify=verify)

    def _place(self, plan: LoadPlan) -> tuple[str, Lease]:
        return plan.leased.of(self._engine.part_rank)

    def _is_in(self, plan: LoadPlan, arena_id: str) -> bool:
        return self._place(plan)[0] == arena_id


def release_plans(engine: Engine, plans: Sequence[LoadPlan]) -> None:
    """End this rank's leases of loads that will not be made."""
    for plan in plans:
        release_at(engine, *plan.leased.of(engine.part_rank))


def release_at(engine: Engine, arena_id: str, lease: Lease) -> None:
    """End a lease of this rank; one in an arena that is gone has gone with it."""
    arena = engine.link.arena_named(arena_id)
    if arena is not None:
        release_leases(engine, arena, lease)


def _count(plan: LoadPlan) -> int:
    return len(plan.pages[0].packed) // 4
