"""Weights that are replaced in a running engine: blocks of one version never answer for another."""

import threading

import pytest

from kvray.actors.shard.shard import Shard
from kvray.engine.request import PassReport
from kvray.errors import ShardUnavailable
from kvray.node import NodeLink
from kvray.node import link as link_module
from tests.kit.apart import BLOCK, Apart
from tests.kit.connector import HIT, PROMPT
from tests.unit.engine.conftest import MakeEngine
from tests.waiting import wait_for

OTHER = list(range(200, 240))
WAIT_S = 30.0


def name(engine: Apart, version: str | None) -> None:
    """Tell the engine as the shard does: each of its processes hears of it by itself."""
    for shared in (engine.leader.shared, engine.rank.shared):
        shared.name_weights(version)


def stored_of(engine: Apart) -> int:
    wait_for(lambda: not engine.rank.shared.pending_reads._counts, "the saves")
    return engine.rank.shared.figures.totals["stored_blocks"]


def test_blocks_of_one_version_do_not_answer_for_another(make_engine):
    engine, other = make_engine(), make_engine()
    assert engine.serve(PROMPT) == 0
    name(engine, "2")
    assert engine.serve(PROMPT) == 0
    assert engine.serve(PROMPT) == HIT
    assert other.serve(PROMPT) == HIT  # with the checkpoint's weights, as `engine` had them
    name(other, "2")
    assert other.serve(PROMPT) == HIT
    name(other, "3")
    assert other.serve(PROMPT) == 0


def test_an_engine_without_a_version_is_off_the_tier(engine):
    engine.serve(PROMPT)
    before = stored_of(engine)
    name(engine, None)
    assert engine.serve(PROMPT) == engine.serve(OTHER) == 0
    assert stored_of(engine) == before
    assert engine.totals["miss_tokens_weights_unnamed"] == 2 * HIT
    name(engine, "2")
    assert engine.serve(OTHER) == 0
    assert engine.serve(OTHER) == HIT


def test_an_engine_begins_with_the_version_of_its_setting(stored, make_engine, monkeypatch):
    engine = make_engine(weights_may_change=True)
    assert engine.serve(PROMPT) == 0, "it begins without one"
    name(engine, "")
    assert engine.serve(PROMPT) == HIT
    for version, hit in (("7", 0), ("7", HIT), ("8", 0)):
        monkeypatch.setenv("KVRAY_CONNECTOR__WEIGHTS_VERSION", version)
        assert make_engine(weights_may_change=True).serve(PROMPT) == hit


def run(engine: Apart, start: int, end: int, blocks: list[int] | None = None) -> list[int]:
    """Run a request's first pass, or another one if its `blocks` are given; return these."""
    is_new = blocks is None
    if is_new:
        assert engine.ask(1, PROMPT) == 0
        blocks = engine.new_blocks(PROMPT)
    report = PassReport(
        request_id=1,
        new_tokens=list(PROMPT) if is_new else [],
        new_block_ids=blocks if is_new else [],
        computed_position=start,
        num_scheduled_tokens=end - start,
        is_new=is_new,
    )
    engine.rank.begin(engine.leader.plan([(report, is_new)]), None)
    engine.compute(PROMPT[:end], blocks)
    engine.rank.end(None)
    if end == len(PROMPT):
        engine.leader.finish(1)
    return blocks


@pytest.mark.parametrize("versions", [["2"], [None], [None, ""], ["2", ""], [""]])
def test_nothing_more_is_stored_of_a_request_in_flight(engine, make_engine, versions):
    blocks = run(engine, 0, 16)
    for version in versions:
        name(engine, version)
    run(engine, 16, len(PROMPT), blocks)
    is_as_before = versions == [""]
    assert stored_of(engine) == (len(PROMPT) if is_as_before else 16) // BLOCK
    name(engine, "")
    assert make_engine().serve(PROMPT) == (HIT if is_as_before else 16)
    assert engine.serve(PROMPT) == HIT  # stored by the one before, whole


