import itertools

from kvray.lab.demo import prompts
from kvray.lab.demo.prompts import (
    LONG,
    SAME_SYSTEM,
    TOKENS_PER_BLOCK,
    UNALIGNED,
    make_prompts,
    shareable_tokens,
)
from kvray.lab.reference.tokenizer import ByteTokenizer

PROMPTS = make_prompts(ByteTokenizer())


def test_long_prompt_ends_with_a_block() -> None:
    assert len(PROMPTS[LONG]) == prompts.LONG_BLOCKS * TOKENS_PER_BLOCK


def test_unaligned_prompt_ends_within_a_block() -> None:
    assert len(PROMPTS[UNALIGNED]) % TOKENS_PER_BLOCK == prompts.UNALIGNED_TOKENS


def common_blocks(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many leading full blocks two prompts share."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return len(list(equal)) // TOKENS_PER_BLOCK


def test_only_the_questions_to_one_system_prompt_share_a_block() -> None:
    for one, other in itertools.combinations(PROMPTS, 2):
        is_same = {one, other} <= set(SAME_SYSTEM)
        shared = common_blocks(PROMPTS[one], PROMPTS[other])
        assert shared == (prompts.SYSTEM_BLOCKS if is_same else 0)


def test_questions_to_one_system_prompt_differ() -> None:
    assert len({PROMPTS[name] for name in SAME_SYSTEM}) == 3


def test_last_token_is_always_computed() -> None:
    assert shareable_tokens(2 * TOKENS_PER_BLOCK) == TOKENS_PER_BLOCK
    assert shareable_tokens(2 * TOKENS_PER_BLOCK + 1) == 2 * TOKENS_PER_BLOCK
