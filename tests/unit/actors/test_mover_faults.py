import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from kvray.actors.mover.orders import FetchReport
from kvray.identity.block import BlockKey
from kvray.store import ArenaOwner
from kvray.store.arena import payload
from kvray.store.arena.layout import READY
from kvray.transport.nixl import NixlTransport
from tests.unit.actors.small_mover import MakeNode, Node, is_right, span
from tests.unit.store.small_arena import chain, store
from tests.waiting import HANG_S, wait_for

BLOCK = 1 << 20
LARGE = {"num_slabs": 64, "slots_per_slab": 256}
"""An arena of 64 blocks of 1 MiB: fetches that take long enough to be stopped."""
HURRIED = {"call_timeout_s": 2.0, "lease_s": 2.0}
"""Of a node that is to find out that another one is silent."""


@pytest.fixture
def pusher(make_node: MakeNode) -> Node:
    """A node whose mover is in another process."""
    return make_node("a", asked=LARGE, is_far=True)


@pytest.fixture
def target(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(NixlTransport, "piece_bytes", 2 * BLOCK)  # so that there are many
    return make_node("b", asked=LARGE, **HURRIED)


@pytest.fixture
def keys(pusher: Node) -> list[BlockKey]:
    """Sixty blocks that the pusher has."""
    made = chain(60)
    store(pusher.arena, made, block_bytes=BLOCK)
    return made


@pytest.fixture
def begin(target: Node) -> Iterator[Callable[..., "Future[FetchReport]"]]:
    """Begins a fetch of what the pusher has, and returns once slots of the target are reserved."""
    with ThreadPoolExecutor(1) as pool:

        def begin(keys: list[BlockKey], deadline_s: float) -> "Future[FetchReport]":
            wanted = span("a", keys, block_bytes=BLOCK)
            future = pool.submit(target.fetch, wanted, deadline_s=deadline_s)
            wait_for(lambda: target.num_reserved > 0 or future.done())
            return future

        yield begin


@pytest.mark.parametrize(("num_ready", "delay_s"), [(0, 0.0), (0, 0.01), (2, 0.0), (2, 0.005)])
def test_pusher_that_wakes_changes_no_ready_slot(pusher, target, keys, begin, num_ready, delay_s):
    first = chain(1, seed="first")  # so that the next fetch finds everything ready
    store(pusher.arena, first, block_bytes=BLOCK)
    assert target.fetch(span("a", first)).here == (1,)
    fetch = begin(keys, deadline_s=1.0)
    wait_for(lambda: target.num_ready >= num_ready)
    time.sleep(delay_s)
    pusher.far.freeze()
    report = fetch.result()
    assert target.mover.status()["fenced_slots_total"] > 0
    assert report.here[0] < 60
    assert report.sources["a"].error is not None
    ArenaOwner(target.arena).adopt()  # the shard there is killed and comes back meanwhile
    wait_for(lambda: target.num_reserved == 0)  # behind the fence: until then they are no one's
    status = target.mover.status()
    assert (status["fenced_slots"], status["transports"]["nixl"]["incarnation"]) == (0, 1)
    # What was in doubt is free again, and all of it is given to others.
    others = chain(64 - target.num_ready, seed="others")
    store(target.arena, others, block_bytes=BLOCK)
    tables = target.arena.tables
    before = payload.sum_slots(tables, tables.slots_in(READY))
    assert len(before) == 64
    pusher.far.wake()
    time.sleep(1.0)
    ready = tables.slots_in(READY)
    np.testing.assert_array_equal(payload.sum_slots(tables, ready), before)
    assert payload.verify(tables, ready).all()


def test_blocks_come_again_from_a_pusher_that_woke(pusher, target, keys):
    pusher.far.freeze()
    began = time.monotonic()
    report = target.fetch(span("a", keys, block_bytes=BLOCK), deadline_s=0.5)
    assert time.monotonic() - began < 5
    assert report.here == (0,)
    assert report.sources["a"].error == "ShardUnavailable"
    pusher.far.wake()
    wait_for(lambda: target.fetch(span("a", keys, block_bytes=BLOCK)).here == (60,))
    assert is_right(target.arena, keys, block_bytes=BLOCK)


def test_dead_pusher_ends_a_fetch_at_once_and_its_leases_end_with_it(pusher, target, keys, begin):
    fetch = begin(keys, deadline_s=60)
    wait_for(lambda: pusher.num_leases > 0)  # slots are reserved before the request is sent
    pusher.far.kill()
    here = fetch.result(HANG_S).here[0]
    assert is_right(target.arena, keys[:here], block_bytes=BLOCK)
    wait_for(lambda: target.num_reserved == 0)
    ArenaOwner(pusher.arena).bury_dead(limbo_s=0)
    assert pusher.num_leases == 0


def test_other_fetches_fail_for_a_fence_and_come_again(pusher, target, keys, begin, make_node):
    valid, kept = make_node("c", asked=LARGE), chain(20, seed="kept")
    store(valid.arena, kept, block_bytes=BLOCK)
    fetch = begin(keys[:20], deadline_s=0.5)
    pusher.far.freeze()
    deadline = time.monotonic() + 10
    while target.fetch(span("c", kept)).here != (20,):
        assert time.monotonic() < deadline
    fetch.result()
    wait_for(lambda: target.num_reserved == 0)
    assert is_right(target.arena, kept, block_bytes=BLOCK)
    pusher.far.wake()
