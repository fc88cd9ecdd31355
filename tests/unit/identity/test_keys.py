import hashlib
import struct
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvray.errors import ConfigError
from kvray.identity.block import BlockKey, Namespace, frame
from kvray.identity.keys import MediaItem, Tokens, chain_keys, request_seed

SEED = bytes(range(32))
TOKENS = [1, 2, 3, 4, -1, 2**31 - 1, 0, 7, 9]
PICTURE = MediaItem(position=5, digest=b"picture")
GOLDEN_KEYS = {
    None: "b3a439b7d0f4cd6e6448f8c923cb6a22f5bd4f3dec95e780930d2050bb0153fe",
    PICTURE: "cc2ebbe3f6e860bfd743ffd5227b34bd683c6a9b412e590fd03069f703f367a1",
}
NAMESPACE_DIGEST = bytes.fromhex("e7b45e101aa664e7785d19b52fe83fbe6a73cef3f837a73757376cc5a248a6a6")
GOLDEN_SEEDS: list[tuple[dict[str, Any], str]] = [
    ({}, "0d797d7b0529e8727fe4eb949e54c7d874b32373beeae60b59475e230a83ad63"),
    ({"salt": "tenant"}, "fc8f5d558419172d8d8236e18c864e8d7b8be0452b634053476ad3a55f806fcd"),
    ({"salt": 7}, "ae6dea571798742ac25531f5c6b0b876ce02beafb6445046483e9bf718ca0824"),
    ({"salt": ""}, "ba7f45922b3cb217db1a7461902f7619d2cafc3d0728df33129fcc2d75df3031"),
    ({"lora": b"adapter"}, "d4f9409fbc8879a960479c09ebf0182995507c40eaf843dcb564838bdd4c9d13"),
]


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


def keys_of(
    tokens: Tokens, *, size: int = 4, seed: bytes = SEED, media: Sequence[MediaItem] = ()
) -> list[BlockKey]:
    return chain_keys(tokens, tokens_per_block=size, seed=seed, media=media)


# Golden vectors, and the written format once more in its plainest form.


def derived_keys(
    tokens: Sequence[int], size: int, seed: bytes, media: Sequence[MediaItem] = ()
) -> list[bytes]:
    keys, parent = [], seed
    for start in range(0, len(tokens) - size + 1, size):
        items = items_within(media, start, size)
        message = parent + size.to_bytes(4, "little")
        for token in tokens[start : start + size]:
            message += token.to_bytes(4, "little", signed=True)
        message += len(items).to_bytes(4, "little")
        for offset, digest in items:
            message += offset.to_bytes(4, "little") + len(digest).to_bytes(4, "little") + digest
        parent = hashlib.sha256(message).digest()
        keys.append(parent)
    return keys


def items_within(media: Sequence[MediaItem], start: int, size: int) -> list[tuple[int, bytes]]:
    inside = [one for one in media if start <= one.position < start + size]
    return sorted((one.position - start, one.digest) for one in inside)


@pytest.mark.parametrize("item", GOLDEN_KEYS)
def test_keys_are_the_golden_ones(item):
    first, second = keys_of(TOKENS, media=[item] if item else [])
    assert first.hex() == "302c1c2e27df6dc22af7dca0b4ef1b1121d49fe0bb28055880b11852b1c12322"
    assert second.hex() == GOLDEN_KEYS[item]


def test_seeds_are_the_golden_ones_and_follow_their_written_format():
    for options, golden in GOLDEN_SEEDS:
        assert request_seed(NAMESPACE_DIGEST, **options).hex() == golden
    items = [b"kvray.seed", NAMESPACE_DIGEST, b"int:ff", b"lora:adapter"]
    message = b"".join(struct.pack("<Q", len(item)) + item for item in items)
    seed = request_seed(NAMESPACE_DIGEST, salt=255, lora=b"adapter")
    assert seed == hashlib.sha256(message).digest()


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40),
    st.integers(1, 9),
    st.binary(min_size=32, max_size=32),
    st.lists(
        st.builds(MediaItem, position=st.integers(0, 45), digest=st.binary(min_size=1)), max_size=4
    ),
)
def test_keys_follow_their_written_format(tokens, size, seed, media):
    found = keys_of(tokens, size=size, seed=seed, media=media)
    assert found == derived_keys(tokens, size, seed, media)


# Requests that differ.


def test_every_salt_adapter_and_namespace_has_a_seed_of_its_own():
    namespaces = [replace(NAMESPACE, tokens_per_block=size).digest() for size in (2, 3)]
    salts = [None, "", "1", 1, "None", "int:1", "str:1", 0, -1]
    adapters = [None, b"", b"a", b"lora:a"]
    drawn = list(product(namespaces, salts, adapters))
    assert len({request_seed(one, salt=salt, lora=lora) for one, salt, lora in drawn}) == len(drawn)


def test_any_text_and_any_number_can_be_a_salt():
    for one, other in (("\ud83d\ude00", "\U0001f600"), (10**5000, 10**5000 + 1)):
        assert request_seed(SEED, salt=one) != request_seed(SEED, salt=other)
    number: Any = np.int64(7)
    assert request_seed(SEED, salt=number) == request_seed(SEED, salt=7), "whatever type has it"
    assert request_seed(SEED, salt=np.str_("a")) == request_seed(SEED, salt="a")


