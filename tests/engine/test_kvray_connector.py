"""Reference engines over the real connector and a real shard say what they would say alone."""

from typing import Any

import pytest

from kvray.reference import Replica
from tests.engine.conftest import BLOCK, KVRAY, check, make_prompt
from tests.kit.connector import flip_a_byte
from tests.kit.tier import Tier
from tests.waiting import wait_for

PROMPTS = [make_prompt(n, seed=5) for n in (100, 96, 50, 16, 15, 1)] + [make_prompt(70, seed=6)]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"enable_chunked_prefill": True, "chunk_tokens": 2 * BLOCK},
    {"enable_chunked_prefill": True, "chunk_tokens": BLOCK, "overlap": True},
    {"enable_block_reuse": False},
    {"enable_partial_reuse": True},
    {"num_blocks": 12},
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: ",".join(options) or "plain")
def test_answers_are_those_of_an_engine_alone(make_joined, expected, options):
    for _ in range(2):
        engine = make_joined(**options)
        check(engine.generate(PROMPTS, max_tokens=20), expected, PROMPTS, 20)
        engine.close()


@pytest.mark.parametrize("num_tokens", [96, 100])
def test_a_fresh_engine_loads_all_full_blocks_but_the_last_token(
    tier, make_joined, expected, num_tokens
):
    prompt = make_prompt(num_tokens, seed=7)
    make_joined().generate(prompt, max_tokens=1)
    tier.wait_for_stored(num_tokens // BLOCK)
    output = make_joined().generate(prompt, max_tokens=20)
    assert output.hit_tokens == (num_tokens - 1) // BLOCK * BLOCK
    assert output.token_ids == expected(prompt, 20)


def test_what_was_generated_is_a_hit_for_the_next_turn(tier, make_joined, expected):
    prompt = make_prompt(40, seed=8)
    answer = make_joined().generate(prompt, max_tokens=60)
    follow_up = [*prompt, *answer.token_ids, *make_prompt(9, seed=9)]
    tier.wait_for_stored((len(follow_up) - 10) // BLOCK)
    output = make_joined().generate(follow_up, max_tokens=20)
    assert output.hit_tokens >= 96 // BLOCK * BLOCK
    assert output.token_ids == expected(follow_up, 20)


def test_a_small_arena_that_evicts_all_the_time_never_changes_an_answer(
    environment, monkeypatch, make_engine, expected
):
    monkeypatch.setenv("KVRAY_ARENA__CAPACITY", "1MiB")
    tier = Tier()
    for turn in range(3):
        engine = make_engine(connector=KVRAY, num_blocks=20, overlap=bool(turn % 2))
        prompts = [make_prompt(120, seed=20 + number) for number in range(6)]
        check(engine.generate(prompts, max_tokens=8), expected, prompts, 8)
        engine.close()
    assert tier.shard.status()["arena"]["evicted"] > 0
    tier.stop()


@pytest.mark.parametrize("overlap", [False, True])
def test_cancelled_requests_leave_no_wrong_block(make_joined, expected, overlap):
    """Their blocks are made NaN at once, and given to the next request."""
    engine = make_joined(num_blocks=24, overlap=overlap)
    prompts = [make_prompt(100, seed=40 + number) for number in range(12)]
    for prompt in prompts:
        doomed = engine.submit(prompt, max_tokens=60)
        engine.submit(prompt[:33], max_tokens=2).result()
        engine.cancel(doomed)
    engine.close()
    fresh = make_joined()
    outputs = [fresh.generate(prompt, max_tokens=8) for prompt in prompts]
    check(outputs, expected, prompts, 8)
    assert sum(output.hit_tokens for output in outputs) > 0


def test_a_flipped_byte_is_a_shorter_hit_and_not_a_wrong_answer(tier, make_joined, expected):
    prompt = make_prompt(100, seed=11)
    make_joined().generate(prompt, max_tokens=1)
    tier.wait_for_stored(6)
    engine = make_joined()
    flip_a_byte(engine.connector.worker._rank.shared.link.arena, depth=5)  # type: ignore[union-attr]
    output = engine.generate(prompt, max_tokens=20)
    assert output.hit_tokens == 5 * BLOCK
    assert output.token_ids == expected(prompt, 20)
    assert tier.shard.status()["arena"]["corrupt"] == 1


def test_an_engine_outlives_its_tier_and_joins_the_next(tier, make_joined, expected):
    engine = make_joined(num_blocks=12)
    prompts = [make_prompt(100, seed=30 + number) for number in range(3)]
    for prompt in prompts:
        engine.generate(prompt, max_tokens=1)
    tier.stop()
    for prompt in prompts:
        output = engine.generate(prompt, max_tokens=8)
        assert output.token_ids == expected(prompt, 8)
        assert output.hit_tokens == 0
    tier.start()
    wait_for(lambda: tier.shard.status()["arena"]["holders"] == 1)
    engine.generate(prompts[0], max_tokens=1)
    tier.wait_for_stored(1)


def test_two_replicas_in_processes_of_their_own_share_a_prompt(tier, expected, environment):
    prompt = make_prompt(100, seed=14)
    options: dict[str, Any] = {
        "model": "tiny",
        "tokens_per_block": BLOCK,
        "num_blocks": 64,
        "connector": KVRAY,
        "env": environment,
    }
    first, second = Replica.spawn("first", **options), Replica.spawn("second", **options)
    try:
        first.wait_ready(120)
        second.wait_ready(120)
        first.generate(prompt, max_tokens=1)
        tier.wait_for_stored(6)
        output = second.generate(prompt, max_tokens=16)
    finally:
        first.close()
        second.close()
    assert output.hit_tokens == 96
    assert output.token_ids == expected(prompt)
