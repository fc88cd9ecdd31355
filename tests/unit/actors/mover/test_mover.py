import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.actors.mover.mover import READ_LEASES_MAX, Mover
from kvray.actors.mover.orders import FetchOrder, LeaseGroup, LeaseRequest, SendOrder, Span
from kvray.actors.mover.source import FIRST_BYTES, Pace
from kvray.errors import (
    CapacityError,
    ConfigError,
    LeaseExpired,
    ShardUnavailable,
    TransferTimeout,
    TransportUnavailable,
)
from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import key_index
from kvray.store.arena.layout import READY
from kvray.transport import nixl
from tests.examples import examples
from tests.unit.actors.small_mover import SETTINGS, MakeNode, Movers, Node, is_right, span
from tests.unit.store.small_arena import SLOT, chain, num_here, store
from tests.waiting import wait_for

ROOT = {"parent": None, "depth": 0, "part": 0, "block_bytes": SLOT}
EXPECTED = {"block_bytes": SLOT}
"""Of a span whose blocks are as the tests store them."""


@pytest.fixture
def source(make_node: MakeNode) -> Node:
    return make_node("a")


@pytest.fixture
def target(make_node: MakeNode) -> Node:
    return make_node("b")


@pytest.fixture
def keys(source: Node) -> list[BlockKey]:
    """Ten blocks that the source has."""
    made = chain(10)
    store(source.arena, made)
    return made


