"""Leases the prefix of a prompt that is here for every rank, and sound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter_ns

from kvray.engine.promise import LeasedPrefix
from kvray.engine.reading import Reading
from kvray.engine.shared_state import SharedState
from kvray.identity.block import BlockKey
from kvray.store import Arena, Held, Lease, PartRequest
from kvray.store.arena import lease
from kvray.trace.arrival import Arrivals
from kvray.trace.reasons import MissReason

_COUNTED_ON_S = 1.0
"""Longest try for the lock where the alternative is the engine's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A leased prefix."""

    prefix: LeasedPrefix
    end: int  # where its sound blocks end
    arrivals: Arrivals = ()
    """How its blocks came to this node, as far as they were not here."""


def match(
    shared: SharedState,
    reading: Reading,
    keys: list[BlockKey],
    first: int,
    *,
    sound: int = 0,
    away: Mapping[int, tuple[str, Lease]] | None = None,
) -> tuple[Matched | None, MissReason]:
    """Lease the prefix of `keys` that is here; return it, and why what follows is missing.

    Blocks before `first` are the engine's own, those before `sound` in another lease that is still
    held; neither are checked. `away` has the leases of ranks on other nodes.
    """
    arena = shared.link.arena
    if arena is None:
        return None, "store_down"
    away = away or {}
    readers = [parts for rank, parts in enumerate(reading.part_requests) if rank not in away]
    began_ns = perf_counter_ns()
    held = arena.lease_for(keys, readers)
    shared.figures.lease_times.observe(perf_counter_ns() - began_ns)
    if held is None:
        return None, "arena_busy"
    if not held.num_blocks:
        return None, "not_stored"
    end, start = held.num_blocks, max(first, sound)
    try:
        if end > start and shared.verifies_promises:
            end = start + _sound_run(shared, arena, held, readers, start)
    except BaseException:
        shared.release_leases(arena, *held.leases)
        raise
    prefix = LeasedPrefix(arena=arena, held=held, stored_by=reading.stored_by, away=away)
    return Matched(prefix=prefix, end=end), "corrupt" if end < held.num_blocks else "not_stored"


def lease_exactly(shared: SharedState, arena: Arena, keys: list[BlockKey]) -> LeasedPrefix | None:
    """Lease all of `keys`, the engine's own, again; None if they are not all here any more.

    A prefix of a leased prefix may need other blocks of a group with a window than were leased. The
    engine counts on them, so a busy arena is tried for longer than for a promise.
    """
    deadline, held, own = monotonic() + _COUNTED_ON_S, None, shared.pool.own
    while held is None and monotonic() < deadline:
        held = arena.lease_for(keys, own.part_requests, is_counted_on=True)
    if held is not None and held.num_blocks < len(keys):
        shared.release_leases(arena, *held.leases)
        return None
    if held is None:
        return None
    return LeasedPrefix(arena=arena, held=held, stored_by=own.stored_by)


def _sound_run(
    shared: SharedState,
    arena: Arena,
    held: Held,
    readers: Sequence[Sequence[PartRequest]],
    first: int,
) -> int:
    """Return how many blocks from `first` on are sound in every part of every rank.

    Without its whole window a shorter prefix is of no use, so then it is all or nothing.
    """
    run, seen = held.num_blocks - first, set[PartRequest]()
    for one, slots, requests in zip(held.leases, held.slots, readers, strict=True):
        found = lease.places(requests, held.num_blocks, first=first, stop=held.num_blocks)
        for request, (block, places) in zip(requests, found, strict=True):
            if request in seen:
                continue  # several ranks read the same slots
            seen.add(request)
            sound = arena.sound(one, places, slots_known=slots)
            if 0 in sound.tobytes():
                end = block - first + int(sound.argmin())
                run = 0 if shared.pool.has_windows else min(run, end)
    return run
