"""An engine with a rank on each of two nodes promises what both have, and each ends its leases."""

import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvray.breaker import Breaker
from kvray.connector.base import SchedulerOutput
from kvray.engine import prefix_finder
from kvray.errors import ConfigError, LeaseExpired
from kvray.node import link as link_module
from kvray.store import Arena
from tests.unit.connector.pair import BLOCK, Request
from tests.unit.connector.test_layer_groups import GroupedEngine
from tests.unit.connector.test_layer_groups import Request as GroupedRequest
from tests.unit.connector.test_scheduler import flip_a_byte
from tests.unit.connector.two_nodes import NAMES, SpreadReplica, TwoNodes
from tests.waiting import wait_for

PROMPT = list(range(100, 140))
NUM_WANTED = (len(PROMPT) - 1) // BLOCK

MakeReplica = Callable[..., SpreadReplica]


@pytest.fixture(scope="module")
def running_nodes() -> Iterator[TwoNodes]:
    parent = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    before = dict(os.environ)
    os.environ.update(
        {
            "KVRAY_ARENA__CAPACITY": "1MiB",
            "KVRAY_ARENA__SLAB": "64KiB",
            "KVRAY_ARENA__SLOT_MIN": "4KiB",
            "KVRAY_ARENA__LOCK_WAIT_S": "1",
            "KVRAY_SHARD__HEARTBEAT_S": "0.05",
            "KVRAY_STAGING__HANDOVER_S": "0.1",
            "KVRAY_CONNECTOR__MODEL_KEY": "tiny",
            "KVRAY_CONNECTOR__ATTACH_RETRY_S": "0.02",
            "KVRAY_CONNECTOR__STAGE_WAIT_S": "5",
        }
    )
    made = TwoNodes(parent)
    yield made
    made.close()
    os.environ.clear()
    os.environ.update(before)
    shutil.rmtree(parent)


