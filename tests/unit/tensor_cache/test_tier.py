"""The tier from a cache's side: away, back, full, damaged, and shared with other processes."""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvray.actors.shard.shard import Shard
from kvray.config import KVRayConfig
from kvray.store import Arena
from kvray.store.arena.layout import READY
from kvray.store.arena.payload import slot_bytes
from kvray.tensor_cache import TensorCache
from kvray.tensor_cache import cache as cache_module
from kvray.tensor_cache.cache import StoreQueue
from tests.unit.node.conftest import in_a_fork
from tests.unit.tensor_cache.conftest import start_shard
from tests.unit.tensor_cache.kv import (
    BLOB,
    BLOCK,
    METADATA,
    TOKENS,
    assert_finds,
    assert_same,
    cut,
    random_blob,
    suffix_mask,
)
from tests.waiting import HANG_S, Gate, wait_for


def prompt(number: int, num_blocks: int = 6) -> list[int]:
    return [1000 + number, *range(1, num_blocks * BLOCK)]


def blob(number: int, num_blocks: int = 6) -> Any:
    return random_blob(num_blocks * BLOCK, seed=number)


def warning(caplog: pytest.LogCaptureFixture) -> str:
    """Return the only one."""
    (found,) = (r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    return found


def counted(cache: TensorCache) -> dict[str, int]:
    return {name: value for name, value in cache.counters().items() if value}


@pytest.fixture
def own_config(config: KVRayConfig) -> KVRayConfig:
    """The settings of a tier that no other test uses."""
    return config.model_copy(update={"cluster_name": "own"})


@pytest.fixture
def own_shards() -> Iterator[list[Shard]]:
    """Shards to be stopped, the last one with its arena."""
    shards: list[Shard] = []
    yield shards
    for shard in shards:
        shard.stop(retire=True, timeout_s=10)


@pytest.fixture
def on_disk(own_config, own_shards, make_cache, tmp_path) -> KVRayConfig:
    """Settings, with patience, of a shard whose arena is empty, and which has BLOB on disk."""
    disk = {"dir": tmp_path, "capacity": 2**24, "segment": 2**20, "free_reserve": 1}
    config = own_config.model_copy(
        update={
            "nvme": own_config.nvme.model_copy(update={**disk, "admission": "all"}),
            "connector": own_config.connector.model_copy(update={"stage_wait_s": 5.0}),
        }
    )
    before = start_shard(config)
    with TensorCache(config, METADATA) as cache:
        assert cache.store(TOKENS, BLOB) == len(TOKENS)
    before.stop(retire=True, timeout_s=10, flush=True)
    own_shards.append(start_shard(config))
    return config


def test_what_is_on_disk_is_found_and_counted_however_slow_it_is(make_cache, on_disk):
    cache = make_cache(on_disk)
    assert_finds(cache, [*TOKENS, 1], BLOB, 6)
    cache.retrieve(TOKENS)
    assert counted(cache) == {
        "requests": 2,
        "prompt_tokens": 2 * len(TOKENS) + 1,
        "hit_tokens": 2 * len(TOKENS),
        "hit_tokens_from_nvme": len(TOKENS),
        "hit_tokens_from_host": len(TOKENS),
    }


def test_without_a_wait_only_prefetch_brings_what_is_on_disk(make_cache, on_disk):
    connector = on_disk.connector.model_copy(update={"stage_wait_s": 0.0})
    cache = make_cache(on_disk.model_copy(update={"connector": connector}))
    assert cache.lookup(TOKENS) == 0
    assert cache.prefetch(TOKENS) == len(TOKENS)
    assert cache.lookup(TOKENS) == len(TOKENS)


def test_a_suffix_is_stored_behind_a_prefix_that_is_on_disk(make_cache, on_disk):
    longer = [*TOKENS, *range(BLOCK)]
    mask = suffix_mask(len(longer), len(TOKENS))
    assert make_cache(on_disk).store(longer, random_blob(BLOCK), mask) == BLOCK


def test_threads_that_want_blocks_from_disk_at_once_all_get_them(make_cache, on_disk):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(make_cache(on_disk).lookup, [TOKENS] * 16))
    assert found == [len(TOKENS)] * 16