@pytest.mark.parametrize(
    ("block_bytes", "bytes_per_s"), [(SLOT, 200 * SLOT), (16 * SLOT, 40 * SLOT)]
)
def test_over_a_slow_link_everything_comes(make_node, monkeypatch, block_bytes, bytes_per_s):
    shape = {"num_slabs": 8, "slots_per_slab": 512}
    source, target = (make_node(name, asked=shape, call_timeout_s=0.4) for name in "ab")
    keys, transport = chain(128 * SLOT // block_bytes), source.mover._attached.transports["nixl"]
    store(source.arena, keys, block_bytes=block_bytes)
    send = transport.send

    def slow(*args: Any, timeout_s: float) -> Any:
        seconds = int(args[3].sum()) / bytes_per_s
        time.sleep(min(seconds, timeout_s))
        if seconds > timeout_s:
            raise TransferTimeout("A push did not end in time.")
        return send(*args, timeout_s=timeout_s)

    monkeypatch.setattr(transport, "send", slow)
    asked = span("a", keys, block_bytes=block_bytes)
    first = target.fetch(asked, deadline_s=60.0).here
    # One block may take longer than a call; then it is not sent ahead again.
    assert first == ((len(keys),) if block_bytes == SLOT else (0,))
    wait_for(lambda: target.fetch(asked, deadline_s=60.0).here == (len(keys),))


def test_no_piece_is_begun_that_the_deadline_would_cut_off(source, target, keys, monkeypatch):
    monkeypatch.setattr("kvray.actors.mover.source.FIRST_BYTES", SLOT)
    transport = source.mover._attached.transports["nixl"]
    send = transport.send

    def slow(*args: Any, timeout_s: float) -> None:
        if timeout_s < 1.2:
            raise TransferTimeout("A push did not end in time.")
        send(*args, timeout_s=timeout_s)
        time.sleep(1.2)

    monkeypatch.setattr(transport, "send", slow)
    report = target.fetch(span("a", keys), deadline_s=2.0)
    # Else this node's end is renewed, which cuts off what others send.
    assert (report.here, report.sources["a"].error) == ((1,), "CapacityError")
    assert target.mover.status()["fenced_slots_total"] == 0


def hold(arena: Arena, seconds: float) -> None:
    """Have another thread keep the arena's lock."""
    is_busy = threading.Event()

    def run() -> None:
        with arena.section(1.0) as entered:
            assert entered
            is_busy.set()
            time.sleep(seconds)

    threading.Thread(target=run).start()
    assert is_busy.wait(10)


def test_a_lease_that_a_busy_arena_did_not_end_ends_later(source, keys, monkeypatch):
    arena = source.mover._attached.arena
    lease_for = arena.lease_for
    monkeypatch.setattr(arena, "lock_wait_s", 0.002)

    def lease_once(*args: Any, **options: Any) -> Any:
        found = lease_for(*args, **options)
        hold(source.arena, 0.5)
        arena.lease_for = lambda *_, **__: None
        return found

    arena.lease_for = lease_once
    groups = tuple(LeaseGroup(part=0, keys=b"".join(keys)) for _ in range(2))
    with pytest.raises(CapacityError, match="busy"):
        source.mover.lease(_request(source, [], groups=groups, lease_s=1.0, is_use=False))
    assert source.mover.status()["read_leases"] == 1
    wait_for(lambda: source.num_leases == 0)
    assert source.mover.status()["read_leases"] == 0


def test_slots_that_a_busy_arena_did_not_take_back_go_back_later(make_node, monkeypatch):
    target = make_node("b")
    arena = target.mover._attached.arena
    monkeypatch.setattr(arena, "abort", partial(arena.abort, wait_s=0.05))

    def refusing(method: str, *args: Any, timeout_s: float) -> Any:
        if method == "lease" and args[0].groups:
            hold(target.arena, 0.5)
            raise CapacityError("That node has no room for a lease.")

    target._peers["a"] = refusing
    assert target.fetch(span("a", chain(10), **EXPECTED)).sources["a"].error
    wait_for(lambda: target.num_reserved == 0)
    assert target.mover.status()["fenced_slots"] == 0


def test_chain_is_fetched_from_several_nodes_at_once(source, target, make_node):
    keys, third = chain(30), make_node("c")
    for node in (source, third):
        store(node.arena, keys)
    report = target.fetch(
        span("a", keys[:10]),
        span("c", keys[10:20], parent=keys[9], depth=10),
        span("a", keys[20:], parent=keys[19], depth=20),
    )
    assert report.here == (10, 10, 10)
    assert [report.sources[name].num_blocks for name in "ac"] == [20, 10]
    tables = target.arena.tables
    ready = tables.slot_state == READY
    assert sorted(tables.slot_depth[ready].tolist()) == list(range(30))
    assert np.count_nonzero(tables.slot_parent[ready] >= 0) == 29


def test_what_is_here_or_written_by_somebody_else_is_not_fetched(source, target, keys):
    made = target.arena.reserve(keys[:3], **ROOT)
    report = target.fetch(span("a", keys))
    assert report.here == (0,)
    assert report.sources["a"].num_blocks == 7
    target.arena.commit(made, target.arena.sums(made))
    again = target.fetch(span("a", keys))
    assert (again.here, again.sources) == ((10,), {})


def test_a_source_is_not_slow_because_another_one_is_silent(source, target, keys):
    def silent(*_: Any, timeout_s: float) -> Any:
        time.sleep(2.0)
        raise ShardUnavailable("It did not answer in time.")

    target._peers["c"] = silent
    report = target.fetch(span("a", keys), span("c", chain(1, seed="c")))
    assert report.here == (10, 0)
    assert 0 < report.sources["a"].seconds < 1.5


def test_blocks_without_their_parent_are_left_out(source, target, keys):
    tail = span("a", keys[5:], parent=keys[4], depth=5)
    assert target.fetch(tail).here == (0,)
    assert target.num_reserved == 0
    free = span("a", keys[5:], parent=keys[4], depth=5, needs_parent=False)
    assert target.fetch(free).here == (5,)


@pytest.mark.parametrize("in_flight", [1, 2**26], ids=["block after block", "at once"])
def test_arena_without_room_gets_a_shorter_prefix(source, make_node, in_flight):
    room = {"num_slabs": 4, "slots_per_slab": 4}
    small = make_node("b", asked=room, bytes_in_flight=in_flight)
    keys = chain(40)
    store(source.arena, keys)
    assert small.fetch(span("a", keys)).here == (16,)
    assert is_right(small.arena, keys[:16], block_bytes=SLOT)


@pytest.mark.parametrize("expected", [{}, EXPECTED], ids=["leased first", "sent with the lease"])
def test_corrupt_block_is_never_ready_here_and_quarantined_there(source, target, expected):
    keys = chain(10)
    made = store(source.arena, keys)
    source.arena.slot_bytes(int(made.slots[6]))[5] ^= 1
    report = target.fetch(span("a", keys, **expected))
    got = report.sources["a"]
    assert (report.here, got.corrupt, got.error) == ((6,), 1, None)
    wait_for(lambda: num_here(source.arena, keys) == 6)
    assert source.arena.stats()["corrupt"] == 1
    wait_for(lambda: target.num_reserved == 0)


@pytest.fixture
def calls(source: Node, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that the source has had from other movers."""
    made: list[str] = []

    def noted(name: str, method: Any, *args: Any) -> Any:
        made.append(name)
        return method(*args)

    for name in ("lease", "send", "release"):
        method = getattr(source.mover, name)
        monkeypatch.setattr(source.mover, name, partial(noted, name, method))
    return made


@pytest.mark.parametrize("is_expected", [True, False])
def test_parts_that_are_as_expected_come_with_their_lease(source, target, keys, calls, is_expected):
    store(source.arena, keys, part=3, block_bytes=1000)
    sizes = ({"block_bytes": SLOT}, {"block_bytes": 1000}) if is_expected else ({}, {})
    report = target.fetch(span("a", keys, **sizes[0]), span("a", keys, part=3, **sizes[1]))
    assert report.here == (10, 10)
    assert is_right(target.arena, keys, block_bytes=SLOT)
    assert is_right(target.arena, keys, part=3, block_bytes=1000)
    got = report.sources["a"]
    told = (got.num_blocks, got.num_bytes, got.transport, got.error)
    assert told == (20, 10 * SLOT + 10 * 1000, "nixl", None)
    assert got.seconds > 0
    assert (calls == ["lease"]) is is_expected
    assert (source.num_leases, target.num_reserved) == (0, 0)


PRIORITIES = [90, 90, 35, 0, 100, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    "stored",
    [{"block_bytes": 1000}, {"priority": np.array(PRIORITIES, dtype="u1")}, {"namespace": 2**31}],
)
def test_blocks_that_are_not_as_expected_come_as_they_are(source, target, calls, stored):
    keys = chain(10)
    store(source.arena, keys, **stored)
    if "priority" in stored:
        store(target.arena, keys[:1], priority=5)
    assert target.fetch(span("a", keys, **EXPECTED)).here == (10,)
    assert is_right(target.arena, keys, block_bytes=stored.get("block_bytes", SLOT))
    tables = target.arena.tables
    found = key_index.find(tables, key_index.pack_keys(keys), 0)
    expected = PRIORITIES if "priority" in stored else [35] * 10
    assert tables.slot_priority[found].tolist() == expected
    assert set(tables.slot_namespace[found].tolist()) == {stored.get("namespace", 0)}
    assert calls == ["lease", "send", "release"]
    assert (source.num_leases, target.num_reserved) == (0, 0)


@pytest.mark.parametrize("expected", [{}, EXPECTED], ids=["leased first", "sent with the lease"])
def test_slots_of_what_the_source_lacks_are_given_back(source, target, calls, expected):
    store(source.arena, chain(7))
    report = target.fetch(span("a", chain(10), **expected))
    assert (report.here, report.sources["a"].error) == ((7,), None)
    assert target.fetch(span("a", chain(5, seed="unknown"), **expected)).here == (0,)
    assert not expected or calls == ["lease", "lease", "release"]
    assert target.num_reserved == 0


def test_what_is_beyond_the_first_piece_comes_after_it(source, target, keys, calls, monkeypatch):
    monkeypatch.setattr("kvray.actors.mover.fetches._AHEAD_BYTES", 4 * SLOT + 1)
    assert target.fetch(span("a", keys, **EXPECTED)).here == (10,)
    assert is_right(target.arena, keys, block_bytes=SLOT)
    assert calls == ["lease", "send", "release"]


def test_little_is_asked_of_a_source_not_known_as_fast(source, target, keys, calls, monkeypatch):
    monkeypatch.setattr("kvray.actors.mover.fetches._UNKNOWN_BYTES_PER_S", 1.0)
    monkeypatch.setattr("kvray.actors.mover.fetches._MEASURED_BYTES", 1)
    assert target.fetch(span("a", keys, **EXPECTED)).here == (10,)
    assert calls == ["lease", "send", "release"], "one block came with the lease"
    others = chain(10, seed="others")
    store(source.arena, others)
    assert target.fetch(span("a", others, **EXPECTED)).here == (10,)
    assert calls[3:] == ["lease"], "it was fast"
    with monkeypatch.context() as late:
        late.setattr(source.mover._attached.read_leases, "_leases_max", 0)
        assert target.fetch(span("a", chain(1, seed="no"), **EXPECTED)).sources["a"].error
    third = chain(10, seed="third")
    store(source.arena, third)
    assert target.fetch(span("a", third, **EXPECTED)).here == (10,)
    assert calls[-3:] == ["lease", "send", "release"], "after a failure nobody knows"


def test_a_source_that_refuses_a_lease_has_sent_nothing(source, target, keys, monkeypatch):
    monkeypatch.setattr(source.mover._attached.read_leases, "_leases_max", 0)
    report = target.fetch(span("a", keys, **EXPECTED))
    assert (report.here, report.sources["a"].error) == ((0,), "CapacityError")
    assert (target.num_reserved, target.mover.status()["fenced_slots_total"]) == (0, 0)


def test_two_fetches_of_the_same_blocks_leave_one_copy(source, target):
    keys = chain(50)
    store(source.arena, keys)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: target.fetch(span("a", keys)), range(3)))
    assert target.fetch(span("a", keys)).here == (50,)
    assert (target.num_ready, target.num_reserved) == (50, 0)


def test_two_movers_fetch_from_each_other_at_once(source, target):
    ours, theirs = chain(50, seed="ours"), chain(50, seed="theirs")
    store(source.arena, theirs[:10])
    store(target.arena, ours[:10])

    def fetch(node: Node, wanted: Span) -> tuple[int, ...]:
        return [node.fetch(wanted) for _ in range(5)][-1].here

    with ThreadPoolExecutor(2) as pool:
        found = pool.map(fetch, (target, source), (span("a", theirs), span("b", ours)))
    assert list(found) == [(10,), (10,)]


def test_peer_that_is_not_there_is_reported(target):
    report = target.fetch(span("nobody", chain(3)))
    got = report.sources["nobody"]
    told = (report.here, got.error, got.message)
    assert told == ((0,), "ShardUnavailable", "There is no nobody.")


def test_ends_without_a_common_transport_say_so(make_node, target, monkeypatch):
    # Other tests of this process may have connected it.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    a, keys = make_node("a", transports=("object_ref",)), chain(3)
    store(a.arena, keys)
    report = target.fetch(span("a", keys))
    assert report.here == (0,)
    assert report.sources["a"].error == "TransportUnavailable"
    assert "Ray" in a.mover.status()["transports"]["object_ref"]["reason"]


@pytest.mark.parametrize("lacks", ["turns", "room", "time", "lock"])
def test_what_this_node_lacks_is_held_against_no_source(target, keys, lacks, monkeypatch):
    mover, fetches, deadline_s = target.mover, target.mover._attached.fetches, 0.3
    if lacks == "turns":
        monkeypatch.setattr(mover, "_turns", threading.BoundedSemaphore(1))
        mover._turns.acquire()
    elif lacks == "room":
        fetches._in_flight["nixl"].enter(SETTINGS.bytes_in_flight, float("inf"))
    elif lacks == "time":
        deadline_s = 0.0
    else:
        monkeypatch.setattr(target.mover._attached.arena, "reserve", lambda *_, **__: None)
        deadline_s = 10.0
    report = target.fetch(span("a", keys, **EXPECTED), deadline_s=deadline_s)
    assert (report.here, report.sources["a"].error) == ((0,), "CapacityError")
    assert target.num_reserved == 0


def test_an_end_that_is_being_renewed_holds_nobody_up(source, target, keys, monkeypatch):
    theirs, may_go_on = chain(5, seed="theirs"), threading.Event()
    store(target.arena, theirs)
    make_agent = nixl._Agent

    def slow(*args: Any, **options: Any) -> Any:  # as where much memory is registered
        assert may_go_on.wait(60)
        return make_agent(*args, **options)

    assert source.fetch(span("b", theirs[:1])).here == (1,)  # the links are there
    monkeypatch.setattr(nixl, "_Agent", slow)
    fenced = target.mover._attached.fenced["nixl"]
    fenced.add(target.arena.reserve(chain(1, seed="doubt"), **ROOT), fenced.incarnation)
    wait_for(lambda: target.mover._attached.transports["nixl"]._inbound is None)
    try:
        began = time.monotonic()
        report = target.fetch(span("a", keys), deadline_s=0.5)
        assert time.monotonic() - began < 10
        assert (report.here, report.sources["a"].error) == ((0,), "TransportUnavailable")
        assert source.fetch(span("b", theirs)).here == (5,)
    finally:
        may_go_on.set()
    wait_for(lambda: target.num_reserved == 0)
    wait_for(lambda: target.fetch(span("a", keys)).here == (10,))


def test_a_source_is_not_to_blame_for_a_renewal(source, target, keys, monkeypatch):
    may_go_on, make_agent = threading.Event(), nixl._Agent
    inbound, send = target.mover._attached.transports["nixl"], nixl.NixlTransport.send

    def slow(*args: Any, **options: Any) -> Any:  # as where much memory is registered
        assert may_go_on.wait(60)
        return make_agent(*args, **options)

    def cut(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(nixl, "_Agent", slow)
        fenced = target.mover._attached.fenced["nixl"]
        fenced.add(target.arena.reserve(chain(1, seed="doubt"), **ROOT), fenced.incarnation)
        wait_for(lambda: inbound._inbound is None)
        return send(*args, **options)

    target.mover.connect(["a"])
    wait_for(lambda: target.mover._attached.links._peers["a"].last)
    monkeypatch.setattr("kvray.actors.mover.fenced_slots.PATIENCE_S", 0.0)
    monkeypatch.setattr(nixl.NixlTransport, "send", cut)
    try:
        report = target.fetch(span("a", keys))
    finally:
        may_go_on.set()
    assert (report.here, report.sources["a"].error) == ((0,), "TransportUnavailable")
    assert target.mover.status()["failing_links"] == []


def test_mover_waits_for_an_arena(directory):
    mover = Mover("m", directory, SETTINGS, Movers({}), lock_wait_s=0.5)
    mover.start()
    report = mover.fetch(FetchOrder(spans=(span("a", chain(2)),), deadline_s=1.0))
    assert report.here == (0,)
    assert report.sources["a"].error == "CapacityError", "no source is to blame"
    assert mover.status()["state"] == "waiting"
    mover.stop()
    mover.stop()


def test_mover_ends_when_its_arena_was_given_up(source):
    ArenaOwner(source.arena).retire()
    wait_for(lambda: source.ended == 1)


def test_mover_that_was_stopped_holds_nothing(source, target, keys):
    source.mover.lease(_request(target, keys))
    assert source.num_leases == 1
    source.mover.stop()
    source.mover.stop()
    assert source.num_leases == 0
    assert source.fetch(span("b", keys)).sources["b"].error == "CapacityError"


def test_slots_stay_reserved_while_a_fetch_of_a_stopped_mover_writes_them(make_node, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)  # its transport needs no more here
    source, target = (make_node(name, transports=("object_ref",)) for name in "ab")
    keys, has_begun, may_go_on = chain(10), threading.Event(), threading.Event()
    store(source.arena, keys)

    def slow(*_: Any) -> None:
        has_begun.set()
        assert may_go_on.wait(60)

    monkeypatch.setattr(target.mover._attached.transports["object_ref"], "receive", slow)
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(target.fetch, span("a", keys, **EXPECTED))
        assert has_begun.wait(60)
        target.mover.stop()
        num_reserved = target.num_reserved
        may_go_on.set()
        fetch.exception(60)
    assert num_reserved == 10, "until its process has ended"


def _request(target: Node, keys: list[Any], **changes: Any) -> LeaseRequest:
    asked = {"lease_s": SETTINGS.lease_s, "addresses": _addresses(target), "timeout_s": 1.0}
    asked["groups"] = (LeaseGroup(part=0, keys=b"".join(keys)),)
    return LeaseRequest(**asked | changes)


def _addresses(node: Node) -> dict[str, bytes]:
    attached = node.mover._attached
    return {name: one.address for name, one in attached.transports.items()}


def test_leased_blocks_cannot_be_evicted(source, target, keys):
    lease = source.mover.lease(_request(target, keys, lease_s=60.0))
    assert len(lease.groups[0].sizes) == 10
    ArenaOwner(source.arena).clear()
    assert num_here(source.arena, keys) == 10
    source.mover.release(lease.token)
    ArenaOwner(source.arena).clear()
    assert num_here(source.arena, keys) == 0


@pytest.mark.parametrize(
    ("given_s", "asked_s"),
    [(SETTINGS.lease_s, 1.0), pytest.param(1.0, 1e6, id="no longer than the source gives")],
)
def test_a_read_lease_ends_unless_sends_renew_it(make_node, target, given_s, asked_s):
    source, keys = make_node("a", lease_s=given_s), chain(10)
    store(source.arena, keys)
    lease = source.mover.lease(_request(target, keys, lease_s=asked_s))
    for _ in range(6):
        time.sleep(0.3)
        source.mover.send(_nothing(lease.token))
    assert source.num_leases == 1
    wait_for(lambda: source.num_leases == 0)
    with pytest.raises(LeaseExpired):
        source.mover.send(_nothing(lease.token))


def test_a_mover_that_was_started_again_sends_nothing_for_a_lease_from_before(
    source, target, make_node, keys
):
    before = source.mover.lease(_request(target, keys)).token
    source.mover.stop()
    source.start()
    source.mover.lease(_request(make_node("c"), keys))
    with pytest.raises(LeaseExpired):  # else its blocks went to the other node
        source.mover.send(_nothing(before))


def test_a_request_that_fails_half_way_leaves_no_lease(source, target, keys):
    groups = (LeaseGroup(part=0, keys=b"".join(keys)), LeaseGroup(part=0, keys=b"no key"))
    with pytest.raises(ConfigError):
        source.mover.lease(_request(target, [], groups=groups))
    assert source.num_leases == 0


def test_read_leases_are_bounded(source, target):
    for _ in range(READ_LEASES_MAX):
        source.mover.lease(_request(target, []))
    with pytest.raises(CapacityError, match="read leases for others"):
        source.mover.lease(_request(target, []))


def test_transport_is_the_first_of_the_asker_that_both_have(source, target):
    addresses = {"pigeons": b"", **_addresses(target)}
    assert source.mover.lease(_request(target, [], addresses=addresses)).transport == "nixl"
    with pytest.raises(TransportUnavailable, match="pigeons"):
        source.mover.lease(_request(target, [], addresses={"pigeons": b""}))


def test_blocks_stay_until_ray_has_copied_them(make_node, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)  # its transport needs no more here
    source, target = (make_node(name, transports=("object_ref",)) for name in "ab")
    keys, lease = chain(10), source.mover.lease
    store(source.arena, keys)

    def slow(request: LeaseRequest) -> Any:  # Ray copies what a method has returned
        answer = lease(request)
        ArenaOwner(source.arena).clear()
        store(source.arena, chain(100, seed="others"))
        return answer

    monkeypatch.setattr(source.mover, "lease", slow)
    report = target.fetch(span("a", keys, **EXPECTED))
    assert (report.here, report.sources["a"].corrupt) == ((10,), 0)
    assert source.num_leases == 0


def _nothing(token: int) -> SendOrder:
    return SendOrder(token=token, blocks=b"", targets=b"", timeout_s=1.0)


MiB = 2**20


@pytest.mark.parametrize(
    ("most", "moved", "steps"),
    [
        pytest.param(128, [], [FIRST_BYTES // MiB], id="it begins with a small one"),
        pytest.param(128, [(FIRST_BYTES / MiB, 0.001)], [128], id="a fast way gets the largest"),
        pytest.param(128, [(16, 0.2)], [8], id="a slow way gets what takes a moment"),
        pytest.param(128, [(16, 0.2), (8, 10.0)], [4], id="a slower one gets less"),
        pytest.param(2, [(2, 0.0)], [2], id="never more than the transport likes"),
        pytest.param(
            *(128, [(FIRST_BYTES / MiB, 0.001)], [128, 128, 128, 64, 64]),
            id="pieces grow smaller towards the end",
        ),
    ],
)
def test_pieces_are_as_large_as_their_way_is_fast(most, moved, steps):
    pace = Pace(most_bytes=most * MiB)
    for size, seconds in moved:
        pace.note(int(size * MiB), seconds)
    left = 1024 * MiB if len(steps) == 1 else sum(steps) * MiB
    for step in steps:
        assert min(left, pace.step(left)) == step * MiB
        left -= step * MiB


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 2**40), st.floats(0, 100)), max_size=20), st.data())
def test_every_step_moves_something(notes, data):
    pace = Pace(most_bytes=data.draw(st.integers(1, 2**30)))
    for num_bytes, seconds in notes:
        pace.note(num_bytes, seconds)
        assert 0 < pace.step(data.draw(st.integers(0, 2**40))) <= 2**30
