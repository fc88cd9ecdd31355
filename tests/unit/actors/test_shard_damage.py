"""A shard whose tables are damaged under its hands goes on, and mends them."""

from pathlib import Path

import pytest

from kvray.actors.shard.shard import Shard
from tests.unit.actors.conftest import StartShard
from tests.unit.actors.small_shard import open_arena, wait_until_serving
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import chain, overwrite, store
from tests.waiting import wait_for

KEYS = chain(6)


def test_a_flipped_bit_is_mended_and_said(
    shard: Shard, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arena = open_arena(directory)
    arena.tables.slot_parent[int(store(arena, KEYS).slots[2])] ^= 1 << 30
    # Of children, if the flip came between two looks of one search.
    wait_for(lambda: "1 parents of its" in caplog.text or "1 children of its" in caplog.text)
    wait_for(lambda: arena.stats()["repairs"] == 1)
    check_invariants(arena.tables)
    assert arena.match(KEYS) == 6
    assert shard.status()["state"] == "serving"
    arena.close()


def test_tables_that_are_overwritten_end_no_shard(
    make_shard: StartShard, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard = make_shard(free_target=0.3)
    wait_until_serving(shard)
    arena = open_arena(directory)
    store(arena, KEYS)
    for seed in range(3):
        repairs = arena.stats()["repairs"]
        overwrite(arena.tables, seed)
        wait_for(lambda before=repairs: arena.stats()["repairs"] > before)
    keys = chain(4, seed="after")
    wait_for(lambda: shard.clear(5) == 0)
    store(arena, keys)
    assert arena.match(keys) == 4
    assert shard.status()["state"] == "serving"
    arena.close()
