"""The other end of a shard's socket, played by a test."""

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from kvray import wire

Script = Callable[[socket.socket], None]


class Peer:
    """A shard of a test: plays one script for each connection."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.scripts: list[Script] = []
        self.connections = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, name="peer")
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                self.connections += 1
                self.scripts.pop(0)(connection)


def request_on(connection: socket.socket) -> dict[str, object]:
    return wire.decode(_receive(connection, wire.body_length(_receive(connection, 4))))


def echo(connection: socket.socket) -> None:
    while True:
        request = request_on(connection)
        connection.sendall(wire.encode({"ok": True, "n": request["n"]}))


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        chunk = connection.recv(size - len(received))
        if not chunk:
            raise ConnectionResetError
        received += chunk
    return received
