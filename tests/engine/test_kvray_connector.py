"""Engines over the real connector and real shards, of one rank or several, answer as one alone."""

import pytest

from kvray.reference.model import TINY_CONFIG, make_random_weights
from tests.engine.conftest import BLOCK, KVRAY, check, make_prompt
from tests.engine.test_answers import VARIANTS
from tests.engine.test_ranks import start
from tests.tiny_checkpoint import save_checkpoint

TRUNK = make_prompt(80, seed=5)
DIVERGING = TRUNK[:50] + make_prompt(40, seed=6)
PROMPTS = [
    make_prompt(96, seed=1),  # aligned
    make_prompt(100, seed=2),
    make_prompt(17, seed=3),
    make_prompt(15, seed=4),  # not a block
    [7],
]
CHUNKED = {"enable_chunked_prefill": True, "chunk_tokens": 2 * BLOCK, "connector": KVRAY}


@pytest.mark.parametrize("options", [*VARIANTS, {"num_blocks": 12}], ids=str)
def test_answers_are_those_of_an_engine_alone(make_joined, expected, options):
    prompts = [*PROMPTS, DIVERGING, TRUNK]
    for is_fresh in (False, True):
        engine = make_joined(**options)
        outputs = engine.generate(prompts, max_tokens=20)
        check(outputs, expected, prompts, 20)
        if is_fresh and engine.cache.enable_block_reuse:
            assert outputs[0].hit_tokens == 80
        engine.close()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_fresh_ranks_load_what_cold_ranks_stored(tier, expected, size):
    """Pools full of NaN: a byte of the wrong rank, or of none, would show in the answer.

    The model has two KV heads: of four ranks two hold the same bytes, each as a part of its own.
    """
    with start(size, **CHUNKED) as cold:
        for prompt in [*PROMPTS, TRUNK]:
            assert cold.generate(prompt, max_tokens=8).token_ids == expected(prompt, 8)
    prompts = [*PROMPTS, DIVERGING]
    with start(size, **CHUNKED, overlap=True, num_blocks=48, runtime="main") as fresh:
        outputs = fresh.generate(prompts, max_tokens=8)
    check(outputs, expected, prompts, 8)
    hits = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
    assert [one.hit_tokens for one in outputs] == [*hits, 48]


@pytest.mark.long
def test_ranks_load_their_heads_of_what_any_number_of_ranks_has_stored(tier, tmp_path):
    """Of this model 4 ranks have a KV head each."""
    config = {**TINY_CONFIG, "num_key_value_heads": 4}
    save_checkpoint(config, make_random_weights(1, config), tmp_path)
    answers = []
    for stored_by in (1, 2, 4):
        tier.shard.clear(10)
        for is_stored, size in zip((False, True, True, True), (stored_by, 1, 2, 4), strict=True):
            with start(size, tmp_path, num_blocks=32, connector=KVRAY) as engine:
                (output,) = engine.generate([TRUNK], max_tokens=8)
            assert output.hit_tokens == (64 if is_stored else 0)
            answers.append(output.token_ids)
    assert answers == answers[:1] * len(answers)
