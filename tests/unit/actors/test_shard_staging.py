"""Two shards without Ray: what is staged for an engine, what is traced of it, and extra copies."""

import asyncio
import threading
import time

import numpy as np
import pytest
from opentelemetry.trace import StatusCode

from kvray.actors.mover.orders import FetchOrder
from kvray.config import CopiesConfig
from kvray.errors import ConfigError, ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.identity.keys import chain_keys, request_seed
from kvray.routing import Profile
from kvray.store.arena import key_index
from kvray.store.arena.tables import Array
from kvray.trace import spans
from tests.unit.actors.nodes import HURRIED, MINE, Tier
from tests.unit.actors.small_shard import NAMESPACE
from tests.unit.store.small_arena import SLOT, chain, served, store
from tests.unit.tracing import CALLER, TRACEPARENT, id_of, parent_of, sdk
from tests.waiting import wait_for

__all__ = ["sdk"]

hurried = pytest.mark.parametrize("tier", [{"staging": HURRIED}], indirect=True)
KEYS = chain(12)
SIZE = NAMESPACE.tokens_per_block
PROMPT = np.arange(5 * SIZE + 1, dtype="<i4")


def keys_of(tokens: np.ndarray, salt: str | None = None) -> list[BlockKey]:
    seed = request_seed(MINE.digest(), salt=salt)
    return chain_keys(tokens, tokens_per_block=SIZE, seed=seed)


def test_an_engine_gets_by_its_socket_what_the_other_node_has_even_on_disk_only(tier):
    keys = chain(40)
    tier.demote(keys)
    tier.lose_from_memory(keys)
    time.sleep(0.1)  # so that what has gone would be announced
    assert tier.is_known(keys)
    # The beginning is here already.
    store(tier.arena("a"), keys[:7])
    arrivals = [[7, "host", ""], [40, "copy", "kvray-shard-b"]]
    whole = {"ok": True, "num_blocks": 40, "reason": "none", "leases": {}, "arrivals": arrivals}
    assert tier.stage(keys) == whole
    assert served(tier.arena("a"), keys) == 40
    assert tier.a.status()["staging"]["promoted_blocks"] == 33
    assert tier.b.status()["nvme"]["promoted_blocks"] == 33


def test_a_profile_says_how_a_replica_reads_and_how_fast_its_node_gets_blocks(tier):
    of_a = tier.a.requests.profile("r")
    assert of_a == Profile(
        tokens_per_block=32, block_bytes=4096, parts=1, namespace=MINE.digest(), num_partitions=1
    )
    tier.store_far(KEYS)
    assert tier.stage(KEYS)["num_blocks"] == len(KEYS)
    ((shard, link),) = tier.a.requests.profile("r").links.items()
    assert (shard, link.bytes_per_s) == ("kvray-shard-b", 2e9), "nothing large has come yet"
    assert link.latency_s > 0
    with pytest.raises(ConfigError, match="No rank of 'unknown'"):
        tier.a.requests.profile("unknown")


def test_a_shard_says_what_it_has_on_its_disk_only(tier):
    keys = keys_of(np.arange(SIZE * 40, dtype="<i4"))
    tier.demote(keys)
    packed = b"".join(keys)
    assert tier.b.requests.on_disk(1, packed) == bytes(40), "it is in memory, too"
    tier.lose_from_memory(keys)
    store(tier.arena("b"), keys[:3])
    assert tier.b.requests.on_disk(1, packed) == bytes(3) + b"\1" * 37
    assert tier.b.requests.on_disk(2, packed) == bytes(40), "another part"
    assert tier.a.requests.on_disk(1, packed) == bytes(40)
    with pytest.raises(ConfigError, match="no mask of parts"):
        tier.b.requests.on_disk(0, packed)


def test_a_prefetch_brings_a_prompt_before_its_engine_sees_it(tier):
    tier.store_far(keys_of(PROMPT, salt="tenant"))
    whole = {"num_tokens": 160, "num_blocks": 5, "reason": "none"}
    for staged, source in ((160, "remote"), (0, "host")):
        found = tier.a.requests.prefetch("r", PROMPT.tobytes(), salt="tenant")
        assert found == whole | {"staged_tokens": staged, "sources": [[160, source]]}
    assert tier.a.requests.prefetch("r", PROMPT[:1].tobytes())["num_blocks"] == 0
    with pytest.raises(ConfigError, match="No rank of 'unknown'"):
        tier.a.requests.prefetch("unknown", PROMPT.tobytes())


def test_a_shard_that_ends_meanwhile_answers_nobody_for_ever(tier):
    tier.store_far(KEYS)
    tier.nodes.may_move = asyncio.Event()

    def stop_soon() -> None:
        wait_for(lambda: tier.nodes.orders)
        tier.a.stop(retire=False, timeout_s=10)

    stopper = threading.Thread(target=stop_soon, name="stopper")
    stopper.start()
    with pytest.raises(ShardUnavailable):
        tier.a.requests.stage_ranks("", "r", [0], 60.0, 0.0, None, b"".join(KEYS))
    stopper.join()


