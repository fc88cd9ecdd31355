"""What a shard without Ray tells of a traced prompt: where it looked, and what brought it."""

import numpy as np
import pytest
from opentelemetry.trace import StatusCode

from kvray.actors.mover.orders import FetchOrder
from kvray.identity.keys import chain_keys, request_seed
from kvray.trace import spans
from tests.unit.actors.small_shard import NAMESPACE
from tests.unit.actors.test_shard_staging import MINE, Tier, known, tier
from tests.unit.store.small_arena import store
from tests.unit.tracing import CALLER, TRACEPARENT, id_of, parent_of, sdk
from tests.waiting import wait_for

__all__ = ["sdk", "tier"]

SIZE = NAMESPACE.tokens_per_block
PROMPT = np.arange(5 * SIZE + 1, dtype="<i4")


def keys_of(tokens: np.ndarray) -> list[bytes]:
    seed = request_seed(MINE.digest(), salt=None, lora=None)
    return list(chain_keys(tokens, tokens_per_block=SIZE, seed=seed))


def store_far(tier: Tier) -> None:
    keys = keys_of(PROMPT)
    store(tier.nodes["b"].arena, keys)
    wait_for(lambda: known(tier, keys))


def test_a_prefetch_tells_where_it_looked_and_what_it_brought(sdk, tier):
    store_far(tier)
    with spans.under(TRACEPARENT):
        tier.a.requests.prefetch("r", PROMPT.tobytes())
    lookup, fetch = sdk.one("lookup"), sdk.one("fetch")
    assert (parent_of(lookup), parent_of(fetch)) == (CALLER, CALLER)
    assert lookup.attributes["kvray.blocks"] == lookup.attributes["kvray.blocks.asked"] == 5
    assert lookup.attributes["kvray.sources"] == 1
    assert dict(fetch.attributes) == {
        "kvray.shard": "kvray-shard-a",
        "kvray.source": "kvray-shard-b",
        "kvray.tier": "host",
        "kvray.transport": "copy",
        "kvray.blocks": 5,
        "kvray.bytes": 5 * MINE.part_bytes,
    }
    assert lookup.end_time <= fetch.start_time <= fetch.end_time


def test_prompts_without_a_trace_make_no_span(sdk, tier):
    store_far(tier)
    tier.stage(keys_of(PROMPT))
    tier.a.requests.prefetch("r", PROMPT.tobytes())
    assert sdk.names() == []


@pytest.mark.parametrize("silent", ["kvray-lookup", "kvray-mover-a"])
def test_a_silent_actor_is_told_as_an_error(sdk, tier, silent):
    store_far(tier)
    tier.nodes.frozen.add(silent)
    with spans.under(TRACEPARENT):
        tier.a.requests.prefetch("r", PROMPT.tobytes())
    wait_for(lambda: sdk.num_open == 0, "the end of what is late")
    name = "lookup" if silent == "kvray-lookup" else "fetch"
    wait_for(lambda: bool(sdk.named(name)), "the span")
    assert sdk.one(name).status.status_code is StatusCode.ERROR


def test_what_another_shard_promotes_is_told_there(sdk, tier):
    with spans.under(TRACEPARENT):
        tier.b.requests.promote("", FetchOrder(spans=(), deadline_s=1.0))
    assert sdk.one("promote").attributes["kvray.shard"] == "kvray-shard-b"


def test_what_is_staged_for_a_leader_elsewhere_is_told_by_the_shard_that_does_it(sdk, tier):
    store_far(tier)
    with spans.under(TRACEPARENT):
        tier.a.requests.stage_ranks("", "r", [0], 2.0, 0.0, None, b"".join(keys_of(PROMPT)))
    stage = sdk.one("stage")
    assert (parent_of(stage), stage.attributes["kvray.blocks"]) == (CALLER, 5)
    assert {parent_of(sdk.one(name)) for name in ("lookup", "fetch")} == {id_of(stage)}
