"""vLLM while parts of the tier die, freeze or lie: every answer is vLLM's own, and none hangs."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from kvray.errors import KVRayError
from tests.vllm.witness import HIT, LENGTH, stop
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray]

ENGINES = ["first", "uncached", "chunked"]


def test_a_shard_that_is_killed_costs_no_answer(witness):
    before, after = witness.prompt(102, LENGTH), witness.prompt(103, LENGTH)
    witness.ask("first", [before])
    for shard in witness.tier.machine.actors("Shard"):
        shard.kill()
    (kept,) = witness.ask("uncached", [before])  # the arena is there without its shard
    witness.ask("uncached", [after])
    assert kept.hit_tokens == HIT
    wait_for(lambda: len(witness.tier.serving()) == 2, "the shards")
    witness.ask("first", [after])


def test_a_frozen_shard_holds_nobody_up(witness):
    prompt = witness.prompt(104, LENGTH)
    shards = witness.tier.machine.actors("Shard")
    for shard in shards:
        shard.suspend()
    try:
        (cold,) = witness.ask("first", [prompt])
        (warm,) = witness.ask("uncached", [prompt])
    finally:
        for shard in shards:
            with contextlib.suppress(psutil.NoSuchProcess):  # the supervisor ends frozen ones
                shard.resume()
    assert (cold.hit_tokens, warm.hit_tokens) == (0, HIT)


def test_an_engine_that_is_killed_leaves_nothing_leased(witness):
    prompts = [witness.prompt(110 + index, LENGTH) for index in range(4)]
    engine = witness.engines["chunked"]
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(engine.generate, prompts, max_tokens=64)
        wait_for(engine._turn.locked, "the call")
        stop(engine)
        assert isinstance(call.exception(10), KVRayError)
    (after,) = witness.ask("uncached", [witness.prompt(100, LENGTH, question=9)])
    assert after.finish_reason == "length"

    def leased() -> int:
        with witness.tier.arena_of(witness.tier.nodes[0]) as arena:
            return int(arena.stats()["leased_blocks"])

    wait_for(lambda: leased() == 0, "the leases of the dead")
