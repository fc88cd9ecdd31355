"""Whatever is cached, chunked, batched or loaded, the answer is the same; so with real weights."""

import random
from dataclasses import replace
from typing import Any

import pytest

from kvray.errors import ConfigError, KVRayError
from kvray.reference.engine import ReferenceEngine
from kvray.reference.engine_options import EngineOptions
from tests.engine.conftest import BLOCK, check, make_prompt
from tests.engine.fake_connector import CONFIG

PROMPT = make_prompt(100)

VARIANTS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"enable_chunked_prefill": True, "chunk_tokens": BLOCK},
    {"enable_chunked_prefill": True, "chunk_tokens": 3 * BLOCK, "overlap": True},
    {"enable_partial_reuse": True},
    {"enable_block_reuse": False},
    {"max_batch_size": 1},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_answer_does_not_depend_on_how_it_was_made(make_engine, expected, options):
    prompts = [PROMPT, PROMPT[:96], PROMPT[:50], make_prompt(70, seed=1), PROMPT[:97], [7]]
    engine = make_engine(**options)
    for _ in range(2):
        outputs = engine.generate(prompts, max_tokens=20)
        check(outputs, expected, prompts, 20)
        assert [output.prompt_tokens for output in outputs] == [len(one) for one in prompts]
    assert engine.cache.get_num_free_blocks() == 64


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
