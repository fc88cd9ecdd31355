"""What pins keep of an arena: from the front, within shares, a common beginning once."""

import time

from kvray.actors.shard.pinning.choice import kept_by, slots_of
from kvray.actors.shard.pinning.pin import Pin
from kvray.identity.block import BlockKey
from tests.unit.store.small_arena import SLOT, chain, make_tables, put

ALL = {"bytes_max": 64 * SLOT, "owner_bytes_max": 64 * SLOT}


def pin(keys: list[BlockKey], owner: str = "x", num_parts: int = 1) -> Pin:
    now = time.time()
    return Pin(
        name=owner,
        owner=owner,
        made_at=now,
        until=now + 9.0,
        num_tokens=1,
        block_bytes=SLOT,
        num_parts=num_parts,
        keys=b"".join(keys),
    )


def test_the_common_beginning_of_two_pins_counts_once() -> None:
    tables, keys = make_tables(), chain(6)
    put(tables, keys)
    pins = [pin(keys[:4]), pin(keys)]
    kept = kept_by(tables, pins, bytes_max=6 * SLOT, owner_bytes_max=6 * SLOT)
    assert [one.num_blocks for one in kept] == [4, 6]
    assert len(slots_of(kept)) == 6


def test_all_shares_together_and_that_of_each_owner_are_kept() -> None:
    tables = make_tables()
    chains = [chain(5, seed=str(at)) for at in range(3)]
    for keys in chains:
        put(tables, keys)
    pins = [pin(keys, owner) for keys, owner in zip(chains, "xyz", strict=True)]
    kept = kept_by(tables, pins, bytes_max=9 * SLOT, owner_bytes_max=4 * SLOT)
    assert [one.num_blocks for one in kept] == [4, 4, 1]


def test_all_parts_of_a_block_are_kept_before_those_of_the_next() -> None:
    tables, keys = make_tables(), chain(3)
    for part in (0, 2):
        put(tables, keys, part=part)
    (kept,) = kept_by(tables, [pin(keys, num_parts=3)], bytes_max=5 * SLOT, owner_bytes_max=9**9)
    assert kept.num_blocks == 3
    assert tables.slot_part[kept.slots].tolist() == [0, 2, 0, 2, 0]
    (kept,) = kept_by(tables, [pin(chain(3, seed="not here"))], **ALL)
    assert (kept.num_blocks, len(kept.slots)) == (0, 0)
