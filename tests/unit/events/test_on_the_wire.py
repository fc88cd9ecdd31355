"""KV events on the wire: messages, and connections in ZeroMQ's protocol."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.errors import ConfigError, TransferError
from kvray.events.message import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    pack,
    pack_sequence,
    unpack,
    unpack_sequence,
)
from kvray.events.zmtp import Wire, endpoint, parse_endpoint, prepare
from tests.examples import examples
from tests.unit.events.attacks import GREETING, READY, frame

STORED = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None}
HASHES = st.lists(st.integers(-(2**63), 2**64 - 1), max_size=4).map(tuple)
EVENTS = st.one_of(
    st.builds(
        BlockStored,
        block_hashes=HASHES,
        parent_block_hash=st.none() | st.integers(0, 2**64 - 1),
        token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple),
        block_size=st.integers(1, 128),
        lora_id=st.none() | st.integers(0, 9),
        medium=st.sampled_from([None, "GPU", "CPU", "STORAGE"]),
        lora_name=st.none() | st.text(max_size=4),
        group_idx=st.none() | st.integers(0, 3),
    ),
    st.builds(BlockRemoved, block_hashes=HASHES, medium=st.sampled_from([None, "CPU"])),
    st.just(AllBlocksCleared()),
)


@settings(max_examples=examples(100))
@given(st.builds(Batch, at=st.floats(0, 1e12), events=st.lists(EVENTS).map(tuple)))
def test_a_batch_comes_back_as_it_was(batch):
    assert unpack(pack(batch)) == batch


def test_a_batch_has_the_form_that_other_publishers_use():
    stored = BlockStored(block_hashes=[2**64 - 1], token_ids=[5, 6], block_size=2, medium="CPU")
    at, events, dp_rank = msgpack.unpackb(pack(Batch(at=1.5, events=[stored], dp_rank=0)))
    assert (at, dp_rank) == (1.5, 0)
    told = {"type": "BlockStored", "block_hashes": [2**64 - 1], "parent_block_hash": None}
    assert events == [told | {"token_ids": [5, 6], "block_size": 2, "medium": "CPU"}]


def test_other_forms_are_read_and_what_is_new_is_passed_over():
    listed = ["BlockStored", [b"\x01"], None, [7, 8], 2, None, "GPU"]
    later = {**STORED, "token_ids": [], "block_size": 16, "kv_cache_spec_kind": "mla"}
    unknown = {"type": "BlockPinned", "block_hashes": [1]}
    assert unpack(msgpack.packb([2.0, [listed, unknown, later]])).events == (
        BlockStored(block_hashes=(b"\x01",), token_ids=(7, 8), block_size=2, medium="GPU"),
        BlockStored(block_hashes=(1,), token_ids=(), block_size=16, kv_cache_spec_kind="mla"),
    )
    batch = {"ts": 2.0, "events": [{"type": "BlockRemoved", "block_hashes": [1], "medium": None}]}
    assert unpack(msgpack.packb(batch)) == Batch(at=2.0, events=(BlockRemoved(block_hashes=(1,)),))
    assert unpack(msgpack.packb({**batch, "data_parallel_rank": 3})).dp_rank == 3


@pytest.mark.parametrize(
    "payload",
    [
        msgpack.packb([1.0, [{**STORED, "token_ids": [1], "block_size": 2**31}]]),
        msgpack.packb([1.0, [{**STORED, "token_ids": [2**32], "block_size": 1}]]),
        msgpack.packb([1.0, [{"type": "BlockRemoved", "block_hashes": [bytes(65)]}]]),
        msgpack.packb([1.0, [{"type": "BlockRemoved", "block_hashes": [1], "group_idx": 2**40}]]),
        msgpack.packb([1.0, [], 2**40]),
        msgpack.packb([1.0, [], "9" * 4000]),
        msgpack.packb([1.0, [{"type": {}}]]),
        msgpack.packb({"events": []}),
        msgpack.packb([1.0, [[]] * 200_000]),  # 200 kB that would be 11 MB
        b"\x93\x01\xdd\xff\xff\xff\xff",  # a list of 4 billion that ends there
        b"\x91" * 100_000,
        b"\x93\x01\x90\xc7\x08\x01" + bytes(8),
        b"",
        b"\xc1",
        msgpack.packb([1.0]),
        msgpack.packb([1.0, [{"type": "BlockStored"}]]),
        msgpack.packb([1.0, [{"block_hashes": []}]]),
        msgpack.packb([1.0, [3]]),
        msgpack.packb(["x", []]),
    ],
)
def test_other_bytes_are_refused_in_a_sentence(payload):
    with pytest.raises(TransferError, match="not in the format"):
        unpack(payload)


@given(st.integers(-1, 2**63 - 1))
def test_a_sequence_number_has_a_frame_of_eight_bytes(number):
    frame = pack_sequence(number)
    assert unpack_sequence(frame) == number
    with pytest.raises(TransferError, match="8 bytes"):
        unpack_sequence(frame[1:])


MAX = 1000
PART_COST = 64


@contextmanager
def connected() -> Iterator[tuple[Wire, socket.socket]]:
    """Give one end that speaks, and the other as a plain socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    for one in (accepted, other):
        prepare(one)
    other.setblocking(True)
    with other, closing(Wire(accepted, "ROUTER", message_max=MAX)) as wire:
        yield wire, other


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7e",
        GREETING.replace(b"\x03", b"\x02"),
        GREETING.replace(b"NULL", b"PLAI"),
        GREETING + b"\x00\x01x",  # a message before it has said what it is
        GREETING + READY + b"\x08\x01x",
        GREETING + READY + b"\x04\x06\x05ERROR",
        GREETING + READY + frame(0, bytes(MAX)),
        GREETING + READY + b"\x02" + b"\xff" * 8,  # a frame without end
        GREETING + READY + 20 * frame(1, b""),  # parts without end
        GREETING + b"\x06" + (2**40).to_bytes(8, "big"),  # a command without end
    ],
)
def test_who_breaks_the_protocol_or_its_bounds_is_hung_up_on(sent):
    with connected() as pair, pytest.raises(TransferError):
        hear(*pair, sent)


