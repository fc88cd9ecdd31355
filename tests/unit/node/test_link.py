"""A link finds its node's arena, follows it from tier to tier, and does later what is due."""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvray.actors.shard.shard import Shard
from kvray.engine import rank as rank_module
from kvray.errors import LeaseExpired, ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.node import NodeLink, attach
from kvray.node import link as link_module
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena, Lease
from kvray.store.arena import prefault
from kvray.store.machine.pages import ArenaPages
from kvray.store.machine.side_file import HOLDER_BYTES
from tests.unit.actors.conftest import StartShard
from tests.unit.node.conftest import arena_of, in_a_fork, registration
from tests.unit.store.small_arena import acquire, chain, fetch, release, spec, store
from tests.waiting import HANG_S, wait_for


def threads(name: str = "kvray-link") -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == name}


# -- attaching ------------------------------------------------------------------------------------


def test_all_who_ask_in_one_process_share_a_link(shard, make_link):
    with ThreadPoolExecutor(8) as pool:
        found = [asked.result() for asked in [pool.submit(make_link) for _ in range(8)]]
    assert len(set(map(id, found))) == 1
    assert shard.status()["arena"]["holders"] == 1
    assert len(threads()) == 1


def test_the_last_user_ends_the_thread_and_the_holder_and_the_next_link_is_a_new_one(
    shard, make_link
):
    first, second = make_link(), make_link()
    first.detach()
    assert second.arena is not None
    second.detach()
    assert not threads()
    assert second.arena is None
    assert shard.status()["arena"]["holders"] == 0
    third = make_link()
    second.detach()
    assert third.arena is not None
    assert third.process_name != second.process_name, "another process may have had its number"
    assert f"-{os.getpid()}-" in third.process_name