@pytest.mark.parametrize("version", ["2", None])
def test_what_was_promised_before_is_loaded_and_stored_under_no_version(stored, engine, version):
    assert engine.ask(1, PROMPT) == engine.ask(3, PROMPT) == HIT
    name(engine, version)
    assert engine.ask(3, PROMPT) == engine.ask(2, OTHER) == 0
    blocks = [engine.new_blocks(PROMPT), engine.new_blocks(OTHER)]
    meta = engine.plan((1, PROMPT, blocks[0], HIT), (2, OTHER, blocks[1], 0))
    engine.rank.begin(meta, None)
    assert engine.rank.failed == []
    engine.check(PROMPT, blocks[0], HIT)
    for tokens, own in zip((PROMPT, OTHER), blocks, strict=True):
        engine.compute(tokens, own)
    engine.rank.end(None)
    for number in (1, 2):
        engine.leader.finish(number)
    assert stored_of(engine) == (0 if version is None else len(OTHER) // BLOCK)
    name(engine, "")
    assert engine.serve(OTHER) == 0
    if version is not None:
        name(engine, version)
        assert engine.serve(PROMPT) == 0


def test_a_rank_that_has_not_heard_yet_loads_and_stores_as_the_leader_says(engine):
    engine.leader.shared.name_weights("2")
    assert engine.serve(PROMPT) == 0
    assert engine.serve(PROMPT) == HIT
    engine.rank.shared.name_weights(None)
    assert engine.serve(PROMPT) == HIT
    assert engine.serve(OTHER) == 0
    assert stored_of(engine) == 20
    number = engine.leader.shared.identity.own.number
    assert list(engine.arena.has_slots_of([number])) == [True]


# -- told by the shard


@pytest.fixture
def told(make_engine: MakeEngine, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> Apart:
    monkeypatch.setattr(link_module, "_REPORT_S", 0.01)
    return make_engine()


def tell(shard: Shard, replica: str, version: str | None) -> dict[int, int]:
    return shard.requests.set_weights_version(replica, version, WAIT_S)


def test_an_idle_engine_goes_by_the_version_when_the_shard_says_so(shard, told):
    replica = told.leader.shared.replica
    told.serve(PROMPT)
    assert tell(shard, replica, "2") == {0: 1, 1: 1}
    for shared in (told.leader.shared, told.rank.shared):
        assert shared.weights[1] == "2"
    _, reader = shard._parts.first_reader(replica)
    assert reader.namespace.weights == "2"
    assert told.serve(PROMPT) == 0
    assert reader.namespace.digest() == told.leader.shared.identity.digest


def test_prompts_have_no_keys_while_the_weights_have_no_version(shard, told):
    replica = told.leader.shared.replica
    tell(shard, replica, None)
    with pytest.raises(ShardUnavailable, match="set_weights_version"):
        shard.requests.prefetch(replica, bytes(160))
    tell(shard, replica, "2")
    assert shard.requests.prefetch(replica, bytes(160))["reason"] != "none"


def test_a_replica_that_is_not_connected_has_no_ranks_to_tell(shard, told):
    replica = told.leader.shared.replica
    told.close()
    wait_for(lambda: not shard._parts.replicas.connected(), "the end of the connection")
    assert tell(shard, replica, "2") == tell(shard, "nobody", "2") == {}


def test_an_engine_that_does_not_answer_in_time_is_not_told_later(shard, told, monkeypatch):
    leader, fell_silent = told.leader.shared, threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(NodeLink, "_report", lambda _: fell_silent.set())
        assert fell_silent.wait(30), "a report may still be under way"
        with pytest.raises(ShardUnavailable, match=r"Ranks .*1 of replica"):
            shard.requests.set_weights_version(leader.replica, "2", 0.05)
    assert tell(shard, leader.replica, None) == {0: 1, 1: 1}
    assert leader.weights == (1, None)
