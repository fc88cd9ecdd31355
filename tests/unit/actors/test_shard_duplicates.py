"""Two shards without Ray that hold the same blocks: of those copies the last go last."""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.owner.ownership import sweep
from kvray.actors.shard.shard import Shard
from kvray.errors import ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.store import Arena
from tests.unit.actors.small_shard import (
    Line,
    open_arena,
    settings_for,
    wait_for,
    wait_until_serving,
)
from tests.unit.store.small_arena import chain, spec, store

FREE_TARGET = 0.25
"""Of 512 slots: from 321 blocks on it is asked about the oldest 40."""
FULL = 408
"""With 51 slabs in use a quarter of their slots is free, with one more it is not."""
NUM_SHARED = 32
SHARED = [chain(1, seed=f"shared {number}") for number in range(NUM_SHARED)]
NUM_OWN = 8
NUM_OTHER = 288


@dataclass
class Node:
    """A shard with an engine beside it."""

    shard: Shard
    arena: Arena

    def store(self, name: str, count: int) -> list[list[BlockKey]]:
        """Store so many prompts of one block, which nobody else has."""
        keys = [chain(1, seed=f"{self.shard.name} {name} {number}") for number in range(count)]
        for key in keys:
            store(self.arena, key)
        return keys

    def drive_out(self, are_gone: Callable[[], bool]) -> None:
        """Store more, so that one block has to go after the other, until they are gone."""
        self.store("room", FULL - self.num_blocks)
        for number in range(2 * NUM_SHARED):
            if are_gone():
                return
            self.store(f"more {number}", 1)
            wait_for(lambda: self.num_blocks == FULL, "the eviction")
        pytest.fail("others went in their place")

    def held(self, prompts: list[list[BlockKey]]) -> list[BlockKey]:
        keys = [key for prompt in prompts for key in prompt]
        (mask,) = self.arena.present(keys, [0])
        return [key for key, is_here in zip(keys, mask.tolist(), strict=True) if is_here]

    @property
    def num_blocks(self) -> int:
        return int(self.arena.stats()["blocks"])

    @property
    def num_duplicates(self) -> int:
        return int(self.shard.status()["duplicate_blocks"])


class Tier:
    """Shards `a` and `b`, which announce to one lookup and ask it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.line = Line()
        self.is_silent = False
        self.num_questions = 0
        parent = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
        stack.callback(shutil.rmtree, parent)
        made = []
        for name in "ab":
            settings = settings_for(
                parent / name,
                spec=spec(num_slabs=64),
                free_target=FREE_TARGET,
                policy="lru",
                admission="all",
            )
            shard = Shard(f"kvray-shard-{name}", settings, self.line.announce, ask=self.ask)
            shard.start()
            stack.callback(sweep, parent / name)
            stack.callback(shard.stop, retire=False, timeout_s=10)
            wait_until_serving(shard)
            arena = open_arena(parent / name)
            stack.callback(arena.close)
            made.append(Node(shard, arena))
        self.a, self.b = self.nodes = made

    async def ask(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        """See `Ask`."""
        if (actor, method) != ("kvray-lookup", "locate"):
            raise ShardUnavailable(f"There is no {actor}.")
        self.num_questions += 1
        if self.is_silent:
            await asyncio.sleep(timeout_s)
            raise ShardUnavailable("The lookup does not answer.")
        return self.line.locate(b"".join(args))

    def fill(self) -> list[list[list[BlockKey]]]:
        """Store what is nearly too much: own blocks, shared ones, others; return the own ones."""
        own = [node.store("own", NUM_OWN) for node in self.nodes]
        for node in self.nodes:
            for keys in SHARED:
                store(node.arena, keys)
        for keys in SHARED:
            wait_for(lambda keys=keys: self.is_shared(keys), "both shards' announcements")
        for node in self.nodes:
            node.store("other", NUM_OTHER)
        return own

    def is_shared(self, keys: list[BlockKey]) -> bool:
        runs = self.line.locate(b"".join(keys))
        return [(run.stop, len(run.holders)) for run in runs] == [(1, 2)]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def test_what_another_shard_keeps_goes_before_last_copies(stack: contextlib.ExitStack) -> None:
    tier = Tier(stack)
    owns = tier.fill()
    # Of each shared block one shard finds that it keeps it, and the other that it need not.
    wait_for(lambda: tier.a.num_duplicates + tier.b.num_duplicates == NUM_SHARED, "the answers")
    duplicate = [node.num_duplicates for node in tier.nodes]
    assert min(duplicate) >= 4, "each has some to let go of"
    for node, own, num_duplicates in zip(tier.nodes, owns, duplicate, strict=True):
        node.drive_out(
            lambda node=node, left=NUM_SHARED - num_duplicates: len(node.held(SHARED)) == left
        )
        assert len(node.held(own)) == NUM_OWN, "the oldest, which are last copies, stay"
    kept = {*tier.a.held(SHARED), *tier.b.held(SHARED)}
    assert len(kept) == NUM_SHARED, "nothing of what both let go of was the last"


def test_without_a_lookup_the_oldest_go_as_ever(stack: contextlib.ExitStack) -> None:
    tier = Tier(stack)
    tier.is_silent = True
    owns = tier.fill()
    wait_for(lambda: tier.num_questions >= 2, "questions of both")
    for node, own in zip(tier.nodes, owns, strict=True):
        node.drive_out(lambda node=node, own=own: node.held(own) == [])
        assert len(node.held(SHARED)) == NUM_SHARED
        assert node.num_duplicates == 0


def test_a_shard_ends_at_once_while_it_asks(stack: contextlib.ExitStack) -> None:
    tier = Tier(stack)
    tier.is_silent = True
    tier.fill()
    wait_for(lambda: tier.num_questions >= 2, "questions of both")
    began = time.monotonic()
    tier.a.shard.stop(retire=False, timeout_s=10)
    assert time.monotonic() - began < 5
    assert tier.a.shard.status()["state"] == "stopped"
