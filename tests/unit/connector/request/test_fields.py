"""How fields of other people's objects are read, and how they become text that names blocks."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pydantic
import pytest

from kvray.engine.fields import canonical_text, field_of, number_of, text_of, to_text


class Name(str, enum.Enum):
    """A text whose `str` differs from one Python to the next."""

    FP8 = "fp8"


class Number(enum.IntEnum):
    """A number with a name."""

    DUMMY = 1


class Model(pydantic.BaseModel):
    """As TensorRT-LLM's settings are."""

    algorithm: str = "rocket"
    topk: int | None = None


@dataclass
class Record:
    """As some of its settings were."""

    name: Name
    sizes: tuple[int, ...] = ()


def test_what_is_not_there_and_what_was_made_up_are_none() -> None:
    assert field_of(SimpleNamespace(a=1), "a") == 1
    assert field_of(SimpleNamespace(), "a") is field_of(None, "a") is field_of(MagicMock(), "a")
    assert number_of(MagicMock(), "a", 7) == number_of(SimpleNamespace(a="x"), "a", 7) == 7


@pytest.mark.parametrize(
    ("value", "text"),
    [("auto", "auto"), (Name.FP8, "fp8"), (Number.DUMMY, "DUMMY"), (None, ""), (7, "")],
)
def test_a_text_may_be_a_member_of_an_enumeration(value: object, text: str) -> None:
    assert text_of(SimpleNamespace(a=value), "a") == text
    assert text_of(MagicMock(), "a") == ""


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
def test_equal_values_have_one_text(value: Any, text: str) -> None:
    assert to_text(value) == text


@pytest.mark.parametrize("make", [object, MagicMock, lambda: print, lambda: [object()]])
def test_no_text_has_an_address_in_it(make: Callable[[], object]) -> None:
    assert to_text(make()) == to_text(make())


def test_only_fields_that_are_set_enter_a_text() -> None:
    source = SimpleNamespace(b=2, a=None, made_up=MagicMock())
    assert canonical_text(source, ("a", "b", "c", "made_up")) == '{"b": 2}'
