"""Ends leases that are no longer needed, wherever their ranks are; raises nothing."""

from collections.abc import Mapping

from kvray.connector.leased_prefix import LeasedPrefix
from kvray.connector.meta import Release
from kvray.connector.shared_state import SharedState
from kvray.store import Arena, Lease


def release_leases(shared: SharedState, arena: Arena, *leases: Lease) -> None:
    """End `leases` now, or from the link's thread if the arena is busy."""
    with shared.boundary.around("a release"):
        if not arena.release(*leases):
            shared.link.defer(arena, lambda held: held.release(*leases))


def release_prefix(shared: SharedState, prefix: LeasedPrefix | None) -> None:
    """End all leases of a prefix, if there is one."""
    if prefix is not None:
        release_leases(shared, prefix.arena, *prefix.held.leases)
        release_away(shared, prefix.away)


def release_away(shared: SharedState, away: Mapping[int, tuple[str, Lease]]) -> None:
    """Have ranks on other nodes end the leases that were taken in their names."""
    shared.to_release += [Release(rank, *place) for rank, place in away.items()]


def release_at(shared: SharedState, arena_id: str, lease: Lease) -> None:
    """End a lease of this rank; one in an arena that is gone has gone with it."""
    arena = shared.link.arena_named(arena_id)
    if arena is not None:
        release_leases(shared, arena, lease)
