from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.errors import ConfigError
from kvray.keys import MediaItem
from kvray.opening import OPENING_BYTES, OPENING_TOKENS, opening_digest

PROMPT = list(range(1000, 1000 + 2 * OPENING_TOKENS))
IMAGE = MediaItem(position=3, digest=b"image")

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=2 * OPENING_TOKENS)


@given(tokens, tokens)
def test_openings_are_equal_exactly_if_prompts_begin_alike(a: list[int], b: list[int]) -> None:
    alike = a[:OPENING_TOKENS] == b[:OPENING_TOKENS]
    assert (opening_digest(a) == opening_digest(b)) == alike
    assert len(opening_digest(a)) == OPENING_BYTES


@pytest.mark.parametrize(
    "other", [{"salt": "s"}, {"salt": 5}, {"lora": b"adapter"}, {"media": (IMAGE,)}]
)
def test_what_keeps_requests_from_sharing_keeps_their_openings_apart(other: Any) -> None:
    assert opening_digest(PROMPT, **other) != opening_digest(PROMPT)


def test_an_item_behind_the_opening_does_not_count() -> None:
    late = MediaItem(position=OPENING_TOKENS, digest=b"image")
    assert opening_digest(PROMPT, media=(late,)) == opening_digest(PROMPT)


@pytest.mark.parametrize("prompt", [[], [2**31], ["text"]])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ConfigError):
        opening_digest(prompt)
