"""Keys of a prefetch are exactly those that the engine's connector gives the same prompt."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvray.actors.shard.actor_requests import prompt_keys
from kvray.actors.staging.replicas import Reader
from kvray.engine.model_name import Adapters
from kvray.engine.request import RequestState
from kvray.errors import ConfigError, ShardUnavailable
from kvray.identity.block import UNNAMED
from kvray.identity.keys import MediaItem, request_seed
from tests.unit.actors.small_shard import NAMESPACE

READER = Reader(namespace=NAMESPACE, adapters="rank 8")
TOKENS = list(range(1, 200))


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def of_the_connector(tokens: list[int], media: Any = (), **identity: Any) -> list[bytes]:
    seed, size = request_seed(NAMESPACE.digest(), **identity), NAMESPACE.tokens_per_block
    state = RequestState(request_id=1, seed=seed, tokens_per_block=size, media=media)
    return list(state.prompt_keys(list(tokens)))


@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 64, 65, 199])
def test_every_full_block_has_the_key_that_its_engine_gives_it(num_tokens):
    keys = prompt_keys(READER, packed(TOKENS[:num_tokens]))
    assert (keys, len(keys)) == (of_the_connector(TOKENS[:num_tokens]), num_tokens // 32)


@pytest.mark.parametrize(
    ("asked", "known", "enters_at"),
    [
        ({"salt": "tenant"}, {"salt": "tenant"}, 0),
        ({"salt": 7}, {"salt": 7}, 0),
        ({"media": [(40, b"image")]}, {"media": (MediaItem(position=40, digest=b"image"),)}, 1),
    ],
)
def test_a_salt_and_media_enter(asked, known, enters_at):
    keys, plain = prompt_keys(READER, packed(TOKENS), **asked), of_the_connector(TOKENS)
    assert keys == of_the_connector(TOKENS, **known)
    assert keys[:enters_at] == plain[:enters_at]
    assert not set(keys[enters_at:]) & set(plain)


def test_an_adapter_enters_as_the_engine_reads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.bin").write_bytes(bytes(1000))
    adapters = Adapters(settings="rank 8", cache_dir=None)
    lora = None
    while lora is None:
        lora = adapters.fingerprint(3, str(adapter))
    keys = prompt_keys(READER, packed(TOKENS), lora=str(adapter))
    assert keys == of_the_connector(TOKENS, lora=lora)


def test_prompts_that_have_no_keys_are_refused(tmp_path):
    silent = replace(READER, adapters=None)
    with pytest.raises(ConfigError, match="how it reads LoRA adapters"):
        prompt_keys(silent, packed(TOKENS), lora=str(tmp_path))
    unnamed = replace(READER, namespace=replace(NAMESPACE, model=UNNAMED))
    with pytest.raises(ShardUnavailable, match=r"until its checkpoint .*`kvray status`"):
        prompt_keys(unnamed, packed(TOKENS))
    with pytest.raises(ConfigError, match="whole number"):
        prompt_keys(READER, packed(TOKENS)[:-1])