# Forms of tokens.


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        np.array(TOKENS, dtype=np.int64),
        np.array(TOKENS, dtype=np.int32),
        np.array(TOKENS, dtype=">i8"),
        np.repeat(np.array(TOKENS), 2)[::2],
        [np.int64(token) for token in TOKENS],
        torch.tensor(TOKENS),
        torch.tensor(TOKENS, dtype=torch.int32),
        list(torch.tensor(TOKENS)),
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{tokens!r:.24}",
)
def test_every_form_of_the_same_tokens_gives_the_same_keys(tokens):
    assert keys_of(tokens) == keys_of(TOKENS)
    assert keys_of(np.array(TOKENS[:4], dtype=np.uint64)) == keys_of(TOKENS[:4])
    assert keys_of(np.array([])) == []
    assert [int(token) for token in tokens] == TOKENS, "they are left as they were"


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2.0, 3, 4],
        [1, 2, 3, 4, 5.0],
        ["1", "2", "3", "4"],
        "text",
        [1, None, 3, 4],
        [[1, 2], [3, 4]],
        *([1, 2, 3, one] for one in (2**31, -(2**31) - 1, 10**30, np.float32(4))),
        None,
        7,
        iter([1, 2, 3, 4]),
        *map(np.array, (7, [[1, 2], [3, 4]], [1.0, 2.0], [True, False], ["1", "2"])),
        *map(np.array, ([2**31], [-(2**31) - 1])),
        np.array([1, 2], dtype=object),
        np.array([2**64 - 1], dtype=np.uint64),
        *map(torch.tensor, ([[1, 2]], [1.0], [True])),
        torch.tensor([1.0], requires_grad=True),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.empty(4, dtype=torch.int64, device="meta"),
        list(torch.tensor([1.0, 2.0])),
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{tokens!r:.24}",
)
def test_what_is_no_flat_list_of_32_bit_integers_is_refused(tokens):
    with pytest.raises(ConfigError, match=r"[Tt]oken"):
        keys_of(tokens)


@pytest.mark.parametrize(
    ("call", "values", "said"),
    [
        (lambda salt: request_seed(SEED, salt=salt), [1.0, b"x", ["x"]], "The cache salt must be"),
        (lambda size: keys_of(TOKENS, size=size), [0, -1], "tokens_per_block must be at least 1"),
        (lambda seed: keys_of(TOKENS, seed=seed), [b"", b"x", bytes(33)], "A seed has 32 bytes"),
        (lambda digest: MediaItem(position=5, digest=digest), [b""], "at token 5 has no digest"),
        (
            lambda value: replace(NAMESPACE, model=value).digest(),
            [None, 1.0, b"model", ["model"]],
            "model must be a text or a whole number",
        ),
    ],
    ids=["salt", "size", "seed", "media", "field"],
)
def test_other_values_that_cannot_be_are_refused(call, values, said):
    for value in values:
        with pytest.raises(ConfigError, match=said):
            call(value)


def test_namespace_digest_is_the_golden_one_and_follows_its_written_format():
    golden = "e013e717c222f42781bb36d79bcfede4341101579964b73ec8c34c49c312ee08"
    assert NAMESPACE.digest().hex() == golden
    message = struct.pack("<Q", 15) + b"kvray.namespace"
    for name, value in NAMESPACE.to_wire().items():
        text = f"str:{value}" if isinstance(value, str) else f"int:{value:x}"
        message += struct.pack("<Q", len(name)) + name.encode()
        message += struct.pack("<Q", len(text)) + text.encode()
    assert NAMESPACE.digest() == hashlib.sha256(message).digest()
    num_layers: Any = np.int64(30)
    other = replace(NAMESPACE, num_layers=num_layers)
    assert (other, other.digest()) == (NAMESPACE, NAMESPACE.digest()), "whatever type has a number"


def test_every_field_changes_the_digest_and_fields_are_kept_apart_and_may_hold_any_text():
    changes: list[dict[str, Any]] = [{}, {"model": "\ud800"}]
    for field in fields(Namespace):
        value = getattr(NAMESPACE, field.name)
        changes.append({field.name: value + 1 if isinstance(value, int) else value + "x"})
    changes += [{"model": "ab", "quantization": "c"}, {"model": "a", "quantization": "bc"}]
    assert len({replace(NAMESPACE, **one).digest() for one in changes}) == len(changes)


def test_a_namespace_comes_back_from_the_wire_and_no_other_mapping_does():
    values = msgpack.unpackb(msgpack.packb(NAMESPACE.to_wire()))
    assert Namespace.from_wire(values) == NAMESPACE
    for other in ({}, values | {"colour": "red"}):
        with pytest.raises(TypeError):
            Namespace.from_wire(other)


@given(st.lists(st.binary(max_size=9)), st.lists(st.binary(max_size=9)), st.integers(0, 9))
def test_different_lists_have_other_frames(left, right, cut):
    data = b"".join(left)
    for other in (right, [data[:cut], data[cut:]], [data]):
        assert (frame(*left) == frame(*other)) == (left == other)
