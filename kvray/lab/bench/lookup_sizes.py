"""What one lookup costs a second, and what a share of the keys costs, for tiers of many nodes.

`python -m kvray.lab.bench.lookup_sizes` measures a real lookup with some million entries, messages
pickled and unpickled, and multiplies. Ray's part of a call is not in it; see `lookup_scale`.
"""

import pickle
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvray.actors.lookup.lookup import CALLS_PER_S, Announcement, Lookup
from kvray.identity.block import KEY_BYTES

NODES = 10, 100, 300, 1_000, 3_000, 10_000
LOOKUPS = 1, 2, 4, 8
BLOCKS = 16_000
CHURN = 20
"""Blocks that come to each node in a second; as many leave it."""
_UNPACED, _ANNOUNCE_S = 20, 0.05
_BATCH = 16_000


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU seconds of a heartbeat, of a key announced in full and of one that changes; bytes."""

    call_s: float
    full_s: float
    change_s: float
    entry_bytes: float


@dataclass(frozen=True, slots=True)
class Size:
    """Calls a second, share of a core, bytes, and CPU seconds to be told everything again."""

    calls: float
    load: float
    num_bytes: float
    told_s: float


def measure(num_entries: int) -> Costs:
    """Fill a lookup with at least so many entries and take its CPU time."""
    lookup, made = Lookup(), random.Random(0)

    def announce(shard: str, sequence: int, added: bytes = b"", removed: bytes = b"") -> float:
        one = Announcement(
            shard=shard,
            arena_id="a",
            shard_epoch=1,
            sequence=sequence,
            full=sequence == 1,
            added_keys=added,
            added_parts=[0] * (len(added) // KEY_BYTES),
            removed_keys=removed,
            removed_parts=[0] * (len(removed) // KEY_BYTES),
        )
        began = time.process_time()
        received = pickle.loads(pickle.dumps(one))  # noqa: S301 - it is our own
        pickle.dumps(lookup.announce(received, now=0.0))
        return time.process_time() - began

    num_shards = -(-num_entries // _BATCH)
    fill_s = sum(
        announce(f"s{n}", 1, made.randbytes(_BATCH * KEY_BYTES)) for n in range(num_shards)
    )
    entry_bytes = lookup.index.num_bytes / (num_shards * _BATCH)
    call_s = sum(announce("s0", 2 + n) for n in range(1000)) / 1000
    keys = [made.randbytes(CHURN * KEY_BYTES) for _ in range(1001)]
    pairs = zip(keys[1:], keys, strict=False)
    changes_s = sum(announce("s0", 1002 + n, *pair) for n, pair in enumerate(pairs)) / 1000
    return Costs(
        call_s=call_s,
        full_s=fill_s / (num_shards * _BATCH),
        change_s=max(0.0, changes_s - call_s) / (2 * CHURN),
        entry_bytes=entry_bytes,
    )


def size(costs: Costs, num_nodes: int, num_lookups: int, blocks: int = BLOCKS) -> Size:
    """Return what one of the lookups costs: it has a share of the keys, and hears every shard."""
    calls = num_nodes / max(_ANNOUNCE_S, (num_nodes - _UNPACED) / CALLS_PER_S)
    num_entries = num_nodes * blocks / num_lookups
    changes = 2 * CHURN * num_nodes / num_lookups
    return Size(
        calls=calls,
        load=calls * costs.call_s + changes * costs.change_s,
        num_bytes=num_entries * costs.entry_bytes,
        told_s=num_entries * costs.full_s + 2 * num_nodes * costs.call_s,
    )


def rows(costs: Costs) -> Iterator[str]:
    """Yield a table's rows."""
    for num_lookups in LOOKUPS:
        for nodes in NODES:
            one = size(costs, nodes, num_lookups)
            yield (
                f"| {num_lookups} | {nodes:,} | {one.calls:.0f} | {one.load:.1%} |"
                f" {one.num_bytes / 1e9:.2f} GB | {one.told_s:.2f} s |"
            )


if __name__ == "__main__":
    measured = measure(4_000_000)
    print(measured, *rows(measured), sep="\n")
