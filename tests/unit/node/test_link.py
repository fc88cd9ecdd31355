import dataclasses
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.shard.shard import Shard
from kvray.engine import rank as rank_module
from kvray.errors import LayoutMismatch, LeaseExpired, ShardUnavailable
from kvray.identity.block import Namespace
from kvray.node import NodeLink, Registration, attach
from kvray.node import link as link_module
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena, PartRequest
from kvray.store.arena import prefault
from kvray.store.machine.pages import ArenaPages
from kvray.store.machine.side_file import HOLDER_BYTES
from kvray.wire import FRAME_MAX
from tests.unit.actors.small_shard import NAMESPACE, OTHER_LAYOUT
from tests.unit.node.conftest import StartShard
from tests.unit.node.stage_server import StageServer
from tests.unit.store.small_arena import chain, fetch, spec, store
from tests.waiting import HANG_S, wait_for

ROOT = Path(__file__).parents[3]

MakeLink = Callable[[], NodeLink]


@pytest.fixture
def make_link(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLink]:
    """Attaches to the test's directory; looks and reports often."""
    monkeypatch.setattr(link_module, "_REPORT_S", 0.02)
    links: list[NodeLink] = []

    def make() -> NodeLink:
        links.append(attach(directory, label="test", lock_wait_s=0.05, attach_retry_s=0.02))
        return links[-1]

    yield make
    for link in links:
        link.detach()


def registration(replica: str = "one", namespace: Namespace = NAMESPACE) -> Registration:
    return Registration(replica=replica, rank=0, namespace=namespace, counters=lambda: {"hits": 3})


def arena_of(link: NodeLink) -> Arena:
    """Return the link's arena once it has one."""
    wait_for(lambda: link.arena, "attaching")
    arena = link.arena
    assert arena is not None
    return arena


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kvray-link"]


# -- attaching ------------------------------------------------------------------------------------


def test_a_link_has_the_arena_at_once(start_shard: StartShard, make_link: MakeLink) -> None:
    start_shard()
    assert make_link().arena is not None


def test_an_engine_that_started_before_its_shard_attaches_by_itself(
    start_shard: StartShard, make_link: MakeLink, caplog: pytest.LogCaptureFixture
) -> None:
    link = make_link()
    assert link.arena is None
    time.sleep(0.1)
    shard = start_shard()
    assert arena_of(link).arena_id == shard.status()["arena"]["arena_id"]
    assert caplog.text.count("no tier yet") == 1


