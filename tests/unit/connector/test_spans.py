"""What an engine's connector tells of a traced request; its process has no SDK of its own."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from kvray.actors.shard.shard import Shard
from kvray.node import link as link_module
from tests.unit.connector.conftest import MakePair
from tests.unit.connector.pair import BLOCK, Pair, Request
from tests.unit.tracing import CALLER, TRACE, TRACEPARENT, Spans, parent_of, sdk, trace_of
from tests.waiting import wait_for

__all__ = ["sdk"]

_COUNT = itertools.count()
NUM_TOKENS = 40
SHARED = (NUM_TOKENS - 1) // BLOCK * BLOCK


@pytest.fixture(autouse=True)
def reports_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_REPORT_S", 0.02)


@pytest.fixture
def traced(sdk: Spans, shard: Shard, make_pair: MakePair) -> Pair:
    """An engine whose shard makes spans."""
    pair = make_pair()
    notes = pair.worker._rank.shared.figures.span_notes
    wait_for(lambda: notes.is_on, "the shard's word")
    return pair


@pytest.fixture
def prompt() -> list[int]:
    start = 50_000 + next(_COUNT) * NUM_TOKENS
    return list(range(start, start + NUM_TOKENS))


def expect(shard: Shard, pair: Pair, prompt: list[int]) -> None:
    packed = np.array(prompt, dtype="<i4").tobytes()
    shard.requests.prefetch(pair.worker._rank.shared.pool.replica, packed, trace=TRACEPARENT)


def told(sdk: Spans, name: str) -> Callable[[], bool]:
    return lambda: bool(sdk.named(name))


def test_a_hit_is_a_promise_and_a_load_in_the_requests_trace(
    sdk: Spans, shard: Shard, traced: Pair, prompt: list[int]
) -> None:
    traced.serve(Request(9101, prompt))
    traced.flush()
    expect(shard, traced, prompt)
    assert traced.serve(Request(9102, prompt), BLOCK) == SHARED - BLOCK
    wait_for(told(sdk, "load"), "the load")
    promise, load = sdk.one("promise"), sdk.one("load")
    assert {trace_of(one) for one in (promise, load)} == {TRACE}
    assert {parent_of(one) for one in (promise, load)} == {CALLER}
    about = promise.attributes
    assert about["kvray.request.id"] == 9102
    assert about["kvray.tokens.prompt"] == NUM_TOKENS
    assert about["kvray.tokens.pool"] == BLOCK
    assert about["kvray.tokens.promised"] == SHARED - BLOCK
    assert (about["kvray.tokens.missed"], about["kvray.miss.reason"]) == (0, "none")
    assert load.attributes["kvray.blocks"] == SHARED // BLOCK - 1
    assert load.attributes["kvray.bytes"] == (SHARED // BLOCK - 1) * traced.pool[0].nbytes
    assert promise.start_time <= promise.end_time <= load.start_time <= load.end_time


def test_a_miss_is_a_promise_of_nothing_and_its_reason(
    sdk: Spans, shard: Shard, traced: Pair, prompt: list[int]
) -> None:
    expect(shard, traced, prompt)
    traced.serve(Request(9111, prompt))
    wait_for(told(sdk, "promise"), "the promise")
    about = sdk.one("promise").attributes
    assert (about["kvray.tokens.promised"], about["kvray.tokens.missed"]) == (0, SHARED)
    assert about["kvray.miss.reason"] == "not_stored"
    assert not sdk.named("load")


def test_a_request_that_is_asked_about_in_every_pass_is_one_promise(
    sdk: Spans, shard: Shard, traced: Pair, prompt: list[int]
) -> None:
    expect(shard, traced, prompt)
    for _ in range(5):
        traced.query(Request(9121, prompt))
    wait_for(told(sdk, "promise"), "the promise")
    assert len(traced.worker._rank.shared.figures.span_notes.take()) == 0
    assert len(sdk.named("promise")) == 1


def test_an_engine_whose_shard_makes_no_spans_notes_nothing(
    shard: Shard, make_pair: MakePair, prompt: list[int]
) -> None:
    pair = make_pair()
    pair.serve(Request(9131, prompt))
    notes = pair.worker._rank.shared.figures.span_notes
    assert not notes.is_on
    assert notes.take() == []
