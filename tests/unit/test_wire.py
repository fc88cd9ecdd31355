import contextlib
import struct
import time

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvray import errors, wire

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def body_of(frame: bytes) -> bytes:
    size = wire.LENGTH.size
    assert wire.body_length(frame[:size]) == len(frame) - size
    return frame[size:]


@given(st.dictionaries(st.text(), PLAIN))
def test_a_message_comes_back_as_it_was(message):
    assert wire.decode(body_of(wire.encode(message))) == message


def test_whole_numbers_of_numpy_lone_surrogates_and_maps_by_number_are_carried():
    frame = wire.encode({"hits": np.int64(7), "model": "\ud800", "leases": {1: ["far", 7]}})
    assert wire.decode(body_of(frame)) == {"hits": 7, "model": "\ud800", "leases": {1: ["far", 7]}}


def test_what_no_frame_can_carry_and_one_too_long_are_refused_also_before_it_is_read():
    for value in (object(), 2**64, {1, 2}, np.float32(1)):
        with pytest.raises(errors.TransferError, match="cannot be sent"):
            wire.encode({"value": value})
    with pytest.raises(errors.TransferError, match="send fewer keys"):
        wire.encode({"keys": bytes(wire.FRAME_MAX)})
    assert wire.body_length(struct.pack("<I", wire.FRAME_MAX)) == wire.FRAME_MAX
    with pytest.raises(errors.TransferError, match="it does not speak kvray's protocol"):
        wire.body_length(struct.pack("<I", wire.FRAME_MAX + 1))


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x81", msgpack.packb([1]), msgpack.packb({b"op": 1}), msgpack.packb({1: 1})],
)
def test_a_body_that_is_no_map_with_text_keys_is_refused(body):
    with pytest.raises(errors.TransferError, match="The peer sent a"):
        wire.decode(body)


@given(st.binary(max_size=64))
@example(b"\x91" * 100_000)
def test_garbage_never_raises_anything_else(body):
    with contextlib.suppress(errors.TransferError):
        assert all(isinstance(key, str) for key in wire.decode(body))


def test_an_error_crosses_with_its_class_and_sentence_or_as_the_base_class():
    wire.raise_for({"ok": True})
    for kind in (errors.LayoutMismatch, errors.ConfigError, errors.KVRayError):
        reply = wire.decode(body_of(wire.encode(wire.error_reply(kind("Why, and the fix.")))))
        with pytest.raises(kind, match=r"^Why, and the fix\.$") as raised:
            wire.raise_for(reply)
        assert raised.type is kind
    for name in ("SystemExit", "__doc__", "annotations", None, 7):
        with pytest.raises(errors.KVRayError) as unknown:
            wire.raise_for({"ok": False, "error": name, "message": "m"})
        assert unknown.type is errors.KVRayError


@pytest.mark.parametrize(
    "values",
    [
        b"\xdd" + (2**22 - 100).to_bytes(4, "big") + b"\x80" * (2**22 - 100),
        b"\xdc\x20\x00" + (b"\xdc\x01\x00" + b"\x80" * 256) * 2**13,
        b"\xde\xff\xff" + bytes(2 * 0xFFFF),
        b"\x91" * 2**21,
        b"\xdd" + (2**21).to_bytes(4, "big") + bytes(2**21),
    ],
    ids=["long", "many", "wide", "deep", "numbers"],
)
def test_a_frame_of_many_small_things_is_refused_before_they_are_made(values):
    began = time.process_time()
    with pytest.raises(errors.TransferError):
        wire.decode(b"\x81\xa1x" + values)
    assert time.process_time() - began < 0.2


def test_as_many_lists_and_maps_as_a_frame_may_have_are_carried():
    most = wire._ITEMS_MAX - 2  # beside the message and the list that they are in
    assert wire.decode(msgpack.packb({"x": [[]] * most})) == {"x": [[]] * most}
    with pytest.raises(errors.TransferError, match="too many lists and maps"):
        wire.decode(msgpack.packb({"x": [[]] * (most + 1)}))
