"""Calls over Ray: large arguments come in pieces, and Ray's own errors are the tier's sentences."""

import random
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest
from ray._private.state import state
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from kvray.actors.lookup.actor import LookupActor
from kvray.actors.mover.actor import MoverActor
from kvray.actors.mover.orders import FetchOrder, LeaseGroup, LeaseRequest, Span
from kvray.actors.ray_glue import calls
from kvray.actors.ray_glue.arguments import in_pieces, packed, unpacked
from kvray.actors.ray_glue.private import draining_nodes
from kvray.actors.shard.actor import ShardActor
from kvray.actors.supervisor.supervisor import SupervisorActor
from kvray.errors import ShardUnavailable


def order(num_blocks: int) -> FetchOrder:
    span = Span(source="kvray-mover-b", part=0, keys=bytes(32 * num_blocks), parent=b"", depth=0)
    return FetchOrder(spans=(span,), deadline_s=3.0)


@pytest.mark.parametrize(
    "large",
    [
        *map(order, (2048, 4096, 20_000)),
        LeaseRequest(
            groups=(LeaseGroup(part=0, keys=bytes(2**18)),),
            lease_s=1.0,
            addresses={"nixl": b"a"},
            timeout_s=1.0,
        ),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_large_one_comes_in_pieces_that_are_sent_with_the_call(large):
    assert packed(order(10)) == [unpacked(order(10))] == [order(10)], "a small one stays as it is"
    sent = packed(large)
    assert len(sent) > 1
    assert all(len(piece) < 100 * 2**10 for piece in sent)
    assert unpacked(*sent) == large


@pytest.mark.parametrize("num_bytes", [0, 1, 2**16, 2**16 + 1, 200_000])
def test_pieces_of_bytes_are_all_of_them(num_bytes):
    data = random.Random(0).randbytes(num_bytes)
    pieces = in_pieces(data)
    assert pieces
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) < 100 * 2**10, "Ray sends them with the call"


def test_a_head_that_does_not_answer_when_an_actor_is_looked_up_is_a_sentence(monkeypatch):
    late = GetTimeoutError("Failed to get the actor: is the GCS server dead?")
    monkeypatch.setattr(calls, "current_namespace", lambda: "kvray-prod")
    monkeypatch.setattr("ray.get_actor", Mock(side_effect=late))
    with pytest.raises(ShardUnavailable, match="did not answer in time"):
        calls.get_actor("kvray-lookup")


def test_an_actor_that_is_gone_is_a_sentence_with_a_remedy():
    gone = ActorUnavailableError("RPC error: failed to connect; last error: refused.", None)
    with pytest.raises(ShardUnavailable, match=r"last error: refused.*; .* run `kvray down`, then"):
        with calls.mapped_errors():
            raise gone


@pytest.mark.parametrize(("why", "says"), [("", "The actor died unexpectedly"), ("It left.",) * 2])
def test_of_an_actor_that_died_is_said_why_if_ray_knows_it(why, says):
    error = ActorDiedError(ActorDiedErrorContext(actor_id=bytes(16), error_message=why))
    assert calls.in_short(error).startswith(says)


def test_a_node_has_the_time_that_ray_gives_and_any_if_it_lives_on_after_that(monkeypatch):
    now_ms = 1000 * time.time()
    found = {"a": int(now_ms + 90_000), "late": int(now_ms - 300_000), "without a deadline": 0}
    monkeypatch.setattr(state, "get_draining_nodes", lambda: found)
    left_s = pytest.approx(90, abs=60)
    assert draining_nodes() == {"a": left_s, "late": None, "without a deadline": None}


@pytest.mark.parametrize("actor", [LookupActor, MoverActor, ShardActor, SupervisorActor])
def test_an_actor_has_no_repr_that_would_end_rays_stand_in_for_it(actor):
    assert actor.__repr__ is object.__repr__


@pytest.mark.root
def test_all_threads_of_a_part_come_as_soon_as_those_of_its_raylet():
    code = """if True:
        import os, threading
        from kvray.actors.ray_glue.calls import _take_priority_of
        end, own = threading.Event(), os.nice(0)
        os.nice(3)
        threading.Thread(target=end.wait).start()
        threads = [*map(int, os.listdir("/proc/self/task"))]
        _take_priority_of(os.getppid())
        print(len(threads) > 1, {os.getpriority(os.PRIO_PROCESS, one) - own for one in threads})
        end.set()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True {0}\n"
