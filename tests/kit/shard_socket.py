"""The other end of a shard's socket, played by a test alone or between a shard and its engines."""

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from kvray import wire
from kvray.actors.shard.engine_server import EngineServer

Script = Callable[[socket.socket], None]
Answer = Callable[[dict[str, Any]], dict[str, Any]]


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


class StageServer:
    """Answers `stage` itself and hands everything else over to the shard."""

    def __init__(self, directory: Path) -> None:
        """Take the place of the socket in `directory`; `close` gives it back."""
        # The shard binds its socket again when it finds another in its place.
        self._unguarded = mock.patch.object(EngineServer, "keep_bound")
        self._unguarded.start()
        self._path = directory / wire.SOCKET_FILE
        self._real = directory / "real"
        self._path.rename(self._real)
        self.answer: Answer = lambda _request: {"num_blocks": 0, "reason": "not_stored"}
        self.report: dict[str, Any] = {"peers": True}
        """What is added to each answer to a report."""
        self.asked: list[dict[str, Any]] = []
        self.registered: list[dict[str, Any]] = []
        """Requests to register a rank."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept, name="stage-server")]
        self._open: list[socket.socket] = []
        self._threads[0].start()

    def __enter__(self) -> "StageServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self._real.rename(self._path)
        self._unguarded.stop()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), name="stage-server")
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, socket.socket(socket.AF_UNIX) as shard, contextlib.suppress(OSError):
            shard.connect(str(self._real))
            while True:
                connection.sendall(wire.encode(self._reply(request_on(connection), shard)))

    def _reply(self, request: dict[str, Any], shard: socket.socket) -> dict[str, Any]:
        if request["op"] == "stage":
            self.asked.append(request)
            return {"ok": True, **self.answer(request)}
        if request["op"] == "register":
            self.registered.append(request)
        shard.sendall(wire.encode(request))
        reply = request_on(shard)
        return reply | self.report if request["op"] == "report" else reply


def request_on(connection: socket.socket) -> dict[str, Any]:
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
