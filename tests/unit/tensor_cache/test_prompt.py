from typing import Any

import numpy as np
import pytest
import torch

from kvray.errors import ConfigError
from kvray.identity.keys import chain_keys
from kvray.tensor_cache.prompt import MaskedPrompt, read_prompt

SEED = bytes(32)
TOKENS = list(range(10))


def read(tokens: Any, mask: Any = None) -> MaskedPrompt:
    return read_prompt(tokens, mask, tokens_per_block=4, seed=SEED)


def test_full_blocks_have_keys_and_the_tail_has_none() -> None:
    assert read(TOKENS).keys == chain_keys(TOKENS, tokens_per_block=4, seed=SEED)
    assert read(TOKENS).num_blocks == 2


@pytest.mark.parametrize(
    "tokens",
    [TOKENS, tuple(TOKENS), torch.arange(10), torch.arange(10, dtype=torch.int16), np.arange(10)],
)
def test_lists_arrays_and_tensors_of_equal_tokens_have_equal_keys(tokens: Any) -> None:
    assert read(tokens) == read(TOKENS)


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_a_mask_begins_at_its_first_true(kind: Any) -> None:
    prompt = read(TOKENS, kind([False] * 4 + [True] * 6))
    assert (prompt.num_masked, prompt.first, prompt.num_blocks) == (4, 1, 1)


def test_a_mask_that_leaves_out_all_full_blocks_asks_for_none() -> None:
    assert read(TOKENS, [False] * 8 + [True] * 2).num_blocks == 0


def test_an_empty_prompt_with_an_empty_mask_asks_for_nothing() -> None:
    assert read([], []).num_blocks == 0


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        ([False] * 3 + [True] * 7, "multiple of tokens_per_block = 4, for example 0"),
        ([False] * 6 + [True] * 4, "for example 4"),
        ([True] * 4 + [False] * 6, "True before a False"),
        ([True] * 9, "one boolean for each of the 10 tokens"),
        ([1] * 10, "one boolean"),
        (torch.ones(1, 10, dtype=torch.bool), "one boolean"),
    ],
)
def test_a_mask_that_is_no_suffix_of_blocks_is_refused(mask: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(TOKENS, mask)


@pytest.mark.parametrize(
    "tokens", ["text", [1.5, 2.0], ["a"], torch.ones(8), torch.ones(1, 8).int(), [2**31], None]
)
def test_tokens_that_are_no_integers_are_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match=r"Tokens must be|does not fit"):
        read(tokens)
