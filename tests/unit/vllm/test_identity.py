"""What tells vLLM's requests apart enters their keys; what cannot be told bypasses the cache."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvray.engine.request.identity import AskedRequest
from kvray.vllm.identity import RequestReader

TOKENS = [1, 2, 3, 4, 5]


def request(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "prompt_token_ids": TOKENS[:3],
        "all_token_ids": TOKENS,
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "resumable": False,
        "pooling_params": None,
        "mm_features": [],
        "lora_request": None,
        "cache_salt": None,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**{**fields, **changes})


def feature(
    name: str | None, *, offset: int = 1, length: int = 2, mask: list[bool] | None = None
) -> SimpleNamespace:
    is_embed = None if mask is None else torch.tensor(mask)
    place = SimpleNamespace(offset=offset, length=length, is_embed=is_embed)
    return SimpleNamespace(modality="image", identifier=name, mm_position=place)


@pytest.fixture
def reader() -> RequestReader:
    args = SimpleNamespace(adapters="")
    figures = SimpleNamespace(totals=Counter())
    return RequestReader(SimpleNamespace(args=args, figures=figures, tenants=None))


def read(reader: RequestReader, **changes: Any) -> AskedRequest:
    found = reader.read(request(**changes), 7, 0)
    assert found is not None
    return found


def test_a_text_is_its_tokens_with_what_it_has_generated(reader: RequestReader) -> None:
    found = read(reader)
    assert (found.request_id, found.tokens, found.prompt_len) == (7, TOKENS, 5)
    assert found.identity.is_plain


def test_a_salt_is_part_of_it(reader: RequestReader) -> None:
    assert read(reader, cache_salt="a").identity.salt == "a"


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None, "prompt_embeds": object()},
        {"prompt_embeds": object()},
        {"prompt_is_token_ids": [True, False, True]},
        {"resumable": True},
        {"pooling_params": object()},
        {"mm_features": [feature(None)]},
        {"mm_features": [feature("")]},
    ],
)
def test_more_than_tokens_bypasses_the_cache(
    reader: RequestReader, changes: dict[str, Any]
) -> None:
    assert reader.read(request(**changes), 7, 0) is None


def test_media_differ_by_name_place_length_and_mask(reader: RequestReader) -> None:
    kinds = [
        feature("a"),
        feature("b"),
        feature("a", offset=2),
        feature("a", length=3),
        feature("a", mask=[True, False]),
        feature("a", mask=[False, True]),
    ]
    found = {read(reader, mm_features=[one]).identity.media for one in kinds}
    assert len(found) == len(kinds)
    assert read(reader, mm_features=[feature("a")]).identity.media in found


def test_adapters_differ_by_their_bytes_and_ones_loaded_in_place_bypass(
    reader: RequestReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvray.engine.model.adapters._WAIT_S", 10.0)
    loras = []
    for number in (1, 2):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "adapter_config.json").write_text("{}")
        (directory / "adapter_model.bin").write_bytes(bytes([number]) * 100)
        asked = SimpleNamespace(lora_int_id=number, lora_path=str(directory), load_inplace=False)
        loras.append(read(reader, lora_request=asked).identity.lora)
    assert None not in loras
    assert loras[0] != loras[1]
    asked.load_inplace = True
    assert reader.read(request(lora_request=asked), 7, 0) is None