def test_an_arena_whose_file_cannot_be_read_for_a_while_is_kept(link, monkeypatch):
    arena, reads = arena_of(link), Mock(side_effect=OSError(errno.EMFILE, "no descriptor is left"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", reads)
        wait_for(lambda: reads.call_count > 2)
    assert link.arena is arena


def num_mapped(directory: Path) -> int:
    """Return how many arenas of the directory this process has mapped, removed ones included."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if f"{directory}/arena" in line})


@pytest.fixture
def replace(
    shard: Shard, make_shard: StartShard, link: NodeLink, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Shard]:
    """Have the tier replaced and the link follow, which keeps no arena for those who come late."""
    monkeypatch.setattr(link_module, "_PREVIOUS_S", 0.0)

    def act() -> Shard:
        nonlocal shard
        shard.stop(retire=True, timeout_s=5)
        assert link.arena is None
        shard = make_shard()
        wait_for(lambda: link.arena is not None, "following")
        return shard

    return act


def lease(arena: Arena, keys: list[BlockKey]) -> list[Lease]:
    """Store blocks and lease them."""
    store(arena, keys)
    leases = arena.lease(keys)
    assert leases
    return leases


def test_what_was_leased_is_readable_until_released_however_often_the_tier_is_replaced(
    link, replace, directory
):
    held = []
    for number in range(3):
        arena, keys = arena_of(link), chain(3, seed=str(number))
        held.append((arena, keys, lease(arena, keys)[0]))
        replace()
    time.sleep(0.1)
    assert num_mapped(directory) == 4
    for arena, keys, leased in held:
        assert link.arena_named(arena.arena_id) is arena
        assert fetch(arena, keys, leased)
    for arena, _, leased in held:
        assert arena.release(leased)
    wait_for(lambda: num_mapped(directory) == 1, "unmapping")
    with pytest.raises(ShardUnavailable):
        held[0][0].leased_slots(held[0][2])


def test_an_arena_is_mapped_while_another_process_that_lives_has_a_lease_in_it(
    link, replace, directory
):
    """A rank reads by a lease that its leader's process has taken."""
    first = arena_of(link)
    leader = Arena(directory, lock_wait_s=1)
    leader.join("leader")
    leases = lease(leader, chain(3))
    replace()
    time.sleep(0.1)
    assert fetch(first, chain(3), leases[0])
    leader.side_file.unlock(HOLDER_BYTES + leader.holder)  # as if it had died
    wait_for(lambda: link.arena_named(first.arena_id) is None, "unmapping")
    leader.close()


def test_a_release_that_found_a_retired_arena_busy_is_done_all_the_same(link, replace, directory):
    first = arena_of(link)
    leases = lease(first, chain(3))
    replace()
    assert acquire(first._lock, 1)
    assert not first.release(*leases)
    link.defer(first, lambda arena: arena.release(*leases))
    time.sleep(0.1)
    release(first._lock)
    wait_for(lambda: num_mapped(directory) == 1, "unmapping")


def test_the_end_of_a_link_unmaps_everything(link, replace, directory):
    first = arena_of(link)
    leases = lease(first, chain(3))
    replace().stop(retire=True, timeout_s=5)
    link.detach()
    assert num_mapped(directory) == 0
    with pytest.raises(ShardUnavailable):
        first.leased_slots(leases[0])


def test_a_full_holder_table_is_tried_again(make_shard, make_link, directory, caplog):
    caplog.set_level(logging.INFO, logger="kvray.node")
    make_shard(spec=spec(holders_max=4))
    others = [Arena(directory, lock_wait_s=1) for _ in range(4)]
    for other in others:
        other.join("other")
    link = make_link()
    assert link.arena is None
    others[0].leave()
    wait_for(lambda: f"attached to arena {arena_of(link).arena_id}" in caplog.text)
    assert caplog.text.count("no tier yet") == 1
    for other in others:
        other.close()


# -- populating -----------------------------------------------------------------------------------


def populators() -> set[threading.Thread]:
    return threads("kvray-populate")


def test_a_link_maps_its_arena_in_the_background(link, directory):
    arena = arena_of(link)
    wait_for(lambda: not populators(), "populating")
    mapped = ArenaPages(directory / "arena").figures()["mapped_bytes"]
    assert mapped >= arena.tables.geometry.file_bytes


@pytest.fixture
def slow_populating(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Every page takes a while; set once there was one."""
    begun = threading.Event()

    def populate_slowly(chunk: object) -> bool:
        begun.set()
        time.sleep(0.01)
        return True

    monkeypatch.setattr(prefault, "_QUIET_CHUNK_BYTES", 4096)
    monkeypatch.setattr(prefault, "_populate", populate_slowly)
    return begun


@pytest.mark.parametrize("end", ["link", "arena"])
def test_populating_ends_with_the_link_or_the_arena(slow_populating, shard, make_link, end):
    of_the_shard = populators()
    link = make_link()
    assert slow_populating.wait(HANG_S)
    assert populators() > of_the_shard
    if end == "link":
        link.detach()
        assert populators() == of_the_shard
    else:
        shard.stop(retire=True, timeout_s=5)
        wait_for(lambda: not populators(), "the end of it")


# -- deferring ------------------------------------------------------------------------------------


def test_detach_does_what_was_deferred_and_waits_for_nothing_that_has_become_void(shard, link):
    arena = arena_of(link)
    held = lease(arena, chain(2))
    tries = iter([False] * 5)
    link.defer(arena, Mock(side_effect=LeaseExpired("gone")))
    link.defer(arena, lambda arena: next(tries, True) and arena.release(*held))
    link.detach()
    assert shard.status()["arena"]["leased_blocks"] == 0
    assert next(tries, None) is None


def test_what_is_deferred_is_bounded_and_the_end_waits_not_long_for_it(link, monkeypatch, caplog):
    monkeypatch.setattr(link_module, "_LAST_FLUSH_S", 0.1)
    monkeypatch.setattr(link_module, "_WAITING_MAX", 2)
    for _ in range(9):
        link.defer(arena_of(link), lambda arena: False)
        time.sleep(0.02)
    assert caplog.text.count("the arena has been locked for too long") == 1
    link.detach()


# -- forks ----------------------------------------------------------------------------------------


def test_a_forked_child_cannot_use_the_link_and_does_the_parent_no_harm(shard, link):
    link.register(registration())
    arena = arena_of(link)
    held = lease(arena, chain(2))

    def use() -> int:
        """Return a number that tells which promise was broken, 0 if none."""
        began = time.monotonic()
        if link.arena is not None:
            return 1
        try:
            link._socket.call("hello", timeout_s=5)
            return 2
        except ShardUnavailable:
            pass
        link.register(registration("child"))
        link.defer(arena, lambda arena: True)
        link.detach()
        link._socket.close()
        return 3 if time.monotonic() - began > 1 else 0

    assert in_a_fork(use) == 0
    assert shard.status()["arena"]["holders"] == 1
    assert shard.status()["arena"]["leased_blocks"] == 2
    assert arena.release(*held)
    assert link._socket.call("hello", timeout_s=5)["shard"] == "a"


def test_a_forked_child_may_attach_again_also_when_its_parent_was_attaching(shard, directory):
    first = attach(directory, label="parent", lock_wait_s=0.05, attach_retry_s=0.02)

    def attach_again() -> int:
        link = attach(directory, label="child", lock_wait_s=0.05, attach_retry_s=0.02)
        # What it opens again is its own, its locks too.
        arena = link.arena
        is_own = link is not first and arena is not None and arena.lease([]) == []
        link.detach()
        return not is_own

    with link_module._links_lock:
        assert in_a_fork(attach_again) == 0
    first.detach()


@contextmanager
def frozen(shard: Shard) -> Iterator[None]:
    """Have a shard whose loop does nothing meanwhile, and which has the arena's lock."""
    thaw, is_frozen = threading.Event(), threading.Event()

    def freeze() -> None:
        with shard._serving.owner.section(HANG_S) as entered:
            assert entered
            is_frozen.set()
            thaw.wait(HANG_S)

    thread = threading.Thread(target=lambda: shard._loop.call(freeze, HANG_S))
    thread.start()
    assert is_frozen.wait(HANG_S)
    try:
        yield
    finally:
        thaw.set()
        thread.join()


@pytest.mark.parametrize("is_known", [True, False])
def test_an_end_beside_a_frozen_shard_is_bounded_and_says_what_is_lost(
    shard, link, caplog, monkeypatch, is_known
):
    ranks = [registration("one"), registration("two")]
    for rank in ranks:
        link.register(rank)
    arena = arena_of(link)
    waits: list[float] = []
    with frozen(shard):
        if not is_known:
            wait_for(lambda: not ranks[0].accepted, "a report in vain")
        caplog.clear()
        call, join, here = ShardSocket.call, threading.Thread.join, threading.current_thread()

        def note(seconds: float | None) -> None:
            if threading.current_thread() is here:
                assert seconds is not None, "a wait without end"
                waits.append(seconds)

        def called(peer: ShardSocket, op: str, *, timeout_s: float, **fields: Any) -> Any:
            note(timeout_s)
            return call(peer, op, timeout_s=timeout_s, **fields)

        def joined(thread: threading.Thread, timeout: float | None = None) -> None:
            note(timeout if thread.name == "kvray-link" else 0.0)
            join(thread, timeout)

        monkeypatch.setattr(ShardSocket, "call", called)
        monkeypatch.setattr(threading.Thread, "join", joined)
        link.defer(arena, lambda _: False)
        link.unregister(ranks[0])
        link.detach()
        monkeypatch.undo()
    said = [record.getMessage() for record in caplog.records]
    for name in ("one", "two"):
        line = f"the last figures of replica {name} rank 0 are lost: "
        assert sum(line in one for one in said) == 1
    assert sum("leases or saves end with this process" in one for one in said) == 1
    assert not any(record.exc_info for record in caplog.records)
    sum_s = sum(waits) + link_module._LAST_FLUSH_S + link_module._LEAVE_S + rank_module._FLUSH_S
    assert sum_s <= 2.0


def test_an_end_beside_a_shard_that_answers_sends_the_last_figures_of_all(shard, link, caplog):
    ranks = [registration("one"), registration("two")]
    for rank in ranks:
        link.register(rank)
        rank.counters = lambda: {"hits": 99}
    link.unregister(ranks[0])
    link.detach()
    found = shard.status()["replicas"]
    assert [one["counters"] for one in found] == [{"hits": 99}] * 2
    assert not any(one["connected"] for one in found)
    assert "lost" not in caplog.text
