"""vLLM under load: preempted requests, many at once, and more than the arena holds."""

import pytest

from tests.vllm.witness import BLOCK

pytestmark = [pytest.mark.ray]

ENGINES = ["small", "uncached", "chunked"]


def test_requests_that_are_preempted_come_back_with_their_blocks(witness):
    prompts = [witness.prompt(20 + index, 9 * BLOCK) for index in range(8)]
    for _ in range(2):
        witness.ask("small", prompts, max_tokens=3 * BLOCK)
    counted = witness.counters("small")
    assert counted["resumed_requests"] > 0
    assert counted["requests"] == 16 + counted["resumed_requests"]


def test_two_hundred_requests_at_once(witness):
    prompts = [witness.prompt(40 + n % 5, 4 * BLOCK, question=n) for n in range(200)]
    witness.ask("uncached", prompts, max_tokens=4)
    outputs = witness.ask("chunked", prompts, max_tokens=4)
    assert sum(output.hit_tokens + output.reused_tokens for output in outputs) > 200 * BLOCK


def test_a_working_set_larger_than_the_arena(witness):
    held = 512 * 2**20 // (BLOCK * 46080)
    count = 2 * held // 24
    prompts = [witness.prompt(60 + index, 24 * BLOCK + 1) for index in range(count)]
    for start in range(0, count, 4):
        witness.ask("uncached", prompts[start : start + 4], max_tokens=2)
    (again,) = witness.ask("uncached", [prompts[-1]], max_tokens=2)
    assert again.hit_tokens == 24 * BLOCK
    witness.ask("uncached", [prompts[0]], max_tokens=2)


def test_a_prompt_that_is_computed_in_chunks_is_stored_whole(witness):
    prompt = witness.prompt(4, 30 * BLOCK + 3)
    (cold,) = witness.ask("chunked", [prompt])
    (warm,) = witness.ask("uncached", [prompt])
    assert (cold.hit_tokens, warm.hit_tokens) == (0, 30 * BLOCK)
