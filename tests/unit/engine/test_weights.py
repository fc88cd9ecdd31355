"""Weights that are replaced in a running engine: blocks of one version never answer for another."""

from typing import Any

import pytest

from kvray.actors.shard.shard import Shard
from kvray.engine.request.report import PassReport
from tests.unit.engine.apart import BLOCK, Apart
from tests.unit.engine.conftest import MakeEngine

PROMPT = list(range(100, 140))
OTHER = list(range(200, 240))
HIT = (len(PROMPT) - 1) // BLOCK * BLOCK


def name(engine: Apart, version: str | None) -> None:
    """Tell the engine as the shard does: each of its processes hears of it by itself."""
    for shared in (engine.leader.shared, engine.rank.shared):
        shared.pool.name_weights(version)


def totals_of(engine: Apart) -> Any:
    return engine.leader.shared.figures.totals


def stored_of(engine: Apart) -> int:
    assert engine.rank.saver is not None
    engine.rank.saver.drain()
    return engine.rank.shared.figures.totals["stored_blocks"]


def test_blocks_of_one_version_do_not_answer_for_another(
    shard: Shard, make_engine: MakeEngine
) -> None:
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


def test_an_engine_without_a_version_is_off_the_tier(shard: Shard, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve(PROMPT)
    before = stored_of(engine)
    name(engine, None)
    assert engine.serve(PROMPT) == engine.serve(OTHER) == 0
    assert stored_of(engine) == before
    assert totals_of(engine)["miss_tokens_weights_unnamed"] == 2 * HIT
    name(engine, "2")
    assert engine.serve(OTHER) == 0
    assert engine.serve(OTHER) == HIT


def test_an_engine_whose_weights_may_be_replaced_begins_without_a_version(
    shard: Shard, make_engine: MakeEngine
) -> None:
    make_engine().serve(PROMPT)
    engine = make_engine(weights_may_change=True)
    assert engine.serve(PROMPT) == 0
    name(engine, "")
    assert engine.serve(PROMPT) == HIT


def test_the_setting_names_what_an_engine_begins_with(
    shard: Shard, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_engine().serve(PROMPT)
    monkeypatch.setenv("KVRAY_CONNECTOR__WEIGHTS_VERSION", "7")
    engine = make_engine(weights_may_change=True)
    assert engine.serve(PROMPT) == 0
    assert make_engine().serve(PROMPT) == HIT
    monkeypatch.setenv("KVRAY_CONNECTOR__WEIGHTS_VERSION", "8")
    assert make_engine().serve(PROMPT) == 0


def begin(engine: Apart, number: int, *, end: int) -> list[int]:
    """Run a request's first pass, as far as `end`."""
    assert engine.ask(number, PROMPT) == 0
    blocks = engine.new_blocks(PROMPT)
    meta = engine.leader.plan([(report_of(number, 0, end, blocks), True)])
    engine.rank.begin(meta, None)
    engine.compute(PROMPT[:end], blocks)
    engine.rank.end(None)
    return blocks


def go_on(engine: Apart, number: int, blocks: list[int], start: int) -> None:
    """Run the rest of it."""
    meta = engine.leader.plan([(report_of(number, start, len(PROMPT)), False)])
    engine.rank.begin(meta, None)
    engine.compute(PROMPT, blocks)
    engine.rank.end(None)
    engine.leader.finish(number)


def report_of(number: int, start: int, end: int, blocks: list[int] | None = None) -> PassReport:
    return PassReport(
        request_id=number,
        new_tokens=[] if blocks is None else list(PROMPT),
        new_block_ids=blocks or [],
        computed_position=start,
        num_scheduled_tokens=end - start,
        is_new=blocks is not None,
    )


@pytest.mark.parametrize("versions", [["2"], [None], [None, ""], ["2", ""]])
def test_nothing_more_is_stored_of_a_request_in_flight(
    shard: Shard, make_engine: MakeEngine, versions: list[str | None]
) -> None:
    engine = make_engine()
    blocks = begin(engine, 1, end=16)
    for version in versions:
        name(engine, version)
    go_on(engine, 1, blocks, 16)
    assert stored_of(engine) == 16 // BLOCK
    name(engine, "")
    assert make_engine().serve(PROMPT) == 16
    assert engine.serve(PROMPT) == 36  # stored by the one before, whole


def test_the_same_version_twice_changes_nothing(shard: Shard, make_engine: MakeEngine) -> None:
    engine = make_engine()
    name(engine, "2")
    blocks = begin(engine, 1, end=16)
    name(engine, "2")
    go_on(engine, 1, blocks, 16)
    assert stored_of(engine) == len(PROMPT) // BLOCK


@pytest.mark.parametrize("version", ["2", None])
def test_what_was_promised_before_is_loaded_and_stored_under_no_version(
    shard: Shard, make_engine: MakeEngine, version: str | None
) -> None:
    make_engine().serve(PROMPT)
    engine = make_engine()
    assert engine.ask(1, PROMPT) == HIT
    name(engine, version)
    assert engine.ask(2, OTHER) == 0
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


def test_a_rank_that_has_not_heard_yet_loads_and_stores_as_the_leader_says(
    shard: Shard, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    engine.leader.shared.pool.name_weights("2")
    assert engine.serve(PROMPT) == 0
    assert engine.serve(PROMPT) == HIT
    engine.rank.shared.pool.name_weights(None)
    assert engine.serve(PROMPT) == HIT
    assert engine.serve(OTHER) == 0
    number = engine.leader.shared.pool.own.number
    assert stored_of(engine) == 20
    assert engine.rank.shared.link.arena is not None
    assert list(engine.rank.shared.link.arena.has_slots_of([number])) == [True]


def test_an_offer_that_the_engine_asks_for_again_is_of_the_new_version(
    shard: Shard, make_engine: MakeEngine
) -> None:
    make_engine().serve(PROMPT)
    engine = make_engine()
    assert engine.ask(1, PROMPT) == HIT
    name(engine, "2")
    assert engine.ask(1, PROMPT) == 0
