from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.errors import ConfigError
from kvray.identity.keys import MediaItem
from kvray.trace.prefix_digest import PREFIX_DIGEST_BYTES, PREFIX_TOKENS, prefix_digest

PROMPT = list(range(1000, 1000 + 2 * PREFIX_TOKENS))
IMAGE = MediaItem(position=3, digest=b"image")

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=2 * PREFIX_TOKENS)


@given(tokens, tokens)
def test_prefix_digests_are_equal_exactly_if_prompts_begin_alike(
    a: list[int], b: list[int]
) -> None:
    alike = a[:PREFIX_TOKENS] == b[:PREFIX_TOKENS]
    assert (prefix_digest(a) == prefix_digest(b)) == alike
    assert len(prefix_digest(a)) == PREFIX_DIGEST_BYTES


@pytest.mark.parametrize(
    "other", [{"salt": "s"}, {"salt": 5}, {"lora": b"adapter"}, {"media": (IMAGE,)}]
)
def test_what_keeps_requests_from_sharing_keeps_their_prefix_digests_apart(other: Any) -> None:
    assert prefix_digest(PROMPT, **other) != prefix_digest(PROMPT)


def test_an_item_behind_the_prefix_does_not_count() -> None:
    late = MediaItem(position=PREFIX_TOKENS, digest=b"image")
    assert prefix_digest(PROMPT, media=(late,)) == prefix_digest(PROMPT)


@pytest.mark.parametrize("prompt", [[], [2**31], ["text"]])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ConfigError):
        prefix_digest(prompt)
