"""A program that asks for one prefix again and again on a node whose arena is full.

Beside that prefix, which one node has at first, it asks as often for one that only its own node
has. Meanwhile it stores prompts of its own, and asks for those of the next node, whose copies fill
the arena. It prints, as JSON, [seconds since the begin, seconds, blocks found] of each request.
"""

import contextlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvray.identity.block import BlockKey
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena
from tests.unit.actors.small_shard import NAMESPACE
from tests.unit.store.small_arena import PATIENT_S, chain, store

BLOCK = 64 * 2**10
LENGTH, OTHER = 64, 16
NUM_NODES = 3
CYCLE_S = 0.02
OTHERS_EVERY = 12
"""Cycles between two prompts of the other traffic."""
NAMESPACE_OF_ALL = replace(NAMESPACE, part_bytes=BLOCK)


class Node:
    """An engine at one node, without a model."""

    def __init__(self, directory: Path, number: int) -> None:
        self.arena = Arena(directory, lock_wait_s=PATIENT_S)
        self.arena.join("hammering")
        self.socket = ShardSocket(directory)
        self.about = {"replica": f"r{number}", "rank": 0}
        registration = {"namespace": NAMESPACE_OF_ALL.to_wire(), "wanted": [[0, None]]}
        self.socket.call("register", timeout_s=5, **self.about, **registration)
        self.pool = np.zeros((LENGTH, BLOCK), dtype=np.uint8)

    def ask(self, keys: list[BlockKey], *, is_read: bool = True) -> int:
        """Read a prefix as an engine does; return how many blocks were there in time."""
        leases = self.arena.lease(keys) or []
        if not leases or leases[0].num_slots < len(keys):
            request = {"keys": b"".join(keys), "wait_s": 2.0, "tokens_per_s": 0}
            self.socket.call("stage", timeout_s=5, **self.about, **request)
            self.arena.release(*leases)
            leases = self.arena.lease(keys) or []
        if not leases:
            return 0
        found = leases[0].num_slots
        if is_read:
            self.arena.read(leases[0], self.pool, np.arange(found), verify=False)
        self.arena.release(*leases)
        return found

    def close(self) -> None:
        self.socket.close()
        self.arena.close()


def main(directory: Path, number: int, begin_at: float, seconds: float) -> None:
    """Ask for `seconds` from `begin_at` on, in seconds since 1970."""
    hot, local = chain(LENGTH, seed="hot"), chain(LENGTH, seed=f"local {number}")
    with contextlib.closing(Node(directory, number)) as node:
        for at in range(node.arena.tables.geometry.capacity // (OTHER * BLOCK)):
            store(node.arena, chain(OTHER, seed=f"before {number} {at}"), block_bytes=BLOCK)
        store(node.arena, local, block_bytes=BLOCK)
        if not number:
            store(node.arena, hot, block_bytes=BLOCK)
        time.sleep(max(0.0, begin_at - time.time()))
        began, cycle = time.monotonic(), 0
        found: dict[str, list[list[float]]] = {"hot": [], "local": []}
        while (now := time.monotonic() - began) < seconds:
            # By turns: what comes after a pause is slower.
            for name, keys in (("hot", hot), ("local", local))[:: 1 if cycle % 2 else -1]:
                started = time.monotonic()
                num_found = node.ask(keys)
                found[name].append([now, time.monotonic() - started, num_found])
            if cycle % OTHERS_EVERY == 0:
                made, there = cycle // OTHERS_EVERY, (number + 1) % NUM_NODES
                store(node.arena, chain(OTHER, seed=f"{number} {made}"), block_bytes=BLOCK)
                node.ask(chain(OTHER, seed=f"{there} {made - 10}"), is_read=False)
            cycle += 1
            time.sleep(CYCLE_S)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
