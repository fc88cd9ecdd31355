"""What one vLLM has computed is loaded by another, and every answer is vLLM's own."""

import pytest

from tests.vllm.witness import BLOCK, HIT, LENGTH

pytestmark = [pytest.mark.ray]

ENGINES = ["first", "uncached", "far"]


@pytest.mark.parametrize(
    ("name", "chapter", "length", "hit"),
    [
        pytest.param("uncached", 0, LENGTH, HIT, id="of the node"),
        pytest.param("far", 3, LENGTH, HIT, id="of another node"),
        pytest.param("uncached", 5, 10 * BLOCK, 9 * BLOCK, id="the last block is computed"),
    ],
)
def test_another_engine_loads_what_one_has_computed(witness, name, chapter, length, hit):
    prompt = witness.prompt(chapter, length)
    (cold,) = witness.ask("first", [prompt])
    (warm,) = witness.ask(name, [prompt])
    assert (cold.hit_tokens, warm.hit_tokens, warm.reused_tokens) == (0, hit, 0)
    assert witness.counters(name)["loaded_blocks"] >= hit // BLOCK


def test_without_prefix_caching_every_time_is_a_load(witness):
    prompt = witness.prompt(1, LENGTH)
    first, second, third = (witness.ask("uncached", [prompt])[0] for _ in range(3))
    assert [first.hit_tokens, second.hit_tokens, third.hit_tokens] == [0, HIT, HIT]


def test_with_prefix_caching_only_what_it_lacks_is_loaded(witness):
    short, long = witness.prompt(2, 8 * BLOCK), witness.prompt(2, LENGTH)
    witness.ask("uncached", [long])
    own = witness.ask("first", [short])[0]
    loaded = witness.ask("first", [long])[0]
    assert own.hit_tokens > 0
    assert loaded.reused_tokens > 0
    assert loaded.hit_tokens + loaded.reused_tokens == HIT


def test_what_was_generated_is_stored_as_well(witness):
    prompt = witness.prompt(6, 6 * BLOCK)
    (answered,) = witness.ask("first", [prompt], max_tokens=3 * BLOCK)
    longer = [*prompt, *answered.token_ids]
    (warm,) = witness.ask("uncached", [longer])
    assert warm.hit_tokens == (len(longer) - 1) // BLOCK * BLOCK


def test_a_salt_keeps_equal_prompts_apart(witness):
    prompt = witness.prompt(7, LENGTH)
    outputs = [
        witness.ask("uncached", [prompt], salt=salt)[0] for salt in ("one", "one", "two", None)
    ]
    assert [output.hit_tokens for output in outputs] == [0, HIT, 0, 0]