def hear(wire: Wire, other: socket.socket, sent: bytes, piece: int = 10**6) -> list[list[bytes]]:
    """Return the messages in what the other end sends, a piece at a time."""
    messages = []
    for at in range(0, len(sent), piece):
        other.sendall(sent[at : at + piece])
        left = len(sent[at : at + piece])
        while left:
            size, found = wire.receive(10**6)
            left -= size
            messages += found
    return messages


MESSAGES = st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3), max_size=4)


@given(MESSAGES, st.integers(1, 500))
def test_messages_arrive_whole_in_whatever_pieces(messages, piece):
    sent = GREETING + READY
    for parts in messages:
        sent += b"".join(frame(1, part) for part in parts[:-1]) + frame(0, parts[-1])
    with connected() as (wire, other):
        fits = [parts for parts in messages if sum(len(one) + PART_COST for one in parts) <= MAX]
        if fits == messages:
            assert hear(wire, other, sent, piece) == messages
        assert wire.is_ready or fits != messages


def test_a_peer_that_pings_and_never_reads_fills_no_memory():
    with connected() as (wire, other):
        hear(wire, other, GREETING, 1000)
        for _ in range(300):
            other.sendall(100 * frame(4, b"\x04PING\0\0"))
            wire.receive(2**20)
        assert len(wire._out) <= 64


def test_a_peer_that_has_gone_is_told_in_a_sentence():
    with connected() as (wire, other):
        assert wire.receive(100) == (0, [])
        other.close()
        with pytest.raises(TransferError, match=r"hung up|ended"):
            wire.receive(100)


def test_pings_are_answered_and_subscriptions_come_in_either_form():
    sent = GREETING + READY + b"\x04\x0a\x04PING\x00\x07abc"
    for body in (b"\x09SUBSCRIBEa", b"\x06CANCELb", b"", b"\x03"):
        sent += frame(4, body)
    with connected() as (wire, other):
        assert hear(wire, other, sent) == [[b"\x01a"], [b"\x00b"]]
        wire.flush()
        assert other.recv(1000).endswith(b"\x04\x08\x04PONGabc")


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("tcp://10.0.0.7:5557", "10.0.0.7", 5557),
        ("tcp://[::1]:5557", "::1", 5557),
        ("tcp://::1:5557", "::1", 5557),
        ("tcp://[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("tcp://node-7:*", "node-7", 0),
    ],
)
def test_addresses_are_read_and_written(address, host, port):
    assert parse_endpoint(address) == (host, port)
    told = endpoint(host, port)
    assert parse_endpoint(told) == (host, port)
    assert ("[" in told) is (":" in host)
    assert endpoint(f"[{host}]", port) == told


@pytest.mark.parametrize(
    "address", ["", "5557", "tcp://:1", "udp://a:1", "tcp://a:70000", "tcp://a:-1", "tcp://a:x"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="is no address of KV events"):
        parse_endpoint(address)
