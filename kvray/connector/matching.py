"""What of a prompt can be promised now: the prefix that is leased for every rank, and sound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from kvray.arrival import Arrivals
from kvray.block import BlockKey
from kvray.connector.engine import Engine, release_leases
from kvray.connector.prefix import Prefix
from kvray.store import Arena, Held, Lease, Wanted, lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A leased prefix."""

    prefix: Prefix
    end: int
    """Where its sound blocks end."""
    arrivals: Arrivals = ()
    """How its blocks came to this node, as far as they were not here."""


def refuse(engine: Engine, keys: list[BlockKey], first: int) -> str | None:
    """Return why nothing of `keys` can be promised, whatever is stored; None if it can.

    Args:
        engine: the leader's.
        keys: of the prompt, as far as it may be promised.
        first: blocks that the engine has itself.
    """
    if not engine.args.block_reuse:
        return "reuse_disabled"
    if engine.link.arena is None:
        return "store_down"
    return "none" if len(keys) <= first else None


def match(
    engine: Engine,
    keys: list[BlockKey],
    first: int,
    *,
    sound: int = 0,
    away: Mapping[int, tuple[str, Lease]] | None = None,
) -> tuple[Matched | None, str]:
    """Lease the prefix of `keys` that is here.

    Args:
        engine: the leader's.
        keys: of the prompt, as far as it may be promised.
        first: blocks that the engine has itself; they are not checked.
        sound: blocks of another lease that is still held, which are not checked again.
        away: leases of ranks on other nodes; all others are here.

    Returns:
        What was leased, which the caller must release; and why what follows it is missing.
    """
    arena = engine.link.arena
    if arena is None:
        return None, "store_down"
    away = away or {}
    readers = [wanted for rank, wanted in enumerate(engine.wanted) if rank not in away]
    began_ns = perf_counter_ns()
    held = arena.lease_for(keys, readers)
    engine.timings.lease.observe(perf_counter_ns() - began_ns)
    if held is None:
        return None, "arena_busy"
    if not held.num_blocks:
        return None, "not_stored"
    end, start = held.num_blocks, max(first, sound)
    try:
        if end > start and engine.verifies_promises:
            end = start + _sound_run(engine, arena, held, readers, start)
    except BaseException:
        release_leases(engine, arena, *held.leases)
        raise
    prefix = Prefix(arena=arena, held=held, away=away)
    return Matched(prefix=prefix, end=end), "corrupt" if end < held.num_blocks else "not_stored"


def lease_exactly(engine: Engine, arena: Arena, keys: list[BlockKey]) -> Prefix | None:
    """Lease all of `keys` anew; None if they are not all here any more.

    A prefix of a leased prefix may need other blocks of a group with a window than were leased.
    """
    held = arena.lease_for(keys, engine.wanted)
    if held is not None and held.num_blocks < len(keys):
        release_leases(engine, arena, *held.leases)
        return None
    return None if held is None else Prefix(arena=arena, held=held)


def _sound_run(
    engine: Engine, arena: Arena, held: Held, readers: Sequence[Sequence[Wanted]], first: int
) -> int:
    """Return how many blocks from `first` on are sound in every part of every rank.

    Without its whole window a shorter prefix is of no use, so then it is all or nothing.
    """
    run = held.num_blocks - first
    for one, wanted in zip(held.leases, readers, strict=True):
        for block, places in lease.places(
            wanted, held.num_blocks, first=first, stop=held.num_blocks
        ):
            sound = arena.sound(one, places)
            if not sound.all():
                run = 0 if engine.has_windows else min(run, block - first + int(sound.argmin()))
    return run
