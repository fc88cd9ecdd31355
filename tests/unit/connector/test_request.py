"""What besides tokens enters a request's keys, and which requests bypass the tier."""

import enum
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pydantic
import pytest
import torch

from kvray.connector.request import Identity, RequestReader, identify, media_items
from kvray.engine.engine_args import (
    CheckpointConfig,
    canonical_text,
    field_of,
    number_of,
    text_of,
    to_text,
)
from kvray.errors import ConfigError

HASHES = [[1] * 8, [2] * 8]
UNKNOWN = Mock(return_value=None)  # no adapter can be told from others
PLACED = {"multimodal_hashes": HASHES, "multimodal_positions": [4, 8]}


def identity_of(**fields: Any) -> Identity | None:
    return identify(SimpleNamespace(**fields), lambda task_id, path: path.encode())


def media_of(**fields: Any) -> list[tuple[int, bytes]]:
    """Return position and digest of the items of a request that has HASHES, unless told others."""
    found = identity_of(**{"multimodal_hashes": HASHES, **fields})
    assert found is not None
    return [(item.position, item.digest) for item in found.media]


def test_a_plain_request_has_neither_salt_nor_adapter_nor_media():
    assert identity_of() == Identity(salt=None, lora=None, media=())
    assert identity_of(lora_task_id=None, multimodal_hashes=[], cache_salt_id=None) == identity_of()
    assert identity_of(position_ids=[], encoder_tokens=[], py_multimodal_data={}) == identity_of()
    assert identity_of(mrope_position_deltas=0) == identity_of()
    for config in ({}, {"mrope_position_ids": torch.arange(6).expand(3, 1, -1)}):
        assert identity_of(py_multimodal_data={"mrope_config": config}) == identity_of()


def test_the_salt_itself_is_preferred_to_its_number():
    both = identity_of(cache_salt="tenant", cache_salt_id=5)
    assert both == Identity(salt="tenant", lora=None, media=())
    assert identity_of(cache_salt_id=5) == Identity(salt=5, lora=None, media=())
    assert identity_of(cache_salt="") != identity_of(cache_salt_id=0) != identity_of()
    assert identity_of(cache_salt="") != identity_of()


def test_media_enter_with_digest_and_position():
    (first, one), (second, two) = media_of(multimodal_positions=[4, 90])
    assert (first, second) == (4, 90)
    assert one != two


def test_media_that_are_woven_into_one_another_differ_by_their_runs_also_in_flat_lists():
    def woven(*runs: Any) -> list[tuple[int, bytes]]:
        return media_of(multimodal_item_runs=list(runs))

    def flat(*positions: int) -> list[tuple[int, bytes]]:
        return media_of(
            multimodal_positions=[1, 3],
            multimodal_item_run_cu_offsets=[0, 2, 4],
            multimodal_run_positions=list(positions),
            multimodal_run_lengths=[1, 1, 1, 1],
        )

    one = woven([(1, 1, []), (7, 1, [])], [(3, 1, []), (5, 1, [])])
    assert [position for position, _ in one] == [1, 3]
    assert one != woven([(1, 1, []), (5, 1, [])], [(3, 1, []), (7, 1, [])])
    assert one != woven([(1, 1, [0]), (7, 1, [])], [(3, 1, []), (5, 1, [])])
    assert flat(1, 7, 3, 5) == flat(1, 7, 3, 5) != flat(1, 5, 3, 7)


def test_the_32_bits_of_a_digests_words_may_have_a_sign_or_none():
    signed, unsigned, other = (
        identity_of(multimodal_hashes=[[word] * 8], multimodal_positions=[4])
        for word in (-1, 2**32 - 1, 1)
    )
    assert signed == unsigned != other
    for words in ([2**32] * 8, []):
        with pytest.raises(ConfigError, match="32 bits"):
            identity_of(multimodal_hashes=[words], multimodal_positions=[4])


def test_media_may_have_their_content_beside_their_digests():
    data = {"image": object(), "multimodal_embedding": object(), "mrope_config": {}}
    fields = {"multimodal_positions": [4, 8], "mrope_position_deltas": -3}
    assert media_of(**fields, py_multimodal_data=data) == media_of(**fields)


def test_what_the_processor_was_told_of_media_enters_where_the_engine_asks_with_it():
    told = [{"py_multimodal_data": {"mm_processor_kwargs_hash": one}} for one in "ab"]
    first, other = (media_of(**PLACED, **one) for one in told)
    assert first != other
    seen = [SimpleNamespace(**PLACED, **one) for one in (*told, {"py_multimodal_data": {}})]
    assert len({identify(one, UNKNOWN, with_told=False) for one in seen}) == 1


