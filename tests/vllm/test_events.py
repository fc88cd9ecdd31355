"""vLLM's own publisher tells of the blocks in its node's memory; a real subscriber listens."""

import pytest

from tests.kv_subscriber import KvSubscriber
from tests.vllm.witness import BLOCK, events_at

pytestmark = [pytest.mark.ray]

ENGINES = ["telling", "uncached"]

LENGTH = 20 * BLOCK + 9


@pytest.fixture(scope="module")
def heard(witness):
    with KvSubscriber(*events_at(witness.tier)) as made:
        yield made


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
    flush(witness, heard, lambda heard: len(heard.content["CPU"]) >= 20)
    own, near = heard.content["GPU"], heard.content["CPU"]
    assert near.items() <= own.items()  # the same hashes, parents and tokens
    told = [tokens for _, tokens in near.values()]
    assert {tuple(prompt[at : at + BLOCK]) for at in range(0, 20 * BLOCK, BLOCK)} <= {*told}


def test_a_block_that_another_engine_stored_is_told_when_it_is_loaded(witness, heard):
    prompt = witness.prompt(1, LENGTH)
    witness.ask("uncached", [prompt])
    (warm,) = witness.ask("telling", [prompt], max_tokens=8)
    assert warm.hit_tokens == 20 * BLOCK
    wanted = {tuple(prompt[at : at + BLOCK]) for at in range(0, 20 * BLOCK, BLOCK)}
    flush(witness, heard, lambda h: wanted <= {tokens for _, tokens in h.content["CPU"].values()})


def test_blocks_that_leave_the_memory_are_removed(witness, heard):
    before = dict(heard.content["CPU"])
    witness.tier.say("clear", "--yes")
    flush(witness, heard, lambda heard: before.keys().isdisjoint(heard.content["CPU"]))
    assert {block for medium, block in heard.removed if medium == "CPU"} >= before.keys()
    assert heard.content["GPU"].items() >= before.items()  # of its own pool nothing went
