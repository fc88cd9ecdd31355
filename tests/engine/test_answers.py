"""Whatever is cached, chunked, batched or loaded, the answer is the same; so with real weights.

Over the real connector and real shards, of one rank or several, and over a connector of a dict.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from kvray.errors import ConfigError, KVRayError
from kvray.reference.engine import ReferenceEngine
from kvray.reference.engine_options import EngineOptions
from kvray.reference.model import TINY_CONFIG, make_random_weights
from tests.engine.conftest import BLOCK, KVRAY, check, make_prompt
from tests.engine.fake_connector import CONFIG
from tests.engine.test_ranks import start
from tests.tiny_checkpoint import save_checkpoint

PROMPT = make_prompt(100)
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
VARIANTS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"enable_chunked_prefill": True, "chunk_tokens": BLOCK},
    {"enable_chunked_prefill": True, "chunk_tokens": 3 * BLOCK, "overlap": True},
    {"enable_partial_reuse": True},
    {"enable_block_reuse": False},
    {"max_batch_size": 1},
    {"num_blocks": 12},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_answers_are_those_of_an_engine_alone(make_joined, expected, options):
    prompts = [*PROMPTS, DIVERGING, TRUNK, TRUNK[:48], TRUNK[:49]]
    for is_fresh in (False, True):
        engine = make_joined(**options)
        for is_known in (False, True):
            outputs = engine.generate(prompts, max_tokens=20)
            check(outputs, expected, prompts, 20)
            assert [output.prompt_tokens for output in outputs] == [len(one) for one in prompts]
            if is_fresh and not is_known and engine.cache.enable_block_reuse:
                assert outputs[0].hit_tokens == 80
        assert engine.cache.get_num_free_blocks() == options.get("num_blocks", 64)
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


def test_salts_do_not_share_blocks(make_faked, expected):
    engine = make_faked()
    engine.generate(PROMPT, salt="a")
    output = engine.generate(PROMPT, salt="b")
    assert (output.reused_tokens, output.hit_tokens) == (0, 0)
    assert output.token_ids == expected(PROMPT)
    again = engine.generate(PROMPT, salt="a")
    assert (again.reused_tokens, again.hit_tokens) == (96, 0), "local reuse comes first"


def test_partial_reuse_reports_tokens_inside_a_block(make_faked, expected, fake):
    engine = make_faked(enable_partial_reuse=True)
    engine.generate(PROMPT, max_tokens=1)
    prompt = PROMPT[:39] + make_prompt(30, seed=5)
    output = engine.generate(prompt)
    assert output.reused_tokens == 39
    assert fake.calls[-1][0] == "get_finished"
    assert ("get_num_new_matched_tokens", 2, 39) in fake.calls
    assert output.token_ids == expected(prompt)


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_under_pressure_has_the_expected_answers(make_faked, expected, fake, seed):
    chance = random.Random(seed)
    fake.is_async_save = chance.random() < 0.5
    chunked = chance.random() < 0.5
    engines = [
        make_faked(
            num_blocks=chance.randint(12, 24),
            overlap=chance.random() < 0.5,
            enable_chunked_prefill=chunked,
            chunk_tokens=BLOCK * chance.randint(1, 3) if chunked else None,
        )
        for _ in range(2)
    ]
    for engine in engines * 2:
        prompts = [
            make_prompt(chance.randint(1, 80), seed=chance.randint(0, 2))
            + make_prompt(chance.randint(1, 40), seed=chance.randint(0, 2))
            for _ in range(6)
        ]
        check(engine.generate(prompts, max_tokens=12), expected, prompts, 12)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "empty"),
        ([1, 512], 4, "no token id"),
        ([1, -1], 4, "no token id"),
        ([1, True], 4, "no token id"),
        ([1, 2], 0, "max_tokens"),
        ([1] * 1000, 100, "do not fit"),
    ],
)
def test_unusable_prompts_are_refused(make_engine, prompt, max_tokens, message):
    with pytest.raises(ConfigError, match=message):
        make_engine().submit(prompt, max_tokens=max_tokens)


def test_list_that_is_neither_a_prompt_nor_prompts_is_refused(make_engine):
    with pytest.raises(ConfigError, match=r"2\.5 is no token id"):
        make_engine().generate([1, 2.5])  # type: ignore[list-item]


def test_closed_engine_refuses_and_fails_what_is_outstanding(make_engine):
    engine = make_engine()
    pending = engine.submit(PROMPT, max_tokens=900)
    engine.close()
    engine.close()
    with pytest.raises(KVRayError, match="closed"):
        pending.result(5)
    with pytest.raises(KVRayError, match="closed"):
        engine.submit(PROMPT)


OWNERS = {"tensor_parallel_size": 2, "enable_attention_dp": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_chunked_prefill": True, "chunk_tokens": BLOCK + 1}, "multiple"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"max_draft_len": -1}, "max_draft_len is -1"),
        ({"max_draft_len": 2, "overlap": True}, "max_draft_len and overlap exclude each other"),
        ({"runtime": "0.9"}, "give one of 1.2, main"),
        ({"tensor_parallel_size": 3}, "1, 2 or 4"),
        ({"tensor_parallel_size": 2, "collective_timeout_s": 1}, "at least 2"),
        ({"tensor_parallel_size": 2, "device": "cuda"}, "on the CPU only"),
        ({"tensor_parallel_size": 2, "rank_env": [{}, {}]}, "rank_env has variables for 2 ranks"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({**OWNERS, "event_buffer_max_size": 8}, "are not gathered"),
    ],
)
def test_unusable_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**options)


def test_a_connector_that_is_not_there_is_named(make_engine):
    with pytest.raises(ConfigError, match=r"no\.such\.module"):
        make_engine(connector=replace(CONFIG, connector_module="no.such.module"))


TEXT = """The harbour of the old town lies between two rocky hills. In the morning the fishing
boats come back with their catch, and the gulls follow them as far as the market. Behind the
market stands the house of the harbour master, who writes down the name of every ship, the hour
of its arrival and the goods that it carries. """


@pytest.mark.long
@pytest.mark.smollm2
def test_real_model_gives_the_same_text_from_loaded_blocks(fake):
    def engine(connector: object = None) -> ReferenceEngine:
        return ReferenceEngine("smollm2", num_blocks=32, connector=connector, poison=True)

    with engine() as alone:
        tokens = alone.tokenizer.encode(TEXT * 5)
        prompts = [tokens[:288], tokens[1:290]]  # an aligned one and one that is not
        expected = [alone.generate(prompt, max_tokens=12) for prompt in prompts]
        assert "Paris" in alone.generate("The capital of France is", max_tokens=4).text
    with engine(CONFIG) as first:
        stored = [first.generate(prompt, max_tokens=12) for prompt in prompts]
    with engine(CONFIG) as second:
        loaded = [second.generate(prompt, max_tokens=12) for prompt in prompts]
    assert [output.token_ids for output in stored] == [output.token_ids for output in expected]
    assert [output.text for output in loaded] == [output.text for output in expected]
    assert [output.hit_tokens for output in stored] == [0, 0]
    assert [output.hit_tokens for output in loaded] == [256, 288]
