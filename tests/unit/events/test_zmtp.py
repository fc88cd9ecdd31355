"""Connections in ZeroMQ's protocol: in any pieces, within bounds, and addresses of both kinds."""

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.errors import ConfigError, TransferError
from kvray.events.zmtp import Wire, endpoint, parse_endpoint, prepare

READY = b"\x04\x06\x05READY"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
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


@pytest.fixture
def pair() -> Iterator[tuple[Wire, socket.socket]]:
    with connected() as made:
        yield made


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


def frame(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


MESSAGES = st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3), max_size=4)


@given(MESSAGES, st.integers(1, 500))
def test_messages_arrive_whole_in_whatever_pieces(messages: list[list[bytes]], piece: int) -> None:
    sent = GREETING + READY
    for parts in messages:
        sent += b"".join(frame(1, part) for part in parts[:-1]) + frame(0, parts[-1])
    with connected() as (wire, other):
        fits = [parts for parts in messages if sum(len(one) + PART_COST for one in parts) <= MAX]
        if fits == messages:
            assert hear(wire, other, sent, piece) == messages
        assert wire.is_ready or fits != messages


@given(MESSAGES)
def test_two_ends_understand_each_other(messages: list[list[bytes]]) -> None:
    with connected() as (wire, other), closing(Wire(other, "DEALER", message_max=10**6)) as second:
        other.setblocking(False)
        heard: list[list[bytes]] = []
        for parts in messages:
            wire.send(parts)
        while wire.is_sending or len(heard) < len(messages) or not second.is_ready:
            wire.flush()
            second.flush()
            heard += second.receive(100)[1]
        assert heard == messages


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
def test_who_breaks_the_protocol_or_its_bounds_is_hung_up_on(
    pair: tuple[Wire, socket.socket], sent: bytes
) -> None:
    with pytest.raises(TransferError):
        hear(*pair, sent)


def test_a_peer_that_has_gone_is_told_in_a_sentence(pair: tuple[Wire, socket.socket]) -> None:
    wire, other = pair
    assert wire.receive(100) == (0, [])
    other.close()
    with pytest.raises(TransferError, match=r"hung up|ended"):
        wire.receive(100)


def test_pings_are_answered_and_subscriptions_come_in_either_form(
    pair: tuple[Wire, socket.socket],
) -> None:
    wire, other = pair
    sent = GREETING + READY + b"\x04\x0a\x04PING\x00\x07abc" + frame(4, b"\x09SUBSCRIBEa")
    assert hear(
        wire, other, sent + frame(4, b"\x06CANCELb") + frame(4, b"") + frame(4, b"\x03")
    ) == [
        [b"\x01a"],
        [b"\x00b"],
    ]
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
def test_addresses_are_read(address: str, host: str, port: int) -> None:
    assert parse_endpoint(address) == (host, port)


@pytest.mark.parametrize(
    "address", ["", "5557", "tcp://:1", "udp://a:1", "tcp://a:70000", "tcp://a:-1", "tcp://a:x"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address of KV events"):
        parse_endpoint(address)


@pytest.mark.parametrize("make", [lambda host: host, lambda host: f"[{host}]"])
def test_an_ipv6_address_is_bracketed_once(make: Callable[[str], str]) -> None:
    assert endpoint(make("::1"), 7) == "tcp://[::1]:7"
    assert endpoint("10.0.0.7", 7) == "tcp://10.0.0.7:7"
