"""A shard's sample of the prompts that a connector has answered."""

import itertools
import time

import pytest

from kvray.actors.shard.shard import Shard
from kvray.node import link as link_module
from kvray.store.sizing import Window
from tests.unit.connector.conftest import MakePair
from tests.unit.connector.pair import BLOCK, Pair, Request
from tests.waiting import wait_for

_COUNT = itertools.count(1)


@pytest.fixture(autouse=True)
def reports_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_REPORT_S", 0.02)


def serve(pair: Pair, prompt: list[int]) -> None:
    request = Request(next(_COUNT), prompt)
    pair.serve(request)
    pair.finish(request)


def window_with(shard: Shard, num_prompts: int) -> Window:
    """Return the shard's sample once it has so many prompts more than before."""
    find = shard.queries.sizing_plan
    wait_for(lambda: find().window.trace.num_requests >= num_prompts, "the report")
    return find().window


def test_prompts_reach_the_shard_with_their_keys_when_they_end(
    running_shard: Shard, make_pair: MakePair
) -> None:
    before = running_shard.queries.sizing_plan().window.trace.num_requests
    pair = make_pair()
    start = 100_000 + time.monotonic_ns() % 10**9
    prompt = list(range(start, start + 10 * BLOCK))
    serve(pair, prompt)
    serve(pair, prompt[: 4 * BLOCK])
    trace = (window := window_with(running_shard, before + 2)).trace
    first, second = (
        trace.ids[trace.starts[at] : trace.starts[at + 1]].tolist() for at in (before, before + 1)
    )
    assert window.lengths[before].tolist() == [10, 9, 0], "the last token is always computed"
    assert second == first[:4]


def test_a_request_that_is_asked_about_again_counts_once(
    running_shard: Shard, make_pair: MakePair
) -> None:
    before = running_shard.queries.sizing_plan().window.trace.num_requests
    pair = make_pair()
    start = 200_000 + time.monotonic_ns() % 10**9
    request = Request(next(_COUNT), list(range(start, start + 5 * BLOCK)))
    for _ in range(3):
        pair.query(request, 0)
    pair.serve(request)
    pair.finish(request)
    serve(pair, list(range(start + 7, start + 7 + 5 * BLOCK)))
    window = window_with(running_shard, before + 2)
    assert window.trace.num_requests == before + 2
