"""What besides tokens enters a request's keys, and which requests bypass the cache."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvray.connector.identity import Identity, identify
from kvray.errors import ConfigError


def identity_of(**fields: Any) -> Identity | None:
    return identify(SimpleNamespace(**fields), lambda path: path.encode().hex())


def test_a_plain_request_has_neither_salt_nor_adapter_nor_media() -> None:
    assert identity_of() == Identity(salt=None, lora=None, media=())
    assert identity_of(lora_task_id=None, multimodal_hashes=[], cache_salt_id=None) == identity_of()


def test_the_salt_itself_is_preferred_to_its_number() -> None:
    assert identity_of(cache_salt="tenant", cache_salt_id=5) == Identity(
        salt="tenant", lora=None, media=()
    )
    assert identity_of(cache_salt_id=5) == Identity(salt=5, lora=None, media=())


def test_an_adapter_is_known_by_its_content() -> None:
    found = identity_of(lora_task_id=3, py_lora_path="/adapters/a")
    assert found is not None
    assert found.lora == b"/adapters/a"


def test_an_adapter_without_a_path_bypasses_the_cache() -> None:
    assert identity_of(lora_task_id=3) is None


def test_media_enter_with_digest_and_position() -> None:
    found = identity_of(multimodal_hashes=[[1] * 8, [2] * 8], multimodal_positions=[4, 90])
    assert found is not None
    assert [(item.position, len(item.digest)) for item in found.media] == [(4, 32), (90, 32)]
    assert found.media[0].digest != found.media[1].digest


def test_a_digests_words_may_have_a_sign_or_none() -> None:
    signed = identity_of(multimodal_hashes=[[-1] * 8], multimodal_positions=[4])
    unsigned = identity_of(multimodal_hashes=[[2**32 - 1] * 8], multimodal_positions=[4])
    assert signed == unsigned != identity_of(multimodal_hashes=[[1] * 8], multimodal_positions=[4])


def test_a_digest_of_longer_words_is_no_digest_that_we_know() -> None:
    with pytest.raises(ConfigError, match="32 bits"):
        identity_of(multimodal_hashes=[[2**32] * 8], multimodal_positions=[4])


def test_an_object_that_has_every_attribute_is_a_plain_request() -> None:
    assert identify(MagicMock(), str) == Identity(salt=None, lora=None, media=())


@pytest.mark.parametrize(
    "fields",
    [
        {"multimodal_hashes": [[1] * 8]},
        {"multimodal_hashes": [[1] * 8], "multimodal_positions": []},
        {"multimodal_embedding": object()},
        {"py_multimodal_data": {"image": object()}},
        {"prompt_embedding_table": object()},
        {"prompt_vocab_size": 8},
    ],
)
def test_what_cannot_be_told_apart_bypasses_the_cache(fields: dict[str, Any]) -> None:
    assert identity_of(**fields) is None
