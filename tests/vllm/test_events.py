"""vLLM's own publisher tells of the blocks in its node's memory; a real subscriber listens."""

import pytest

from tests.kv_subscriber import KvSubscriber
from tests.vllm.witness import BLOCK, HIT, LENGTH, events_at

pytestmark = [pytest.mark.ray]

ENGINES = ["telling", "uncached"]


@pytest.fixture(scope="module")
def heard(witness):
    with KvSubscriber(*events_at(witness.tier)) as made:
        yield made


def blocks_of(prompt: list[int]) -> set[tuple[int, ...]]:
    """Return the tokens of the 20 whole blocks of a prompt."""
    return {tuple(prompt[at : at + BLOCK]) for at in range(0, HIT, BLOCK)}


def near(heard) -> set[tuple[int, ...]]:
    """Return the tokens of the blocks that are said to be in memory."""
    return {tokens for _, tokens in heard.content["CPU"].values()}


def flush(witness, heard, condition) -> None:
    """Have the engine make passes until it has told what it has."""
    for question in range(20):
        witness.ask("telling", [witness.prompt(90, BLOCK, question=question)], max_tokens=4)
        if condition(heard.read()):
            return
    raise AssertionError({medium: len(blocks) for medium, blocks in heard.content.items()})


def test_a_block_in_memory_is_told_as_vllm_tells_its_own(witness, heard):
    prompt = witness.prompt(0, LENGTH)
    witness.ask("telling", [prompt], max_tokens=8)
    flush(witness, heard, lambda heard: blocks_of(prompt) <= near(heard))
    # The same hashes, parents and tokens.
    assert heard.content["CPU"].items() <= heard.content["GPU"].items()


def test_a_block_that_another_engine_stored_is_told_when_it_is_loaded(witness, heard):
    prompt = witness.prompt(1, LENGTH)
    witness.ask("uncached", [prompt])
    (warm,) = witness.ask("telling", [prompt], max_tokens=8)
    assert warm.hit_tokens == HIT
    flush(witness, heard, lambda heard: blocks_of(prompt) <= near(heard))


def test_blocks_that_leave_the_memory_are_removed(witness, heard):
    prompt = witness.prompt(2, LENGTH)
    witness.ask("telling", [prompt], max_tokens=8)
    flush(witness, heard, lambda heard: blocks_of(prompt) <= near(heard))
    own = dict(heard.content["GPU"])
    witness.tier.say("clear", "--yes")
    flush(witness, heard, lambda heard: blocks_of(prompt).isdisjoint(near(heard)))
    assert heard.content["GPU"].items() >= own.items()  # of its own pool nothing went
