"""What is read of a checkpoint's own configuration, whatever family it is of; media's tokens."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from kvray.engine.engine_args import (
    CheckpointConfig,
    find_checkpoint,
    read_checkpoint,
    read_media_tokens,
)
from tests.kit.apart import ARGS
from tests.kit.connector import DEEPSEEK, LLAMA, checkpoint


@pytest.mark.parametrize(
    ("model", "served", "shown"),
    [
        ("/models/qwen3-8b", "", "qwen3-8b"),
        ("/hub/models--Qwen--Qwen3-8B/snapshots/0a1b", "", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "", "Qwen/Qwen3-8B"),
        ("/models/qwen3-8b", "chat", "chat"),
        ("/models/a\nb", "", "a?b"),
    ],
)
def test_people_read_the_served_name_or_that_of_the_checkpoint(model, served, shown):
    assert replace(ARGS, model=model, served_name=served).shown_name == shown


def read(directory: Path, config: dict[str, Any]) -> CheckpointConfig:
    return read_checkpoint(checkpoint(directory, config))


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {"model_type": "gemma3", "text_config": LLAMA},
        {"llm_config": LLAMA, "vision_config": {"num_hidden_layers": 9}},
        {"thinker_config": {"text_config": LLAMA}},
        {"num_hidden_layers": 9, "text_config": LLAMA},
    ],
)
def test_the_language_model_of_a_multimodal_one_counts(tmp_path, config):
    assert read(tmp_path, config).num_layers == 4


def test_a_latent_cache_is_known_by_its_rank(tmp_path):
    found = read(tmp_path, DEEPSEEK)
    assert (found.is_mla, found.latent_elems) == (True, 576)
    assert not read(tmp_path, LLAMA | {"kv_lora_rank": None}).is_mla
    assert read(tmp_path, DEEPSEEK | {"index_topk": 2048}).has_index_cache


def test_what_is_not_said_is_not_known(tmp_path):
    found = read(tmp_path, {"text_config": {"model_type": "llama"}})
    assert (found.num_layers, found.latent_elems) == (None, None)
    assert found.recurrent == ""
    assert (found.is_mla, found.is_encoder_decoder, found.has_fp4_cache) == (False, False, False)


@pytest.mark.parametrize("model", ["", "org/model", "/nowhere", "{}/model.gguf"])
def test_what_is_no_directory_says_nothing(tmp_path, monkeypatch, model):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert read_checkpoint(model.format(tmp_path)) == CheckpointConfig()


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with two revisions of a model, of which `main` is the second."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--model"
    (folder / "refs").mkdir(parents=True)
    for name, commit in (("v1", "1" * 40), ("main", "2" * 40)):
        (folder / "refs" / name).write_text(commit)
        (folder / "snapshots" / commit).mkdir(parents=True)
        checkpoint(folder / "snapshots" / commit, LLAMA)
    return folder / "snapshots"


def test_a_name_on_the_hub_leads_to_the_revision_in_its_cache(hub_cache):
    assert find_checkpoint("org/model", None) == str(hub_cache / ("2" * 40))
    assert find_checkpoint("org/model", "v1") == str(hub_cache / ("1" * 40))
    assert find_checkpoint("org/model", "1" * 40) == str(hub_cache / ("1" * 40))


@pytest.mark.parametrize("model", ["", "tiny:1", "model", "org/other", "/org/model", "../model"])
def test_other_names_stay_what_they_are(hub_cache, tmp_path, monkeypatch, model):
    assert find_checkpoint(model, None) == model
    assert find_checkpoint("org/model", "v3") == "org/model"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "huggingface_hub", None)
        assert find_checkpoint("org/model", None) == "org/model"
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("org/model", None) == "org/model", "it is a directory"


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
def test_a_model_of_text_takes_no_media(config):
    assert read_media_tokens(config, 32_000) is None


@pytest.mark.parametrize("token", [151_646, 151_652, 151_655, 151_656, 152_064, 160_000, -200])
def test_media_stand_at_tokens_that_the_checkpoint_names_or_that_are_no_words(token):
    assert may_be_in({"thinker_config": QWEN_OMNI}, 1, token, 2)


def test_other_prompts_are_of_text():
    assert not may_be_in(QWEN_OMNI, 1, 2, 151_654)
    assert not may_be_in(LLAVA, 1, 31_999, vocab_size=32_064)


@pytest.mark.parametrize(
    ("config", "vocab_size"),
    [
        ({"vision_config": {"depth": 2}}, 152_064),
        ({"vision_tower": "clip"}, 152_064),
        ({**LLAVA, "audio_processor": {"config": {}}}, 152_064),
        ({"model": {"img_processor": {"name": "clip"}}}, 152_064),
        (LLAVA, None),
    ],
)
def test_media_without_all_their_names_may_be_in_any_prompt(config, vocab_size):
    assert may_be_in(config, 1, 2, 3, vocab_size=vocab_size)