class Bound:
    """As a request of C++, some of whose properties raise where they do not apply."""

    @property
    def encoder_output_len(self) -> int:
        raise RuntimeError("this request has no encoder")

    lora_task_id: int | None = None
    multimodal_taste: str | None = None  # its version has something new

    def try_get_encoder_output_len(self) -> int | None:
        return None


def test_a_request_is_not_asked_for_what_it_may_refuse_to_tell_and_bypasses_if_it_has_more():
    request = Bound()
    assert identify(request, UNKNOWN) == identity_of()
    request.multimodal_taste = "sweet"
    for untold in (request, SimpleNamespace(lora_task_id=3, py_lora_path="/a"), MagicMock()):
        assert identify(untold, UNKNOWN) is None


THING = object()
DATA_BESIDE_TEXT: list[Any] = [
    *({"image": THING}, {"multimodal_embedding": THING, "mrope_config": {}}, [], THING),
    *({"mrope_config": one} for one in ([1], {"ids": THING})),
    {"mrope_config": {"mrope_position_ids": torch.tensor([[0, 0]])}},
    {"mrope_config": {}, "taste": THING},
]
DATA_BESIDE_MEDIA: list[Any] = [
    *({"image": THING, "taste": THING}, {"mrope_config": {"ids": THING}}, THING),
    {"image": THING, "mm_bidirectional_blocks": True},
    {"image": THING, "mm_processor_kwargs_hash": None},
]
UNTOLD = {
    "multimodal_hashes": (HASHES, {}),
    "multimodal_positions": ([4],),
    "multimodal_lengths": ([4],),
    "multimodal_uuids": (["a"],),
    "py_multimodal_data": DATA_BESIDE_TEXT,
    "py_multimodal_taste": (0,),
    "mrope_position_deltas": (3, False),
    "is_generation_only_request": (True,),
    "prompt_vocab_size": (8,),
    "input_token_extra_ids": ([1, 2],),
    "position_ids": ([0, 1, 2],),
    "token_type_ids": ([0, 1],),
    "language_adapter_uid": (0,),
    "encoder_tokens": ([1],),
    "try_get_encoder_output_len": (lambda: 5,),
    "cache_salt": (5, 1.5, []),
    "cache_salt_id": ("5", True),
    "py_lora_path": ("/adapters/a",),
    "lora_task_id": (3, []),
    **dict.fromkeys(("multimodal_embedding", "mrope_rotary_cos_sin", "multimodal_taste"), (THING,)),
    **dict.fromkeys(("prompt_embedding_table", "encoder_input_features"), (THING,)),
    **dict.fromkeys(("py_encoder_output", "cross_attention_mask", "lora_weights"), (THING,)),
}
UNTOLD_OF_MEDIA = {
    "multimodal_positions": ([], [4], [-4, 4], [4.0, 8.0], [True, 8]),
    "multimodal_lengths": ([4], [-4, 4]),
    "multimodal_item_runs": ([[THING], [THING]],),
    "multimodal_taste": (THING,),
    "py_multimodal_data": DATA_BESIDE_MEDIA,
    "prompt_len": (8,),
}


@pytest.mark.parametrize(
    "fields",
    [
        *({name: one} for name, values in UNTOLD.items() for one in values),
        *({**PLACED, name: one} for name, values in UNTOLD_OF_MEDIA.items() for one in values),
        {"multimodal_hashes": HASHES, "multimodal_item_runs": [[(1, 1, [])], []]},
        {
            **PLACED,
            "multimodal_item_run_cu_offsets": [0, 1, 2],
            "multimodal_run_positions": [1],
            "multimodal_run_lengths": [1],
        },
        {"cache_salt": "a", "cache_salt_id": THING},
        {"lora_task_id": 3, "py_lora_path": b"/adapters/a"},
        *({"lora_task_id": one, "py_lora_path": "/adapters/a"} for one in (-1, "3", True)),
    ],
)
def test_what_cannot_be_told_apart_bypasses_the_cache(fields):
    assert identity_of(**fields) is None


def are_lacking(*requests: dict[str, Any]) -> list[bool]:
    """Return of each request of an engine whether it lacks what others have."""
    args: Any = SimpleNamespace(adapters="", checkpoint=CheckpointConfig())
    reader = RequestReader(args)
    return [reader.is_lacking(SimpleNamespace(**one)) for one in requests]


def test_a_request_that_lacks_what_others_have_cannot_be_told():
    number, text, adapter = {"cache_salt_id": None}, {"cache_salt": "a"}, {"lora_task_id": None}
    assert are_lacking(number, text | adapter, adapter, number) == [False, False, True, True]


