"""The client end of a shard's unix socket: one call at a time, each with a deadline."""

import socket
import threading
import time
from pathlib import Path
from typing import Any

from kvray import wire
from kvray.errors import ShardUnavailable
from kvray.wire import SOCKET_FILE


class ShardSocket:
    """Calls to this node's shard; connects when needed and again after a failure."""

    def __init__(self, directory: Path) -> None:
        """Speak to the shard whose arena lies in `directory`."""
        self._path = directory / SOCKET_FILE
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def call(self, op: str, *, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Send one request and return its reply.

        Raises:
            ShardUnavailable: no answer within `timeout_s`.
            KVRayError: what the shard answered with.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise ShardUnavailable(f"The socket {self._path} is busy with another call.")
        try:
            reply = self._exchange(wire.encode({"op": op, **fields}), deadline)
        except OSError as error:
            self._disconnect()
            raise ShardUnavailable(
                f"The shard at {self._path} did not answer ({error}); see `kvray status`."
            ) from None
        finally:
            self._lock.release()
        wire.raise_for(reply)
        return reply

    def close(self) -> None:
        """Hang up; the next call connects again."""
        with self._lock:
            self._disconnect()

    def _exchange(self, request: bytes, deadline: float) -> dict[str, Any]:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(_left(deadline))
            self._socket.connect(str(self._path))
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(request)
        head = self._receive(wire.LENGTH.size, deadline)
        return wire.decode(self._receive(wire.body_length(head), deadline))

    def _receive(self, size: int, deadline: float) -> bytes:
        assert self._socket is not None
        received = bytearray()
        while len(received) < size:
            self._socket.settimeout(_left(deadline))
            chunk = self._socket.recv(size - len(received))
            if not chunk:
                raise ConnectionResetError("it hung up")
            received += chunk
        return bytes(received)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline")
    return left