def test_all_who_ask_in_one_process_share_a_link(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    shard = start_shard()
    found: list[NodeLink] = []
    askers = [threading.Thread(target=lambda: found.append(make_link())) for _ in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len({id(link) for link in found}) == 1
    assert shard.status()["arena"]["holders"] == 1
    assert len(threads()) == 1


def test_the_last_user_ends_the_thread_and_the_holder(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    shard = start_shard()
    first, second = make_link(), make_link()
    first.detach()
    assert second.arena is not None
    second.detach()
    assert threads() == []
    assert second.arena is None
    assert shard.status()["arena"]["holders"] == 0
    second.detach()


def test_a_link_made_after_the_last_one_ended_is_a_new_one(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    start_shard()
    first = make_link()
    first.detach()
    second = make_link()
    first.detach()
    assert second.arena is not None


def test_a_retired_arena_is_left_for_its_successor(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    shard = start_shard()
    link = make_link()
    first = arena_of(link)
    shard.stop(retire=True, timeout_s=5)
    assert link.arena is None
    start_shard()
    assert arena_of(link).arena_id != first.arena_id


def mapped(directory: Path) -> int:
    """Return how many arenas of `directory` this process has mapped, removed ones included."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if f"{directory}/arena" in line})


def replace(shard: Shard, start_shard: StartShard, link: NodeLink) -> Shard:
    """Have the tier replaced, and the link follow."""
    shard.stop(retire=True, timeout_s=5)
    successor = start_shard()
    wait_for(lambda: link.arena is not None, "following")
    return successor


def test_what_was_leased_is_readable_until_released_however_often_the_tier_is_replaced(
    start_shard: StartShard, make_link: MakeLink, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_PREVIOUS_S", 0.0)
    shard = start_shard()
    link = make_link()
    held = []
    for number in range(3):
        arena, keys = arena_of(link), chain(3, seed=str(number))
        store(arena, keys)
        leases = arena.lease(keys)
        assert leases
        held.append((arena, keys, leases[0]))
        shard = replace(shard, start_shard, link)
    time.sleep(0.1)
    assert mapped(directory) == 4
    for arena, keys, lease in held:
        assert link.arena_named(arena.arena_id) is arena
        assert fetch(arena, keys, lease)
    for arena, _, lease in held:
        assert arena.release(lease)
    wait_for(lambda: mapped(directory) == 1, "unmapping")
    with pytest.raises(ShardUnavailable):
        held[0][0].leased_slots(held[0][2])


def test_an_arena_of_which_nothing_is_leased_is_unmapped_soon(
    start_shard: StartShard, make_link: MakeLink, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_PREVIOUS_S", 0.2)
    shard = start_shard()
    link = make_link()
    for _ in range(2):
        shard = replace(shard, start_shard, link)
    wait_for(lambda: mapped(directory) == 1, "unmapping")


def test_an_arena_is_mapped_while_another_process_that_lives_has_a_lease_in_it(
    start_shard: StartShard, make_link: MakeLink, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank reads by a lease that its leader's process has taken."""
    monkeypatch.setattr(link_module, "_PREVIOUS_S", 0.0)
    shard = start_shard()
    link = make_link()
    first = arena_of(link)
    store(first, chain(3))
    leader = Arena(directory, lock_wait_s=1)
    leader.join("leader")
    leases = leader.lease(chain(3))
    assert leases
    replace(shard, start_shard, link)
    time.sleep(0.1)
    assert fetch(first, chain(3), leases[0])
    leader.side_file.unlock(HOLDER_BYTES + leader.holder)  # as if it had died
    wait_for(lambda: link.arena_named(first.arena_id) is None, "unmapping")
    leader.close()


def test_a_release_that_found_a_retired_arena_busy_is_done_all_the_same(
    start_shard: StartShard, make_link: MakeLink, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_PREVIOUS_S", 0.0)
    shard = start_shard()
    link = make_link()
    first = arena_of(link)
    store(first, chain(3))
    leases = first.lease(chain(3))
    assert leases
    replace(shard, start_shard, link)
    assert first._lock.acquire(1)
    assert not first.release(*leases)
    link.defer(first, lambda arena: arena.release(*leases))
    time.sleep(0.1)
    first._lock.release()
    wait_for(lambda: mapped(directory) == 1, "unmapping")


def test_the_end_of_a_link_unmaps_everything(
    start_shard: StartShard, make_link: MakeLink, directory: Path
) -> None:
    shard = start_shard()
    link = make_link()
    first = arena_of(link)
    store(first, chain(3))
    leases = first.lease(chain(3))
    shard = replace(shard, start_shard, link)
    shard.stop(retire=True, timeout_s=5)
    assert leases
    link.detach()
    assert mapped(directory) == 0
    with pytest.raises(ShardUnavailable):
        first.leased_slots(leases[0])


def test_an_arena_removed_by_hand_is_left_for_its_successor(
    start_shard: StartShard, make_link: MakeLink, directory: Path
) -> None:
    shard = start_shard()
    link = make_link()
    first = arena_of(link)
    shard.stop(retire=False, timeout_s=5)
    for path in directory.iterdir():
        path.unlink()
    start_shard()
    wait_for(lambda: link.arena is not None and link.arena.arena_id != first.arena_id)


def test_a_link_outlives_its_shard_and_goes_on_with_the_next(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    shard = start_shard()
    link = make_link()
    link.register(registration())
    arena = arena_of(link)
    shard.stop(retire=False, timeout_s=5)
    store(arena, chain(3))
    assert link.arena is arena
    second = start_shard()
    assert link.arena is arena
    assert second.status()["arena"]["blocks"] == 3
    wait_for(lambda: second.status()["replicas"], "registering again")


def test_a_full_holder_table_is_tried_again(
    start_shard: StartShard, make_link: MakeLink, directory: Path
) -> None:
    start_shard(spec=spec(holders_max=4))
    others = [Arena(directory, lock_wait_s=1) for _ in range(4)]
    for other in others:
        other.join("other")
    link = make_link()
    assert link.arena is None
    others[0].leave()
    arena_of(link)
    for other in others:
        other.close()


def test_an_unreadable_arena_is_no_arena(make_link: MakeLink, directory: Path) -> None:
    directory.mkdir()
    (directory / "arena").write_bytes(b"garbage")
    assert make_link().arena is None


# -- populating -----------------------------------------------------------------------------------


def populators() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvray-populate"]


def test_a_link_maps_its_arena_in_the_background(
    start_shard: StartShard, make_link: MakeLink, directory: Path
) -> None:
    start_shard()
    figures = ArenaPages(directory / "arena")
    link = make_link()
    wait_for(lambda: link.arena and not populators(), "populating")
    mapped = figures.figures()["mapped_bytes"]
    assert mapped >= arena_of(link).tables.geometry.file_bytes


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


@pytest.mark.usefixtures("slow_populating")
def test_populating_ends_with_the_link(start_shard: StartShard, make_link: MakeLink) -> None:
    start_shard()
    of_the_shard = populators()
    link = make_link()
    assert set(populators()) > set(of_the_shard)
    link.detach()
    assert populators() == of_the_shard


def test_populating_ends_with_the_arena(
    start_shard: StartShard, make_link: MakeLink, slow_populating: threading.Event
) -> None:
    shard = start_shard()
    make_link()
    assert slow_populating.wait(HANG_S)
    shard.stop(retire=True, timeout_s=5)
    wait_for(lambda: not populators(), "the end of it")


# -- registering ----------------------------------------------------------------------------------


def test_a_rank_registers_and_its_figures_arrive(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    shard = start_shard()
    make_link().register(registration())
    (entry,) = shard.status()["replicas"]
    assert (entry["replica"], entry["connected"]) == ("one", True)
    wait_for(lambda: shard.status()["replicas"][0]["counters"] == {"hits": 3})


def test_a_rank_of_a_link_without_a_shard_registers_later(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    make_link().register(registration())
    shard = start_shard()
    wait_for(lambda: shard.status()["replicas"])


def test_the_last_figures_arrive_when_the_link_ends(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    shard = start_shard()
    link = make_link()
    hits = 0
    link.register(
        Registration(replica="one", rank=0, namespace=NAMESPACE, counters=lambda: {"hits": hits})
    )
    hits = 7
    link.detach()
    wait_for(lambda: not shard.status()["replicas"][0]["connected"])
    assert shard.status()["replicas"][0]["counters"] == {"hits": 7}


def test_a_refused_registration_raises_and_is_forgotten(
    start_shard: StartShard, make_link: MakeLink, directory: Path
) -> None:
    shard = start_shard()
    link = make_link()
    link.register(registration())
    with pytest.raises(LayoutMismatch):
        link.register(registration("two", OTHER_LAYOUT))
    time.sleep(0.1)
    assert [entry["replica"] for entry in shard.status()["replicas"]] == ["one"]


def test_a_registration_refused_later_is_named_once_and_keeps_no_other_waiting(
    start_shard: StartShard, make_link: MakeLink, caplog: pytest.LogCaptureFixture
) -> None:
    link = make_link()
    first, refused, last = registration(), registration("two", OTHER_LAYOUT), registration("three")
    for one in (first, refused, last):
        link.register(one)
    shard = start_shard()
    wait_for(lambda: [e["replica"] for e in shard.status()["replicas"]] == ["one", "three"])
    wait_for(lambda: refused.refusal)
    time.sleep(0.1)
    assert caplog.text.count("replica two is refused") == 1
    link.unregister(first)
    link.unregister(last)


def test_a_refused_rank_is_accepted_once_the_other_is_gone(
    start_shard: StartShard, make_link: MakeLink, directory: Path
) -> None:
    shard = start_shard()
    process = subprocess.Popen(
        [sys.executable, "-c", REGISTERED.format(directory=str(directory))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "registered"
    link = make_link()
    waiting = registration("two", OTHER_LAYOUT)
    with pytest.raises(LayoutMismatch):
        link.register(waiting)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: not shard.status()["replicas"][0]["connected"])
    link.register(waiting)
    assert waiting.accepted


def test_a_namespace_that_is_renewed_during_a_report_is_told_with_the_next(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    shard, renewed = start_shard(), dataclasses.replace(NAMESPACE, model="renewed")

    def counters() -> dict[str, int]:
        if one.namespace is NAMESPACE:
            one.renew(renewed)
        return {}

    one = dataclasses.replace(registration(), counters=counters)
    make_link().register(one)
    digest = renewed.digest().hex()[:8]
    wait_for(lambda: shard.status()["replicas"][0]["namespace"] == digest)
    wait_for(lambda: one.accepted)


REGISTERED = """
import time
from pathlib import Path
from kvray.node import Registration, attach
from tests.unit.actors.small_shard import NAMESPACE
link = attach(Path({directory!r}), label="one", lock_wait_s=1, attach_retry_s=1)
link.register(
    Registration(replica="one", rank=0, namespace=NAMESPACE, counters=lambda: dict(hits=1))
)
print("registered", flush=True)
time.sleep(60)
"""


def test_figures_that_fail_end_neither_thread_nor_link(
    start_shard: StartShard, make_link: MakeLink, caplog: pytest.LogCaptureFixture
) -> None:
    start_shard()
    link = make_link()
    link.register(
        Registration(replica="one", rank=0, namespace=NAMESPACE, counters=lambda: {"a": 1 // 0})
    )
    wait_for(lambda: "a defect in the background" in caplog.text)
    time.sleep(0.1)
    assert caplog.text.count("a defect in the background") == 1
    done = threading.Event()
    link.defer(arena_of(link), lambda arena: done.set() or True)
    assert done.wait(HANG_S)


def test_figures_that_no_frame_takes_are_refused_quietly(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    shard = start_shard()
    link = make_link()
    huge = registration("huge")
    huge.counters = lambda: {"x" * FRAME_MAX: 1}
    link.register(huge)
    link.register(registration("two"))

    def heard() -> dict[str, dict[str, int]]:
        return {one["replica"]: one["counters"] for one in shard.status()["replicas"]}

    wait_for(lambda: heard() == {"huge": {}, "two": {"hits": 3}})


# -- deferring ------------------------------------------------------------------------------------


def test_a_deferred_action_is_tried_until_it_succeeds(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    start_shard()
    link = make_link()
    tries = iter([False, False, True])
    done = threading.Event()

    def action(arena: Arena) -> bool:
        succeeded = next(tries)
        if succeeded:
            done.set()
        return succeeded

    link.defer(arena_of(link), action)
    assert done.wait(HANG_S)


def test_an_action_that_has_become_void_keeps_no_other_waiting(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    start_shard()
    link = make_link()
    done = threading.Event()

    def void(arena: Arena) -> bool:
        raise LeaseExpired("gone")

    link.defer(arena_of(link), void)
    link.defer(arena_of(link), lambda arena: done.set() or True)
    assert done.wait(HANG_S)


def test_detach_does_what_was_deferred(start_shard: StartShard, make_link: MakeLink) -> None:
    shard = start_shard()
    link = make_link()
    arena = arena_of(link)
    keys = chain(2)
    store(arena, keys)
    held = arena.lease(keys)
    assert held
    tries = iter([False] * 5)
    link.defer(arena, lambda arena: next(tries, True) and arena.release(*held))
    link.detach()
    assert shard.status()["arena"]["leased_blocks"] == 0
    assert next(tries, None) is None


def test_detach_does_not_wait_for_ever(
    start_shard: StartShard, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_LAST_FLUSH_S", 0.1)
    start_shard()
    link = make_link()
    link.defer(arena_of(link), lambda arena: False)
    began = time.monotonic()
    link.detach()
    assert time.monotonic() - began < 3


def test_what_is_deferred_is_bounded(
    start_shard: StartShard,
    make_link: MakeLink,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(link_module, "_LAST_FLUSH_S", 0.1)
    monkeypatch.setattr(link_module, "_WAITING_MAX", 2)
    start_shard()
    link = make_link()
    for _ in range(9):
        link.defer(arena_of(link), lambda arena: False)
        time.sleep(0.02)
    assert caplog.text.count("the arena has been locked for too long") == 1


# -- forks ----------------------------------------------------------------------------------------


def test_a_forked_child_cannot_use_the_link_and_does_the_parent_no_harm(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    shard = start_shard()
    link = make_link()
    link.register(registration())
    arena = arena_of(link)
    keys = chain(2)
    store(arena, keys)
    held = arena.lease(keys)
    child = os.fork()
    if child == 0:
        os._exit(_use_as_a_child(link, arena))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shard.status()["arena"]["holders"] == 1
    assert shard.status()["arena"]["leased_blocks"] == 2
    assert held
    assert arena.release(*held)
    assert link.call("hello")["shard"] == "a"


def _use_as_a_child(link: NodeLink, arena: Arena) -> int:
    """Return a number that tells which promise was broken, 0 if none."""
    began = time.monotonic()
    if link.arena is not None:
        return 1
    try:
        link.call("hello")
        return 2
    except ShardUnavailable:
        pass
    link.register(registration("child"))
    link.defer(arena, lambda arena: True)
    link.detach()
    return 3 if time.monotonic() - began > 1 else 0


def test_a_forked_child_may_attach_again(start_shard: StartShard, directory: Path) -> None:
    start_shard()
    first = attach(directory, label="parent", lock_wait_s=0.05, attach_retry_s=0.02)
    child = os.fork()
    if child == 0:
        link = attach(directory, label="child", lock_wait_s=0.05, attach_retry_s=0.02)
        # What it opens again is its own, its locks too.
        arena = link.arena
        status = 0 if link is not first and arena is not None and arena.match([]) == 0 else 1
        link.detach()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    first.detach()


def test_the_registry_is_not_locked_in_a_child_that_was_forked_while_it_was(
    directory: Path,
) -> None:
    with link_module._links_lock:
        child = os.fork()
        if child == 0:
            with link_module._links_lock:
                os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_attaching_is_logged_with_the_arenas_id(
    start_shard: StartShard, make_link: MakeLink, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvray.node")
    shard = start_shard()
    make_link()
    assert f"attached to arena {shard.status()['arena']['arena_id']}" in caplog.text


# -- what a shard has to know to stage ------------------------------------------------------------


def test_a_rank_tells_what_it_reads_and_where_it_holds_leases(
    directory: Path, start_shard: StartShard, make_link: MakeLink
) -> None:
    start_shard()
    link = make_link()
    arena = arena_of(link)
    membership = arena.membership
    with StageServer(directory) as server:
        link.register(
            Registration(
                replica="one",
                rank=1,
                namespace=NAMESPACE,
                counters=dict,
                part_requests=(PartRequest(2), PartRequest(5, 16)),
                num_ranks=4,
                adapters="plain",
            )
        )
        link.detach()
    told = server.registered[0]
    assert {name: told[name] for name in ("wanted", "num_ranks", "holder", "adapters")} == {
        "wanted": [[2, None], [5, 16]],
        "num_ranks": 4,
        "holder": [arena.arena_id, *membership],
        "adapters": "plain",
    }


def test_a_rank_tells_its_place_in_the_next_arena_too(
    directory: Path, start_shard: StartShard, make_link: MakeLink
) -> None:
    first = start_shard()
    link = make_link()
    link.register(registration())
    before = arena_of(link).arena_id
    first.stop(retire=True, timeout_s=5)
    start_shard()
    with StageServer(directory) as server:
        link._socket.close()  # it may have told the shard before the server was there
        wait_for(lambda: server.registered, "being told again")
        assert server.registered[-1]["holder"][0] == arena_of(link).arena_id != before
        link.detach()


def test_whether_there_are_other_nodes_is_known_from_reports(
    directory: Path, start_shard: StartShard, make_link: MakeLink
) -> None:
    start_shard()
    link = make_link()
    with StageServer(directory) as server:
        one = registration()
        link.register(one)
        wait_for(lambda: one.has_peers, "hearing of them")
        server.report = {"peers": False}
        wait_for(lambda: not one.has_peers, "hearing of their end")
        link.detach()


def test_a_rank_that_follows_its_leaders_name_has_no_other(
    start_shard: StartShard, make_link: MakeLink
) -> None:
    shard = start_shard()
    link = make_link()
    one = registration("process-7")
    link.register(one)
    one.rename("leader")
    one.rename("the leader")

    def connected() -> list[str]:
        return [entry["replica"] for entry in shard.status()["replicas"] if entry["connected"]]

    wait_for(lambda: connected() == ["the leader"], "the other name")
    counted = {entry["replica"]: entry["counters"] for entry in shard.status()["replicas"]}
    wait_for(lambda: shard.status()["replicas"][-1]["counters"] == {"hits": 3}, "its figures")
    assert not counted["process-7"]


def test_two_engines_of_one_name_are_two_and_the_second_says_so(
    start_shard: StartShard, make_link: MakeLink, caplog: pytest.LogCaptureFixture
) -> None:
    shard = start_shard()
    one, two = registration("chat"), registration("chat")
    two.counters = lambda: {"hits": 10}
    for each in (one, two):
        make_link().register(each)
    assert one.replica == "chat"
    assert two.replica == f"chat-{two.instance}"
    assert "another living engine on this node is replica chat; this one goes by" in caplog.text

    def counted() -> dict[str, int]:
        return {entry["replica"]: entry["counters"] for entry in shard.status()["replicas"]}

    both = {"chat": {"hits": 3}, two.replica: {"hits": 10}}
    wait_for(lambda: counted() == both, "figures of both")


def test_a_name_that_is_taken_while_the_engine_gives_another_is_not_kept(
    start_shard: StartShard, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = start_shard()
    make_link().register(registration("chat"))
    two = registration("chat")
    take_name = Registration.take_name

    def rename_first(one: Registration, asked: str, given: object) -> None:
        if one is two and asked == "chat":
            two.rename("the leader")
        take_name(one, asked, given)

    monkeypatch.setattr(Registration, "take_name", rename_first)
    make_link().register(two)

    def connected() -> list[str]:
        return [entry["replica"] for entry in shard.status()["replicas"] if entry["connected"]]

    wait_for(lambda: connected() == ["chat", "the leader"], "the leader's name, and no third")


@contextmanager
def frozen(shard: Shard) -> Iterator[None]:
    """Have a shard whose loop does nothing meanwhile, and which has the arena's lock."""
    thaw, is_frozen = threading.Event(), threading.Event()
    serving = shard._serving
    assert serving is not None

    def freeze() -> None:
        with serving.owner.section(HANG_S) as entered:
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
    start_shard: StartShard,
    make_link: MakeLink,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_known: bool,
) -> None:
    shard = start_shard()
    link, ranks = make_link(), [registration("one"), registration("two")]
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
    assert sum("leases end with this process" in one for one in said) == 1
    assert not any(record.exc_info for record in caplog.records)
    sum_s = sum(waits) + link_module._LAST_FLUSH_S + link_module._LEAVE_S + rank_module._FLUSH_S
    assert sum_s <= 2.0


def test_an_end_beside_a_shard_that_answers_sends_the_last_figures_of_all(
    start_shard: StartShard, make_link: MakeLink, caplog: pytest.LogCaptureFixture
) -> None:
    shard = start_shard()
    link, ranks = make_link(), [registration("one"), registration("two")]
    for rank in ranks:
        link.register(rank)
        rank.counters = lambda: {"hits": 99}
    link.unregister(ranks[0])
    link.detach()
    found = shard.status()["replicas"]
    assert [one["counters"] for one in found] == [{"hits": 99}] * 2
    assert not any(one["connected"] for one in found)
    assert "lost" not in caplog.text


def test_two_processes_of_one_host_name_and_number_have_names_of_their_own(
    make_link: MakeLink,
) -> None:
    first = make_link()
    first.detach()
    second = make_link()
    assert first.process_name != second.process_name
    assert f"-{os.getpid()}-" in second.process_name