@pytest.fixture
def nodes(running_nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> TwoNodes:
    """Nodes whose arenas are empty."""
    monkeypatch.setattr(link_module, "_REPORT_S", 0.02)
    monkeypatch.setattr(Breaker, "state", lambda *_: "closed")
    monkeypatch.setattr(prefix_finder, "_ABSENT_S", 0.0)
    running_nodes.gone.clear()
    running_nodes.clear()
    return running_nodes


@pytest.fixture
def make_replica(nodes: TwoNodes) -> Iterator[MakeReplica]:
    """Make engines that end with the test."""
    made: list[SpreadReplica] = []

    def make(*, meets: bool = True, **changes: Any) -> SpreadReplica:
        made.append(SpreadReplica(nodes, **changes))
        if meets:
            made[-1].meet(nodes)
        return made[-1]

    yield make
    for one in made:
        one.close()
    wait_for(lambda: nodes.leased() == [0, 0], "the end of every lease with its engine")


@pytest.fixture
def stored(make_replica: MakeReplica) -> SpreadReplica:
    """An engine that has stored the prompt on both nodes."""
    one = make_replica()
    one.serve(Request(1, PROMPT))
    one.flush()
    return one


def released(nodes: TwoNodes) -> None:
    wait_for(lambda: nodes.leased() == [0, 0], "the end of every lease")


def drop_blocks(arena: Arena, num_kept: int) -> None:
    """Have a node lose what follows the first blocks."""
    tables = arena.tables
    lost = ((tables.slot_depth >= num_kept) & (tables.slot_state == 2)).nonzero()[0]
    arena.quarantine(lost)


def test_a_fresh_engine_loads_on_every_node_what_another_stored_there(
    nodes: TwoNodes, stored: SpreadReplica, make_replica: MakeReplica
) -> None:
    fresh = make_replica()
    assert fresh.serve(Request(2, PROMPT)) == NUM_WANTED * BLOCK
    assert [one._rank.shared.figures.totals["loaded_blocks"] for one in fresh.workers] == [
        NUM_WANTED
    ] * 2
    released(nodes)


def test_the_ranks_are_told_of_their_own_arenas(
    nodes: TwoNodes, stored: SpreadReplica, make_replica: MakeReplica
) -> None:
    fresh = make_replica()
    fresh.serve(Request(2, [*PROMPT, *range(8)]))
    (load,) = fresh.sent[-1].loads
    assert load.leased.arena_ids == tuple(arena.arena_id for arena in fresh.arenas)


def test_nothing_is_promised_before_all_ranks_are_known(
    nodes: TwoNodes, stored: SpreadReplica, make_replica: MakeReplica
) -> None:
    fresh = make_replica(meets=False)
    assert fresh.query(Request(2, PROMPT)) == (0, False)
    assert fresh.engine.figures.totals["miss_tokens_store_down"] == NUM_WANTED * BLOCK


def test_ranks_of_one_engine_have_its_leaders_name_after_a_pass(
    nodes: TwoNodes, make_replica: MakeReplica
) -> None:
    replica = make_replica(meets=False)
    first, second = (worker._rank.shared for worker in replica.workers)
    assert first.pool.replica != second.pool.replica
    replica.meet(nodes)
    assert first.pool.replica == second.pool.replica


@pytest.mark.parametrize("loser", [0, 1])
def test_the_shortest_prefix_of_all_nodes_is_promised(
    nodes: TwoNodes, stored: SpreadReplica, make_replica: MakeReplica, loser: int
) -> None:
    drop_blocks(stored.arenas[loser], num_kept=4)
    fresh = make_replica()
    assert fresh.serve(Request(2, PROMPT)) == 4 * BLOCK
    fresh.flush()
    assert make_replica().serve(Request(3, PROMPT)) == NUM_WANTED * BLOCK
    released(nodes)


@pytest.mark.parametrize("loser", [0, 1])
def test_a_flipped_byte_on_any_node_is_a_shorter_hit_and_no_dead_engine(
    nodes: TwoNodes, stored: SpreadReplica, make_replica: MakeReplica, loser: int
) -> None:
    flip_a_byte(stored.arenas[loser], depth=4)
    fresh = make_replica()
    assert fresh.serve(Request(2, PROMPT)) == 4 * BLOCK
    missed = (NUM_WANTED - 4) * BLOCK
    assert fresh.engine.figures.totals["miss_tokens_corrupt"] == missed
    fresh.flush()
    assert make_replica().serve(Request(3, PROMPT)) == NUM_WANTED * BLOCK
    released(nodes)


def test_what_the_engine_has_itself_is_not_promised_and_not_leased(
    nodes: TwoNodes, stored: SpreadReplica
) -> None:
    drop_blocks(stored.arenas[1], num_kept=4)
    assert stored.query(Request(2, PROMPT), computed=4 * BLOCK) == (0, False)
    stored.do(SchedulerOutput())
    released(nodes)


def test_a_promise_that_is_not_used_is_released_on_every_node(
    nodes: TwoNodes, stored: SpreadReplica
) -> None:
    assert stored.query(Request(2, PROMPT)) == (NUM_WANTED * BLOCK, False)
    nodes.drop_handovers()
    assert nodes.leased() == [NUM_WANTED] * 2
    stored.do(SchedulerOutput())
    released(nodes)
    assert len(stored.sent[-1].releases) == 1


@pytest.mark.parametrize("how", ["request_finished", "request_reset"])
def test_a_promise_of_a_request_that_ends_is_released_with_the_next_pass(
    nodes: TwoNodes, stored: SpreadReplica, how: str
) -> None:
    request = Request(2, PROMPT)
    stored.query(request)
    getattr(stored.scheduler, how)(request, *([[]] if how == "request_finished" else []))
    stored.do(SchedulerOutput())
    released(nodes)


def test_asking_again_replaces_the_promise_on_every_node(
    nodes: TwoNodes, stored: SpreadReplica
) -> None:
    for _ in range(3):
        stored.query(Request(2, PROMPT))
    stored.do(SchedulerOutput())
    released(nodes)


def test_an_offer_that_was_not_taken_is_released_on_every_node(
    nodes: TwoNodes, stored: SpreadReplica
) -> None:
    request = Request(2, PROMPT)
    stored.query(request)
    stored.plan(request, position=-request.matched)
    assert stored.sent[-1].loads == ()
    stored.do(SchedulerOutput())
    released(nodes)


def test_an_offer_that_was_taken_in_part_is_loaded_in_part(
    nodes: TwoNodes, stored: SpreadReplica
) -> None:
    request = Request(2, PROMPT)
    stored.query(request)
    stored.scheduler.cancel_load(request, 5 * BLOCK, NUM_WANTED * BLOCK)
    stored.plan(request)
    stored.check(request, 5 * BLOCK)
    released(nodes)


def test_a_node_that_is_away_means_no_promise_and_no_lease(
    nodes: TwoNodes, stored: SpreadReplica
) -> None:
    nodes.gone.add(NAMES[1])
    assert stored.query(Request(2, PROMPT)) == (0, False)
    assert stored.engine.figures.totals["miss_tokens_store_down"] == NUM_WANTED * BLOCK
    released(nodes)


def test_a_leader_whose_own_arena_is_busy_gives_the_other_leases_back(
    nodes: TwoNodes, stored: SpreadReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored.arenas[0], "lease_for", lambda *_, **__: None)
    assert stored.query(Request(2, PROMPT)) == (0, False)
    assert stored.engine.figures.totals["miss_tokens_arena_busy"] == NUM_WANTED * BLOCK
    stored.do(SchedulerOutput())
    released(nodes)


def test_a_defect_while_the_leader_leases_gives_the_other_leases_back(
    nodes: TwoNodes, stored: SpreadReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(stored.arenas[0], "lease_for", lambda *_, **__: 1 // 0)
        assert stored.query(Request(2, PROMPT)) == (0, False)
    stored.do(SchedulerOutput())
    released(nodes)


def test_leases_whose_answer_was_lost_are_ended_with_the_next_call(
    nodes: TwoNodes, stored: SpreadReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object, **__: object) -> None:
        raise ValueError

    with monkeypatch.context() as patch:
        patch.setattr("kvray.node.stage_calls._read", lose)
        assert stored.query(Request(2, PROMPT)) == (0, False)
    nodes.drop_handovers()
    assert nodes.leased() == [0, NUM_WANTED]
    assert stored.query(Request(3, list(range(20)))) == (0, False)
    released(nodes)


def test_a_rank_whose_arena_is_not_the_named_one_stops_the_engine_if_it_counts_on_it(
    nodes: TwoNodes, stored: SpreadReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(2, PROMPT)
    stored.query(request)
    with monkeypatch.context() as patch:
        patch.setattr(stored.workers[1]._rank.shared.link, "arena_named", lambda _: None)
        with pytest.raises(LeaseExpired, match="gpus_per_node"):
            stored.plan(request)


def test_an_engine_that_does_not_say_that_it_is_spread_is_found_out(
    nodes: TwoNodes,
    stored: SpreadReplica,
    make_replica: MakeReplica,
    caplog: pytest.LogCaptureFixture,
) -> None:
    silent = make_replica(is_spread=False)
    assert silent.serve(Request(2, PROMPT)) == 0
    assert caplog.text.count("set gpus_per_node") == 1
    assert silent.serve(Request(3, PROMPT)) == NUM_WANTED * BLOCK
    released(nodes)


def test_an_engine_that_would_never_wait_for_the_shards_is_refused(
    nodes: TwoNodes, make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRAY_CONNECTOR__STAGE_WAIT_S", "0")
    with pytest.raises(ConfigError, match="2 ranks, 1 on a node"):
        make_replica(meets=False)


def test_the_end_of_an_engine_ends_its_leases_on_every_node(
    nodes: TwoNodes, stored: SpreadReplica
) -> None:
    stored.query(Request(2, PROMPT))
    stored.close()
    released(nodes)


# -- windows and shared bytes ---------------------------------------------------------------------


class SpreadGroups:
    """An engine of two ranks with layer groups, one rank on each node."""

    def __init__(self, nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks: list[GroupedEngine] = []
        for rank, directory in enumerate(nodes.directories):
            monkeypatch.setenv("KVRAY_ARENA__DIR", str(directory))
            mapping = SimpleNamespace(rank=rank)
            parallel = SimpleNamespace(to_mapping=lambda mapping=mapping: mapping)
            self.ranks.append(
                GroupedEngine(tensor_parallel_size=2, gpus_per_node=1, parallel_config=parallel)
            )
        self.leader, self.follower = self.ranks

    def run(self, request: GroupedRequest, *, taken: int) -> None:
        meta = pickle.loads(pickle.dumps(self.leader.run(request, taken=taken)))  # noqa: S301
        worker = self.follower.worker
        worker.bind_connector_meta(meta)
        worker.start_load_kv(None)
        for block in range(taken // BLOCK, len(request.tokens) // BLOCK):
            self.follower.fill(request, block)
        worker.wait_for_save(None)

    def store(self, nodes: TwoNodes, *, window_from: int) -> None:
        """Store the prompt on both nodes, by the pass that gives both ranks one name."""
        request = GroupedRequest(1, PROMPT)
        assert self.leader.query(request) == 0
        self.leader.give_pages(request, window_from=window_from)
        self.run(request, taken=0)
        for one in self.ranks:
            one.flush()
        engine, lookup = self.leader.worker._rank.shared, nodes.line.lookup
        wait_for(
            lambda: (
                len(lookup.replica(engine.pool.replica, time.monotonic())) == 2 and engine.may_stage
            ),
            "the ranks' registration",
        )


@pytest.fixture
def groups(nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpreadGroups]:
    made = SpreadGroups(nodes, monkeypatch)
    yield made
    for one in made.ranks:
        one.close()
    released(nodes)


def test_windows_and_what_all_ranks_share_are_loaded_on_every_node(
    nodes: TwoNodes, groups: SpreadGroups
) -> None:
    groups.store(nodes, window_from=0)
    request = GroupedRequest(2, PROMPT)
    assert groups.leader.query(request) == NUM_WANTED * BLOCK
    groups.leader.give_pages(request, window_from=6)
    groups.run(request, taken=NUM_WANTED * BLOCK)
    for one in groups.ranks:
        assert [one.has(request, block)[0] for block in range(9)] == [True] * 9
        assert [one.has(request, block)[1] for block in range(6, 9)] == [True] * 3
    released(nodes)


def test_a_prefix_counts_only_where_its_last_window_is_on_every_node(
    nodes: TwoNodes, groups: SpreadGroups
) -> None:
    groups.store(nodes, window_from=7)
    # Of the prompt's 10 blocks the window group has 7, 8 and 9; a prefix of 9 needs 6, 7 and 8.
    assert groups.leader.query(GroupedRequest(2, PROMPT)) == 0
    assert groups.leader.query(GroupedRequest(3, [*PROMPT, 1])) == 10 * BLOCK


@pytest.mark.parametrize("taken", [0, 1, 4, 8])
def test_an_offer_with_windows_that_is_taken_in_part_is_leased_again_on_every_node(
    nodes: TwoNodes, groups: SpreadGroups, taken: int
) -> None:
    groups.store(nodes, window_from=0)
    request = GroupedRequest(2, PROMPT)
    assert groups.leader.query(request) == NUM_WANTED * BLOCK
    groups.leader.give_pages(request)
    groups.run(request, taken=taken * BLOCK)
    for one in groups.ranks:
        assert all(all(one.has(request, block)) for block in range(max(0, taken - 3), 10))
    groups.leader.scheduler.request_finished(request, [])
    meta = groups.leader.scheduler.build_connector_meta(SchedulerOutput())
    groups.follower.worker.bind_connector_meta(meta)
    groups.follower.worker.start_load_kv(None)
    released(nodes)


def test_a_part_of_an_offer_whose_window_is_nowhere_stops_the_engine(
    nodes: TwoNodes, groups: SpreadGroups
) -> None:
    groups.store(nodes, window_from=7)
    request = GroupedRequest(2, [*PROMPT, 1])
    assert groups.leader.query(request) == 10 * BLOCK
    groups.leader.give_pages(request)
    with pytest.raises(LeaseExpired, match="last window"):
        groups.run(request, taken=6 * BLOCK)