# -- what is told of a traced prompt: where a shard looked, and what brought it -------------------


@pytest.fixture
def far_prompt(tier: Tier) -> Tier:
    """The tier, where `b` has the blocks of PROMPT."""
    tier.store_far(keys_of(PROMPT))
    return tier


def test_a_traced_prefetch_tells_where_it_looked_and_what_it_brought(sdk, far_prompt):
    far_prompt.stage(keys_of(PROMPT[:SIZE]))
    far_prompt.a.requests.prefetch("r", PROMPT[: 2 * SIZE].tobytes())
    assert sdk.names() == [], "nobody has asked for a trace"
    with spans.under(TRACEPARENT):
        far_prompt.a.requests.prefetch("r", PROMPT.tobytes())
    wait_for(lambda: sdk.names() == ["fetch", "lookup"], "the ends of both spans")
    lookup, fetch = sdk.one("lookup"), sdk.one("fetch")
    assert (parent_of(lookup), parent_of(fetch)) == (CALLER, CALLER)
    assert lookup.attributes["kvray.blocks"] == lookup.attributes["kvray.blocks.asked"] == 5
    assert lookup.attributes["kvray.sources"] == 1
    assert dict(fetch.attributes) == {
        "kvray.shard": "kvray-shard-a",
        "kvray.source": "kvray-shard-b",
        "kvray.tier": "host",
        "kvray.transport": "copy",
        "kvray.blocks": 3,
        "kvray.bytes": 3 * MINE.part_bytes,
    }
    assert lookup.end_time <= fetch.start_time <= fetch.end_time


@hurried
@pytest.mark.parametrize(
    ("silent", "name"), [("kvray-lookup", "lookup"), ("kvray-mover-a", "fetch")]
)
def test_a_silent_actor_is_told_as_an_error(sdk, far_prompt, silent, name):
    far_prompt.nodes.frozen.add(silent)

    def is_told() -> bool:
        """Ask once more: on a starved machine what comes before may be late as well."""
        with spans.under(TRACEPARENT):
            far_prompt.a.requests.prefetch("r", PROMPT.tobytes())
        wait_for(lambda: sdk.num_open == 0, "the end of what is late")
        return bool(sdk.named(name))

    wait_for(is_told, "the span")
    assert {one.status.status_code for one in sdk.named(name)} == {StatusCode.ERROR}


def test_what_another_shard_promotes_is_told_there(sdk, tier):
    with spans.under(TRACEPARENT):
        tier.b.requests.promote("", FetchOrder(spans=(), deadline_s=1.0))
    assert sdk.one("promote").attributes["kvray.shard"] == "kvray-shard-b"


def test_what_is_staged_for_a_leader_elsewhere_is_told_by_the_shard_that_does_it(sdk, far_prompt):
    keys = b"".join(keys_of(PROMPT))
    with spans.under(TRACEPARENT):
        far_prompt.a.requests.stage_ranks("", "r", [0], 30.0, 0.0, None, keys)
    wait_for(lambda: sdk.names() == ["fetch", "lookup", "stage"], "the ends of all spans")
    stage = sdk.one("stage")
    assert (parent_of(stage), stage.attributes["kvray.blocks"]) == (CALLER, 5)
    assert {parent_of(sdk.one(name)) for name in ("lookup", "fetch")} == {id_of(stage)}


# -- copies: an idle one goes first, the last one never -------------------------------------------

CHAINS = [chain(6, seed=f"shared {at}") for at in range(4)]

idle = pytest.mark.parametrize("tier", [{"copies": CopiesConfig(idle_s=0.5)}], indirect=True)
"""Copies that nobody uses for half a second are idle."""


@idle
def test_of_each_shared_chain_one_node_has_the_extra_copy_and_lets_it_go_first(tier):
    def go_first(node: str, keys: list[BlockKey]) -> Array:
        retention = getattr(tier, node)._serving.retention
        slots = key_index.find(tier.arena(node).tables, key_index.pack_keys(keys), 0)
        return retention.rank(slots) < -1e34

    for keys in CHAINS:
        for node in "ab":
            store(tier.arena(node), keys)
    store(tier.arena("a"), own := chain(6, seed="own"))

    def are_chosen() -> bool:
        extra = [one.status()["copies"]["extra_bytes"] for one in (tier.a, tier.b)]
        first = [[go_first(node, keys[1:]).all() for node in "ab"] for keys in CHAINS]
        return sum(extra) == 4 * 6 * SLOT and all(a != b for a, b in first)

    wait_for(are_chosen)
    assert not go_first("a", own).any()


@idle
@pytest.mark.long
def test_a_tier_that_rests_looks_up_nothing(tier):
    store(tier.arena("a"), CHAINS[0])
    time.sleep(35.0)
    before = tier.nodes.calls.count(("kvray-lookup", "locate"))
    time.sleep(20.0)
    assert tier.nodes.calls.count(("kvray-lookup", "locate")) == before