def test_a_call_whose_turn_comes_too_late_is_no_silence_of_the_shard(
    make_cache, on_disk, monkeypatch
):
    def come(timeout: float) -> bool:
        time.sleep(timeout)
        return True

    cache, late = make_cache(on_disk), SimpleNamespace(acquire=come, release=lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(cache._blocks, "_turn", late)
        assert cache.prefetch(TOKENS, timeout_s=0.1) == 0
    assert cache.lookup(TOKENS) == len(TOKENS)


def test_without_a_tier_nothing_is_stored_or_found_and_it_says_so(make_cache, own_config, caplog):
    cache = make_cache(own_config)
    for blocking in (True, False):
        assert cache.store(TOKENS, BLOB, blocking=blocking) == 0
    assert cache.flush()
    assert_finds(cache, TOKENS, BLOB, 0)
    assert cache.lookup(TOKENS) == 0
    assert counted(cache) == {
        "requests": 1,
        "prompt_tokens": len(TOKENS),
        "dropped_tokens": 2 * len(TOKENS),
        "miss_tokens_store_down": len(TOKENS),
    }
    assert "no tier" in warning(caplog)


def test_a_cache_joins_each_tier_that_comes_and_sees_no_restart(make_cache, own_config, own_shards):
    cache = make_cache(own_config)
    for _ in range(2):
        assert cache.store(TOKENS, BLOB) == 0
        assert cache.retrieve(TOKENS)[0] == ()
        own_shards.append(start_shard(own_config))
        wait_for(lambda: cache.store(TOKENS, BLOB) > 0)
        own_shards[-1].stop(retire=False, timeout_s=10)
        assert_same(cache.retrieve(TOKENS)[0], BLOB)
        own_shards.append(start_shard(own_config))
        assert_same(cache.retrieve(TOKENS)[0], BLOB)
        wait_for(lambda: [r["replica"] for r in own_shards[-1].status()["replicas"]] == ["test"])
        own_shards[-1].stop(retire=True, timeout_s=10)


@pytest.mark.parametrize("call", ["read_valid", "write"])
def test_an_arena_that_retires_is_a_miss(make_cache, own_config, own_shards, call, monkeypatch):
    own_shards.append(start_shard(own_config))
    cache, copy = make_cache(own_config), getattr(Arena, call)
    assert cache.store(TOKENS, BLOB) == len(TOKENS)

    def interrupted(arena: Arena, *args: Any, **kwargs: Any) -> Any:
        own_shards[0].stop(retire=True, timeout_s=10)
        arena.leave()
        return copy(arena, *args, **kwargs)

    monkeypatch.setattr(Arena, call, interrupted)
    if call == "write":
        cache.store(prompt(1), blob(1))
    assert_finds(cache, prompt(1) if call == "write" else TOKENS, BLOB, 0)


def test_a_forked_child_of_a_cache_is_told_to_make_its_own(stored):
    def use() -> int:
        stored.close()
        with pytest.raises(ValueError, match="forked"):
            stored.lookup(TOKENS)
        return 0

    assert in_a_fork(use) == 0
    assert stored.lookup(TOKENS) == len(TOKENS)


def test_a_child_that_was_forked_while_another_thread_made_a_cache_makes_its_own():
    with ThreadPoolExecutor(1) as other:
        assert other.submit(cache_module._making.acquire).result()
        try:
            assert in_a_fork(lambda: int(not cache_module._making.acquire(blocking=False))) == 0
        finally:
            other.submit(cache_module._making.release).result()


def test_a_child_that_was_forked_while_another_thread_counted_can_leave_the_cache(stored):
    def leave() -> int:
        signal.alarm(20)  # which ends the child if it hangs
        assert not stored.flush()
        stored.close()
        return int(stored.counters()["stored_tokens"] < len(TOKENS))

    with stored._lock:
        assert in_a_fork(leave) == 0


def test_a_full_arena_keeps_storing_and_of_what_does_not_fit_the_beginning(cache, shard):
    for number in range(80):
        assert cache.store(prompt(number), blob(number)) == 6 * BLOCK
        assert_same(cache.retrieve(prompt(number))[0], blob(number))
    assert shard.status()["arena"]["evicted"] > 0
    for number in range(80):
        found = int(cache.retrieve(prompt(number))[1].sum())
        assert_finds(cache, prompt(number), blob(number), found // BLOCK)
    assert cache.lookup(prompt(0)) == 0
    tokens, large = prompt(0, 300), blob(0, 300)
    num_stored = cache.store(tokens, large)
    assert 128 * BLOCK <= num_stored < len(tokens)
    assert cache.counters()["dropped_tokens"] == len(tokens) - num_stored
    kv, ret_mask = cache.retrieve(tokens)
    assert_same(kv, cut(large, 0, int(ret_mask.sum())))


def test_blocks_are_counted_for_the_namespace_of_their_cache(stored, make_cache, shard):
    other = make_cache(model="another")
    other.store(TOKENS[: 2 * BLOCK], cut(BLOB, 0, 2 * BLOCK))
    held = {one["namespace"]: one["blocks"] for one in shard.status()["arena"]["namespaces"]}
    names = [cache.namespace.digest().hex()[:8] for cache in (stored, other)]
    assert held == {names[0]: 6, names[1]: 2}


def test_a_block_that_fits_into_no_arena_is_not_stored_and_says_so_once(make_cache, shard, caplog):
    cache = make_cache(tokens_per_block=2048)
    large = random_blob(2048)
    assert [cache.store(list(range(2048)), large) for _ in range(2)] == [0, 0]
    assert "raise arena.slab" in warning(caplog)


def test_blocks_know_their_place_in_the_prompt(make_cache, shard, monkeypatch):
    monkeypatch.setattr("kvray.tensor_cache.cache._STEP_BYTES", 2 * METADATA.block_bytes)
    cache = make_cache()
    cache.store(TOKENS[:BLOCK], cut(BLOB, 0, BLOCK))
    cache.store(TOKENS, cut(BLOB, BLOCK, 6 * BLOCK), suffix_mask(len(TOKENS), BLOCK))
    arena = cache._link.arena
    assert arena is not None
    ready = arena.tables.slot_state == READY
    assert sorted(arena.tables.slot_depth[ready].tolist()) == list(range(6))


def damage(cache: TensorCache, block: int) -> None:
    """Flip a bit in the stored block of that depth."""
    arena = cache._link.arena
    assert arena is not None
    tables = arena.tables
    ready = tables.slot_state == READY
    (slot,) = np.flatnonzero(ready & (tables.slot_depth == block))
    slot_bytes(tables, int(slot))[METADATA.block_bytes // 2] ^= 1


@pytest.mark.parametrize("block", [0, 3, 5])
@pytest.mark.parametrize("step", [1, 2, 16])
def test_a_damaged_block_ends_the_run_and_is_replaced(make_cache, shard, block, step, monkeypatch):
    monkeypatch.setattr("kvray.tensor_cache.cache._STEP_BYTES", step * METADATA.block_bytes)
    cache = make_cache()
    cache.store(TOKENS, BLOB)
    damage(cache, block)
    assert_finds(cache, TOKENS, BLOB, block)
    assert cache.lookup(TOKENS) == block * BLOCK
    assert cache.store(TOKENS, BLOB) == BLOCK
    assert_finds(cache, TOKENS, BLOB, 6)


@pytest.mark.parametrize("blocking", [True, False])
def test_storing_again_finds_and_replaces_what_is_damaged(stored, blocking):
    damage(stored, 2)
    damage(stored, 4)
    assert stored.store(TOKENS, BLOB) == 0
    stored.store(TOKENS, BLOB, skip_existing=False, blocking=blocking)
    assert stored.flush()
    counts = stored.counters()
    assert (counts["stored_tokens"], counts["dropped_tokens"]) == (len(TOKENS) + 2 * BLOCK, 0)
    assert_same(stored.retrieve(TOKENS)[0], BLOB)


def test_an_arena_that_others_keep_locked_is_a_miss_or_released_later(stored, shard, monkeypatch):
    with monkeypatch.context() as locked:
        locked.setattr(Arena, "lease", lambda *args, **kwargs: None)
        assert stored.retrieve(TOKENS)[0] == ()
    release, refused = Arena.release, iter([True])

    def busy_once(arena: Arena, *args: Any, **kwargs: Any) -> bool:
        return False if next(refused, False) else release(arena, *args, **kwargs)

    monkeypatch.setattr(Arena, "release", busy_once)
    assert_same(stored.retrieve(TOKENS)[0], BLOB)
    wait_for(lambda: shard.status()["arena"]["leased_blocks"] == 0)


def test_a_failed_conversion_gives_its_slots_back(cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("kvray.tensor_cache.layout.pack", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.store(TOKENS, BLOB)
    assert cache.lookup(TOKENS) == 0
    assert cache.store(TOKENS, BLOB) == len(TOKENS)


def test_two_processes_share(stored, config):
    def use() -> int:
        with TensorCache(config, METADATA) as other:
            assert_same(other.retrieve(TOKENS)[0], BLOB)
            assert other.store(prompt(1), blob(1)) == 6 * BLOCK
        return 0

    assert in_a_fork(use) == 0
    assert_same(stored.retrieve(prompt(1))[0], blob(1))


def test_threads_that_store_and_retrieve_at_once_see_no_foreign_bytes(cache):
    def work(worker: int) -> None:
        for turn in range(30):
            number = (worker + turn) % 12
            cache.store(prompt(number), blob(number), blocking=bool(turn % 2))
            kv, ret_mask = cache.retrieve(prompt(number))
            expected = cut(blob(number), 0, int(ret_mask.sum()))
            assert_same(kv or expected, expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert cache.flush()


def test_close_waits_for_a_call_that_is_under_way(cache, make_cache, monkeypatch):
    gate = Gate(monkeypatch, Arena, "write")
    with ThreadPoolExecutor(2) as pool:
        pool.submit(cache.store, TOKENS, BLOB)
        assert gate.reached.wait(HANG_S)
        closing = pool.submit(cache.close)
        wait_for(lambda: cache.closed)
        with pytest.raises(TimeoutError):
            closing.result(0.05)
        gate.open.set()
    assert make_cache().lookup(TOKENS) == len(TOKENS)


def test_kv_of_one_version_of_the_weights_is_not_found_under_another(stored, make_cache, config):
    assert make_cache(salt="tenant").lookup(TOKENS) == 0
    stored.set_weights_version("2")
    assert stored.lookup(TOKENS) == 0
    new = blob(2)
    assert stored.store(TOKENS, new) == len(TOKENS)
    assert_same(stored.retrieve(TOKENS)[0], new)
    assert_same(make_cache().retrieve(TOKENS)[0], BLOB)
    named = config.connector.model_copy(update={"weights_version": "2"})
    other = make_cache(config.model_copy(update={"connector": named}))
    assert_same(other.retrieve(TOKENS)[0], new)


def test_a_cache_without_a_version_of_the_weights_stores_and_finds_nothing(stored):
    stored.set_weights_version(None)
    mask = suffix_mask(len(TOKENS), 2 * BLOCK)
    assert stored.lookup(TOKENS) == stored.store(prompt(1), blob(1)) == 0
    assert stored.store(TOKENS, cut(BLOB, 2 * BLOCK, len(TOKENS)), mask) == 0
    kv, found = stored.retrieve(TOKENS, mask)
    assert (kv, found.any()) == ((), False)
    assert stored.counters()["miss_tokens_weights_unnamed"] == len(TOKENS) - 2 * BLOCK
    stored.set_weights_version("")
    assert stored.lookup(TOKENS) == len(TOKENS)
    assert stored.lookup(prompt(1)) == 0


# -- the queue of the background ----------------------------------------------------------------


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


@pytest.fixture
def busy(gate: threading.Event) -> Iterator[StoreQueue]:
    """A queue for 2 actions and 100 bytes; one of 60 is under way until the gate opens."""
    made, started = StoreQueue(saves_max=2, bytes_max=100), threading.Event()
    made.submit(60, lambda: (started.set(), gate.wait())[0])
    assert started.wait(HANG_S)
    yield made
    gate.set()
    made.close(5)


def test_actions_run_in_order_whatever_their_size_and_though_one_fails(busy, gate):
    done: list[int] = []
    gate.set()
    assert busy.flush(5)
    assert busy.submit(1, lambda: done.append(1 // 0))
    assert busy.submit(1, lambda: done.append(1))
    assert busy.flush(5)
    assert busy.submit(10**9, lambda: done.append(2))
    assert busy.flush(5)
    assert done == [1, 2]


def test_too_many_actions_or_bytes_are_refused_until_there_is_room(busy, gate):
    assert not busy.has_room(41)
    assert not busy.submit(41, gate.wait)
    assert [busy.submit(0, gate.wait) for _ in range(3)] == [True, True, False]
    assert not busy.flush(0.01)
    gate.set()
    assert busy.flush(5)
    assert busy.has_room(41)


def test_close_gives_up_what_it_has_no_time_for_and_takes_nothing_after_it(busy, gate):
    done: list[int] = []
    busy.submit(1, lambda: done.append(1))
    assert busy.close(0.01) == 1
    gate.set()
    assert not busy.submit(1, lambda: None)
    assert done == []
