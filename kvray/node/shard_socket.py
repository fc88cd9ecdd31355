"""The client end of a shard's unix socket: one call at a time, each with a deadline."""

import contextlib
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

from kvray import wire
from kvray.errors import ShardUnavailable
from kvray.wire import SOCKET_FILE


class ShardSocket:
    """Calls to the shard whose arena lies in `directory`; connects again after a failure."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / SOCKET_FILE
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def call(self, op: str, *, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Send one request and return its reply.

        Raises:
            ShardUnavailable: no answer within `timeout_s`.
            TransferError: `fields` are too long for a frame, or the answer is no frame.
            KVRayError: the shard's own answer.
        """
        if os.getpid() != self._pid:
            # The connection is the parent's: two processes would read each other's replies.
            raise ShardUnavailable("A forked process cannot use its parent's link; use spawn.")
        request = wire.encode({"op": op, **fields})
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise ShardUnavailable(f"The socket {self._path} is busy with another call.")
        try:
            reply = self._exchange(request, deadline)
        except OSError as error:
            self._disconnect()
            raise ShardUnavailable(
                f"The shard at {self._path} did not answer ({error}); see `kvray status`."
            ) from None
        except BaseException:
            self._disconnect()  # The rest of this reply must not be taken for the next one.
            raise
        finally:
            self._lock.release()
        wire.raise_for(reply)
        return reply

    def interrupt(self) -> None:
        """Have a call fail now in which another thread waits; the next call connects again."""
        peer = self._socket
        if peer is not None:
            with contextlib.suppress(OSError):  # it is closed just now
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up; the next call connects again."""
        if os.getpid() == self._pid:
            with self._lock:
                self._disconnect()

    def _exchange(self, request: bytes, deadline: float) -> dict[str, Any]:
        peer = self._connected(deadline)
        peer.settimeout(_left(deadline))
        peer.sendall(request)
        head = _receive(peer, wire.LENGTH.size, deadline)
        return wire.decode(_receive(peer, wire.body_length(head), deadline))

    def _connected(self, deadline: float) -> socket.socket:
        """Return the connection; a new one if the shard has hung up since the last call."""
        if self._socket is not None and _has_input(self._socket):
            # No input is due between calls: the shard has ended, or breaks the protocol.
            self._disconnect()
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(_left(deadline))
            self._socket.connect(str(self._path))
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _receive(peer: socket.socket, size: int, deadline: float) -> bytes:
    """Return `size` bytes; bytes that came before the deadline count, however late we look."""
    received = bytearray()
    while len(received) < size:
        peer.settimeout(max(deadline - time.monotonic(), 0.0))
        try:
            chunk = peer.recv(size - len(received))
        except BlockingIOError:
            raise TimeoutError("deadline") from None
        if not chunk:
            raise ConnectionResetError("it hung up")
        received += chunk
    return bytes(received)


def _has_input(peer: socket.socket) -> bool:
    poll = select.poll()  # `select` fails on descriptors above 1023, which engines have
    poll.register(peer, select.POLLIN)
    return bool(poll.poll(0))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline")
    return left
