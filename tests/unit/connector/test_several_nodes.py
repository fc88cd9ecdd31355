"""An engine with a rank on each of two nodes promises what both have, and each ends its leases."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from kvray.errors import ConfigError, LeaseExpired
from kvray.store.arena.layout import READY
from tests.kit.connector import BLOCK, HIT, NUM_WANTED, PROMPT, Request, flip_a_byte
from tests.kit.two_nodes import NAMES, SpreadReplica, TwoNodes

MakeReplica = Callable[..., SpreadReplica]


@pytest.fixture
def make_replica(nodes: TwoNodes) -> Iterator[MakeReplica]:
    """Make engines that end with the test, and whose leases end before they do."""
    made: list[SpreadReplica] = []

    def make(*, meets: bool = True, **changes: Any) -> SpreadReplica:
        made.append(SpreadReplica(nodes, **changes))
        if meets:
            made[-1].meet(nodes)
        return made[-1]

    yield make
    nodes.wait_for_release()
    for one in made:
        one.close()


@pytest.fixture
def stored(make_replica: MakeReplica) -> SpreadReplica:
    one = make_replica()
    one.serve(Request(1, PROMPT))
    one.flush()
    return one


def test_a_fresh_engine_loads_on_every_node_what_another_stored_there(stored, make_replica):
    fresh = make_replica()
    assert fresh.serve(Request(2, PROMPT)) == HIT
    assert [rank.totals["loaded_blocks"] for rank in fresh.ranks] == [NUM_WANTED] * 2


def test_nothing_is_promised_before_all_ranks_are_known(stored, make_replica):
    fresh = make_replica(meets=False)
    assert fresh.query(Request(2, PROMPT)) == 0
    assert fresh.totals["miss_tokens_store_down"] == HIT


@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("how", ["lost", "corrupt"])
def test_the_shortest_prefix_of_all_nodes_is_promised(stored, make_replica, loser, how):
    arena = stored.arenas[loser]
    if how == "lost":
        slots = arena.tables.slots_in(READY)
        arena.quarantine(slots[arena.tables.slot_depth[slots] >= 4])
    else:
        flip_a_byte(arena, depth=4)
    fresh = make_replica()
    assert fresh.serve(Request(2, PROMPT)) == 4 * BLOCK
    assert fresh.totals["miss_tokens_corrupt"] == (how == "corrupt") * (NUM_WANTED - 4) * BLOCK
    fresh.flush()
    assert make_replica().serve(Request(3, PROMPT)) == HIT


@pytest.mark.parametrize("how", ["not used", "request_finished", "request_reset", "not taken"])
def test_a_promise_that_a_request_goes_without_is_released_with_the_next_pass(nodes, stored, how):
    request = Request(2, PROMPT)
    for _ in range(3):  # asking again replaces it
        assert stored.query(request) == HIT
    nodes.drop_handovers()
    assert nodes.leased() == [NUM_WANTED] * 2
    if how == "not taken":
        assert stored.plan(request, accepted=False).loads == ()
    elif how != "not used":
        getattr(stored.scheduler, how)(request, *([[]] if how == "request_finished" else []))
    assert len(stored.pass_on().releases) == (0 if how == "not taken" else 3)


def test_a_node_that_is_away_means_no_promise_and_no_lease(nodes, stored):
    nodes.gone.add(NAMES[1])
    assert stored.query(Request(2, PROMPT)) == 0
    assert stored.totals["miss_tokens_store_down"] == HIT


@pytest.mark.parametrize("is_busy", [True, False], ids=["a busy arena", "a defect"])
def test_a_leader_that_cannot_lease_gives_the_other_leases_back(stored, monkeypatch, is_busy):
    lease = mock.Mock(return_value=None, side_effect=None if is_busy else ZeroDivisionError)
    with monkeypatch.context() as patch:
        patch.setattr(stored.arenas[0], "lease_for", lease)
        assert stored.query(Request(2, PROMPT)) == 0
    assert stored.totals["miss_tokens_arena_busy"] == is_busy * HIT
    stored.pass_on()


def test_leases_whose_answer_was_lost_are_ended_with_the_next_call(nodes, stored, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("kvray.node.stage_calls._read", mock.Mock(side_effect=ValueError))
        assert stored.query(Request(2, PROMPT)) == 0
    nodes.drop_handovers()
    assert nodes.leased() == [0, NUM_WANTED]
    assert stored.query(Request(3, list(range(20)))) == 0


def test_a_rank_whose_arena_is_not_the_named_one_stops_the_engine(stored, monkeypatch):
    request = Request(2, PROMPT)
    stored.query(request)
    with monkeypatch.context() as patch:
        patch.setattr(stored.follower.engine.link, "arena_named", lambda _: None)
        with pytest.raises(LeaseExpired, match="gpus_per_node"):
            stored.plan(request)
    stored.close()


def test_an_engine_that_does_not_say_that_it_is_spread_is_found_out(stored, make_replica, caplog):
    silent = make_replica(is_spread=False)
    assert silent.serve(Request(2, PROMPT)) == 0
    assert caplog.text.count("set gpus_per_node") == 1
    assert silent.serve(Request(3, PROMPT)) == HIT


def test_an_engine_that_would_never_wait_for_the_shards_is_refused(make_replica, monkeypatch):
    monkeypatch.setenv("KVRAY_CONNECTOR__STAGE_WAIT_S", "0")
    with pytest.raises(ConfigError, match="2 ranks, 1 on a node"):
        make_replica(meets=False)


def test_the_end_of_an_engine_ends_its_leases_on_every_node(stored):
    stored.query(Request(2, PROMPT))
    stored.close()