@pytest.mark.parametrize(
    "names",
    [
        ("encoder_tokens", "try_get_encoder_output_len"),
        ("multimodal_item_run_cu_offsets", "multimodal_run_positions", "multimodal_run_lengths"),
        tuple(f"multimodal_{one}" for one in ("hashes", "positions", "lengths")),
    ],
)
def test_fields_that_a_version_has_together_are_lost_where_one_is_missing(names):
    assert are_lacking(dict.fromkeys(names)) == [False]
    for name in names:
        assert are_lacking(dict.fromkeys(one for one in names if one != name)) == [True]


WIDE = torch.tensor([[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5]])
"""Positions of a prompt with an image of 2 x 3 patches at tokens 2 to 7, as its keys are turned."""
TALL = torch.tensor([[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 3, 3, 4, 4, 5]])


def digest_of(positions: Any, *, length: int | None = 6) -> bytes:
    fields: dict[str, Any] = {
        "multimodal_hashes": [[7] * 8],
        "multimodal_positions": [2],
        "py_multimodal_data": {"image": {}, "mrope_config": {"mrope_position_ids": positions}},
    }
    if length is not None:
        fields["multimodal_lengths"] = [length]
    found = media_items(fields, prompt_len=9)
    assert found is not None
    return found[0].digest


def test_equal_pixels_in_another_shape_are_another_image_and_what_follows_is_not_part_of_it():
    assert digest_of(WIDE) == digest_of(WIDE.clone()) == digest_of(WIDE[:, None].squeeze(1))
    assert digest_of(WIDE) != digest_of(TALL)
    longer = torch.cat([WIDE, torch.tensor([[6, 7], [6, 7]])], dim=1)
    assert digest_of(WIDE) == digest_of(longer)


def test_positions_that_cannot_be_read_are_left_out():
    unknown = digest_of(None)
    assert digest_of({"handle": 1}) == digest_of(torch.empty(2, 9, device="meta")) == unknown
    assert digest_of(WIDE, length=None) == digest_of(None, length=None) != unknown


def test_an_item_behind_the_prompt_has_no_place():
    fields = {"multimodal_hashes": [[7] * 8], "multimodal_positions": [9]}
    assert media_items(fields, prompt_len=9) is None
    assert media_items(fields, prompt_len=10) is not None


class Name(str, enum.Enum):
    """A text whose `str` differs from one Python to the next."""

    FP8 = "fp8"


class Number(enum.IntEnum):
    DUMMY = 1


class Model(pydantic.BaseModel):
    """As TensorRT-LLM's settings are."""

    algorithm: str = "rocket"
    topk: int | None = None


@dataclass
class Record:
    name: Name
    sizes: tuple[int, ...] = ()


def test_a_text_may_be_a_member_of_an_enumeration_and_what_was_made_up_is_none():
    values = ("auto", Name.FP8, Number.DUMMY, None, 7)
    texts = [text_of(SimpleNamespace(a=value), "a") for value in values]
    assert texts == ["auto", "fp8", "DUMMY", "", ""]
    assert text_of(MagicMock(), "a") == ""
    assert field_of(SimpleNamespace(a=1), "a") == 1
    assert field_of(SimpleNamespace(), "a") is field_of(None, "a") is field_of(MagicMock(), "a")
    assert number_of(MagicMock(), "a", 7) == number_of(SimpleNamespace(a="x"), "a", 7) == 7
    source = SimpleNamespace(b=2, a=None, made_up=MagicMock())
    assert canonical_text(source, ("a", "b", "c", "made_up")) == '{"b": 2}'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Model(topk=3), '{"algorithm": "rocket", "topk": 3}'),
        (Record(Name.FP8, (1, 2)), '{"name": "fp8", "sizes": [1, 2]}'),
        (SimpleNamespace(b=1, a=PurePosixPath("/m")), '{"a": "/m", "b": 1}'),
        ({"b": True, "a": None}, '{"a": null, "b": true}'),
        ({"x", "y", "z"}, '["x", "y", "z"]'),
        ([np.int64(3), np.float32(0.5), Number.DUMMY], '[3, 0.5, "DUMMY"]'),
        (ValueError, '"builtins.ValueError"'),
        (ValueError("at 0x7f"), '"builtins.ValueError"'),
    ],
)
def test_equal_values_have_one_text(value, text):
    assert to_text(value) == text


@pytest.mark.parametrize("make", [object, MagicMock, lambda: print, lambda: [object()]])
def test_no_text_has_an_address_in_it(make):
    assert to_text(make()) == to_text(make())
