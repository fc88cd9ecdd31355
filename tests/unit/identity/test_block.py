import hashlib
import struct
from dataclasses import fields, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.errors import ConfigError
from kvray.identity.block import Namespace, frame

NAMESPACE = Namespace(
    model="SmolLM2-135M",
    quantization="none",
    overrides="",
    kv_dtype="float32",
    num_layers=30,
    kv_factor=2,
    tokens_per_block=32,
    part_bytes=1474560,
    num_parts=1,
    tp_layout="tp1",
    layer_groups="",
    attention_backend="reference",
    engine="reference 0.1",
)


def test_namespace_digest_is_the_golden_one() -> None:
    golden = "e013e717c222f42781bb36d79bcfede4341101579964b73ec8c34c49c312ee08"
    assert NAMESPACE.digest().hex() == golden


def test_namespace_digest_follows_its_written_format() -> None:
    message = struct.pack("<Q", 15) + b"kvray.namespace"
    for name, value in NAMESPACE.to_wire().items():
        text = f"str:{value}" if isinstance(value, str) else f"int:{value:x}"
        message += struct.pack("<Q", len(name)) + name.encode()
        message += struct.pack("<Q", len(text)) + text.encode()
    assert NAMESPACE.digest() == hashlib.sha256(message).digest()


@pytest.mark.parametrize("name", [field.name for field in fields(Namespace)])
def test_every_field_changes_the_digest(name: str) -> None:
    value = getattr(NAMESPACE, name)
    other: Any = value + 1 if isinstance(value, int) else value + "x"
    assert replace(NAMESPACE, **{name: other}).digest() != NAMESPACE.digest()


def test_text_moved_from_one_field_to_the_next_changes_the_digest() -> None:
    left = replace(NAMESPACE, model="ab", quantization="c")
    right = replace(NAMESPACE, model="a", quantization="bc")
    assert left.digest() != right.digest()


def test_equal_namespaces_have_one_digest_whatever_type_holds_a_number() -> None:
    num_layers: Any = np.int64(30)
    other = replace(NAMESPACE, num_layers=num_layers)
    assert other == NAMESPACE
    assert other.digest() == NAMESPACE.digest()


def test_a_lone_surrogate_in_a_field_is_taken_as_it_is() -> None:
    assert replace(NAMESPACE, model="\ud800").digest() != NAMESPACE.digest()


@pytest.mark.parametrize("value", [None, 1.0, b"model", ["model"]])
def test_a_field_that_is_neither_text_nor_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="model must be a text or a whole number"):
        replace(NAMESPACE, model=value).digest()


def test_difference_names_the_fields_that_differ_with_both_values() -> None:
    other = replace(NAMESPACE, kv_dtype="bfloat16", num_parts=2)
    assert NAMESPACE.difference(other) == {
        "kv_dtype": ("float32", "bfloat16"),
        "num_parts": (1, 2),
    }


def test_equal_namespaces_have_no_difference() -> None:
    assert NAMESPACE.difference(replace(NAMESPACE)) == {}


def test_a_namespace_comes_back_from_the_wire() -> None:
    values = msgpack.unpackb(msgpack.packb(NAMESPACE.to_wire()))
    assert Namespace.from_wire(values) == NAMESPACE


@pytest.mark.parametrize("values", [{}, NAMESPACE.to_wire() | {"colour": "red"}])
def test_a_wire_mapping_with_other_fields_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        Namespace.from_wire(values)


@given(st.lists(st.binary(max_size=9)), st.lists(st.binary(max_size=9)))
def test_different_lists_are_framed_differently(left: list[bytes], right: list[bytes]) -> None:
    assert (frame(*left) == frame(*right)) == (left == right)


@given(st.binary(max_size=20), st.integers(0, 20))
def test_a_frame_tells_where_its_items_are_cut(data: bytes, cut: int) -> None:
    assert frame(data[:cut], data[cut:]) != frame(data)
