"""What of a prompt can be promised now: the prefix that is leased for every rank, and sound."""

from dataclasses import dataclass

import numpy as np

from kvray.block import BlockKey
from kvray.connector.engine import Engine, release_leases
from kvray.store import Arena, Held, Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A leased prefix."""

    arena: Arena
    held: Held
    end: int
    """Where its sound blocks end."""


def match(
    engine: Engine, keys: list[BlockKey], first: int, *, sound: int = 0
) -> tuple[Matched | None, str]:
    """Lease the prefix of `keys` that is here, if it is longer than its first `first` blocks.

    Args:
        engine: the leader's.
        keys: of the prompt, as far as it may be promised.
        first: blocks that the engine has itself.
        sound: blocks of another lease that is still held, which are not checked again.

    Returns:
        What was leased, which the caller must release; and why what follows it is missing.
    """
    if not engine.args.block_reuse:
        return None, "reuse_disabled"
    arena = engine.link.arena
    if arena is None:
        return None, "store_down"
    if len(keys) <= first:
        return None, "none"
    held = arena.lease_for(keys, engine.wanted)
    if held is None:
        return None, "arena_busy"
    if not held.num_blocks:
        return None, "not_stored"
    end, start = held.num_blocks, max(first, sound)
    try:
        if end > start and engine.verifies_promises:
            end = start + _sound_run(engine, arena, held, start)
    except BaseException:
        release_leases(engine, arena, *held.leases)
        raise
    return Matched(arena=arena, held=held, end=end), (
        "corrupt" if end < held.num_blocks else "not_stored"
    )


def lease_exactly(engine: Engine, arena: Arena, keys: list[BlockKey]) -> Held | None:
    """Lease all of `keys` anew; None if they are not all here any more.

    A prefix of a leased prefix may need other blocks of a group with a window than were leased.
    """
    held = arena.lease_for(keys, engine.wanted)
    if held is not None and held.num_blocks < len(keys):
        release_leases(engine, arena, *held.leases)
        return None
    return held


def places_of(
    wanted: list[Wanted], num_blocks: int, first: int
) -> "list[tuple[Wanted, int, np.ndarray[tuple[int], np.dtype[np.int64]]]]":
    """Return where a lease has the blocks from `first` on, part by part.

    Args:
        wanted: the parts of one rank, as it leased them.
        num_blocks: blocks of the prefix that is leased.
        first: the first block that is asked for.

    Returns:
        For each part (itself, the block that its first place has, its places in the lease).
    """
    found, start = [], 0
    for one in wanted:
        length = num_blocks if one.window is None else min(num_blocks, one.window)
        skipped = max(0, first - (num_blocks - length))
        found.append(
            (one, num_blocks - length + skipped, np.arange(start + skipped, start + length))
        )
        start += length
    return found


def _sound_run(engine: Engine, arena: Arena, held: Held, first: int) -> int:
    """Return how many blocks from `first` on are sound in every part of every rank.

    Without its whole window a shorter prefix is of no use, so then it is all or nothing.
    """
    run = held.num_blocks - first
    for lease, wanted in zip(held.leases, engine.wanted, strict=True):
        for one, block, places in places_of(wanted, held.num_blocks, first):
            sound = arena.sound(lease, places)
            if not sound.all():
                run = min(run, block - first + int(sound.argmin()) if one.window is None else 0)
                run = 0 if engine.has_windows else run
    return run
