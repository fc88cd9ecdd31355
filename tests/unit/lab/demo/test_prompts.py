import itertools

from kvray.lab.demo import phases, prompts
from kvray.lab.demo.engines import TOKENS_PER_BLOCK, shareable_tokens
from kvray.lab.demo.prompts import make_prompts
from kvray.lab.reference.tokenizer import ByteTokenizer

PROMPTS = make_prompts(ByteTokenizer(), tokens_per_block=TOKENS_PER_BLOCK)


def test_long_prompt_ends_with_a_block() -> None:
    assert len(PROMPTS.long.token_ids) == prompts.LONG_BLOCKS * TOKENS_PER_BLOCK


def test_unaligned_prompt_ends_within_a_block() -> None:
    assert len(PROMPTS.unaligned.token_ids) % TOKENS_PER_BLOCK == prompts.UNALIGNED_TOKENS


def test_only_the_questions_to_one_system_prompt_share_a_block() -> None:
    for one, other in itertools.combinations(PROMPTS.all(), 2):
        shared = phases.common_tokens(one.token_ids, other.token_ids)
        is_same = {one, other} <= set(PROMPTS.same_system)
        assert shared == (prompts.SYSTEM_BLOCKS * TOKENS_PER_BLOCK if is_same else 0)


def test_questions_to_one_system_prompt_differ() -> None:
    assert len({prompt.token_ids for prompt in PROMPTS.same_system}) == 3


def test_last_token_is_always_computed() -> None:
    assert shareable_tokens(2 * TOKENS_PER_BLOCK) == TOKENS_PER_BLOCK
    assert shareable_tokens(2 * TOKENS_PER_BLOCK + 1) == 2 * TOKENS_PER_BLOCK
