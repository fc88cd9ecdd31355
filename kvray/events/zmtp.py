"""ZeroMQ's wire protocol, as far as KV events need it, over sockets that never wait.

libzmq bounds messages, not bytes: a peer can have it keep a message whose parts never end, or
subscriptions without end. Here a peer has one message of bounded size in memory, and an answer is
made when there is room for it.

Source: ZMTP 3.0 (RFC 23) with the NULL mechanism, and the SUBSCRIBE and PING of 3.1 (RFC 37).
"""

import contextlib
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from kvray.errors import ConfigError, TransferError

_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
_GREETING = _SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
"""The flags of a frame."""
_PART_COST = 64
"""Bytes that a part of a message counts besides its own: empty parts take memory too."""
_BUFFERS_MAX = 64
_CLOSED = 7, 8
"""The states CLOSE and CLOSE_WAIT of Linux's TCP."""
_KEEPALIVE = (socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)


def endpoint(host: str, port: int) -> str:
    """Return the address of a port, such as `tcp://10.0.0.7:5557` or `tcp://[::1]:5557`."""
    bare = host.strip("[]")
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"


def parse_endpoint(address: str) -> tuple[str, int]:
    """Return host and port of an address; port `*` is 0. ConfigError: it is none."""
    kind, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    with contextlib.suppress(ValueError):
        number = 0 if port == "*" else int(port)
        if kind == "tcp" and host and 0 <= number < 2**16:
            return host, number
    raise ConfigError(f"{address!r:.200} is no address of KV events, such as tcp://HOST:PORT.")


def prepare(connection: socket.socket) -> None:
    """Set up a socket for `Wire`; what a listener accepts is set up as it is."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Wire:
    """One connection; `kind` is the type of its own end, such as `SUB`.

    The caller waits for the socket: to read, and to write while it `is_sending`. Every method but
    `close` raises TransferError when the connection is over, or its peer speaks something else.
    """

    def __init__(self, connection: socket.socket, kind: str, *, message_max: int) -> None:
        """Begin to speak over a socket that never waits; its messages may have so many bytes."""
        self.is_ready = False
        """Whether the peer has said what it is."""
        self._socket = connection
        self._message_max = message_max
        self._received = bytearray()
        self._is_greeted = False
        self._parts: list[bytes] = []
        self._size = 0
        self._out: deque[bytes | memoryview] = deque([_GREETING])
        name = kind.encode()
        self._send_frame(
            _COMMAND, b"\x05READY\x0bSocket-Type" + len(name).to_bytes(4, "big") + name
        )

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    @property
    def is_sending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out)

    @property
    def has_hung_up(self) -> bool:
        """Whether the peer has closed the connection, also where not all it sent has been read."""
        return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _CLOSED

    def receive(self, num_bytes: int) -> tuple[int, list[list[bytes]]]:
        """Read at most so many bytes; return how many came, and the messages that are whole now.

        A subscription is a message too: 1 and the topic, or 0 and the topic where it ends.
        """
        try:
            came = self._socket.recv(num_bytes)
        except BlockingIOError:
            return 0, []
        except OSError as error:
            raise TransferError(f"The connection has ended ({error.strerror}).") from None
        if not came:
            raise TransferError("The peer has hung up.")
        self._received += came
        return len(came), [*self._messages()]

    def send(self, parts: Sequence[bytes]) -> None:
        """Send a message, as far as there is room now; the rest waits for `flush`."""
        for part in parts[:-1]:
            self._send_frame(_MORE, part)
        self._send_frame(0, parts[-1])
        self.flush()

    def flush(self) -> None:
        """Send more of what waits."""
        while self._out:
            try:
                sent = self._socket.sendmsg([*islice(self._out, _BUFFERS_MAX)])
            except BlockingIOError:
                return
            except OSError as error:
                raise TransferError(f"The connection has ended ({error.strerror}).") from None
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out.popleft())
            if sent:
                self._out[0] = memoryview(self._out[0])[sent:]

    def close(self) -> None:
        """Hang up. Twice is fine."""
        self._socket.close()

    def _send_frame(self, flags: int, body: bytes) -> None:
        if len(body) > 255:
            self._out.append(bytes([flags | _LONG]) + len(body).to_bytes(8, "big"))
            self._out.append(body)
        else:
            self._out.append(bytes([flags, len(body)]) + body)

    def _messages(self) -> Iterator[list[bytes]]:
        for flags, body in self._frames():
            if flags & _COMMAND:
                yield from self._obey(body)
                continue
            self._parts.append(body)
            self._size += len(body) + _PART_COST
            if not flags & _MORE:
                parts, self._parts, self._size = self._parts, [], 0
                yield parts

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        if not self._is_greeted and not self._greeted():
            return
        received = self._received
        while len(received) >= 2:
            flags, head = received[0], 2
            size = received[1]
            if flags & _LONG:
                if len(received) < (head := 9):
                    return
                size = int.from_bytes(received[1:head], "big")
            if flags > 7 or not (self.is_ready or flags & _COMMAND):
                raise TransferError("The peer does not speak ZMTP.")
            if self._size + _PART_COST + size > self._message_max:
                raise TransferError(f"A message exceeds the {self._message_max} bytes of one.")
            if len(received) < head + size:
                return
            body = bytes(received[head : head + size])
            del received[: head + size]
            yield flags, body

    def _greeted(self) -> bool:
        """Take the peer's greeting; False: it is not whole yet."""
        got = self._received
        if got[:1] != b"\xff" or (len(got) >= 10 and got[9] != 0x7F):
            raise TransferError("The peer does not speak ZMTP.")
        if len(got) < len(_GREETING):
            return False
        if got[10] < 3 or got[12:32].rstrip(b"\0") != b"NULL":
            raise TransferError("The peer speaks an old ZMTP, or wants a password.")
        del got[: len(_GREETING)]
        self._is_greeted = True
        return True

    def _obey(self, body: bytes) -> Iterable[list[bytes]]:
        """Act on a command; subscriptions come as commands from some peers."""
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        match name:
            case b"READY":
                self.is_ready = True
            case b"ERROR":
                raise TransferError("The peer refuses the connection.")
            case b"PING" if len(self._out) < _BUFFERS_MAX:
                self._send_frame(_COMMAND, b"\x04PONG" + rest[2:18])
            case b"SUBSCRIBE":
                return [[b"\x01" + rest]]
            case b"CANCEL":
                return [[b"\x00" + rest]]
        return []
