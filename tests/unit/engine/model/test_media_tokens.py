"""Which tokens of a prompt may stand for pictures and sounds, by what checkpoints say."""

from typing import Any

import pytest

from kvray.engine.model.checkpoint import read_media_tokens

LLAVA = {"image_token_index": 32_000, "vision_config": {"depth": 2}}
QWEN_OMNI = {
    "audio_token_index": 151_646,
    "image_token_index": 151_655,
    "video_token_index": 151_656,
    "vision_start_token_id": 151_652,
    "audio_config": {"d_model": 8},
    "vision_config": {"depth": 2},
}


def may_be_in(config: dict[str, Any], *tokens: int, vocab_size: int | None = 152_064) -> bool:
    found = read_media_tokens(config, vocab_size)
    assert found is not None
    return found.may_be_in(tokens)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": 2, "image_size": 336, "vision_config": None, "use_video": True},
        {"bos_token_id": 1, "text_config": {"eos_token_id": 2}},
    ],
)
def test_a_model_of_text_takes_no_media(config: dict[str, Any]) -> None:
    assert read_media_tokens(config, 32_000) is None


@pytest.mark.parametrize("token", [151_646, 151_652, 151_655, 151_656, 152_064, 160_000, -200])
def test_media_stand_at_tokens_that_the_checkpoint_names_or_that_are_no_words(token: int) -> None:
    assert may_be_in({"thinker_config": QWEN_OMNI}, 1, token, 2)


def test_other_prompts_are_of_text() -> None:
    assert not may_be_in(QWEN_OMNI, 1, 2, 151_654)
    assert not may_be_in(LLAVA, 1, 31_999, vocab_size=32_064)


@pytest.mark.parametrize(
    "config",
    [
        {"vision_config": {"depth": 2}},
        {"vision_tower": "clip"},
        {**LLAVA, "audio_processor": {"config": {}}},
        {"model": {"img_processor": {"name": "clip"}}},
    ],
)
def test_without_all_their_names_media_may_be_in_any_prompt(config: dict[str, Any]) -> None:
    assert may_be_in(config, 1, 2, 3)


def test_without_the_size_of_the_vocabulary_media_may_be_in_any_prompt() -> None:
    assert may_be_in(LLAVA, 1, vocab_size=None)
