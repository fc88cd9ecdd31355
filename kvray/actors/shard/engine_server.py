"""The shard's end of the node's unix socket: answers engines, one task a connection."""

import asyncio
import contextlib
import inspect
import itertools
import logging
import os
import resource
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvray import wire
from kvray.errors import ConfigError, KVRayError, ShardUnavailable
from kvray.store.machine.access import OWN_USER, Access, reason

_log = logging.getLogger("kvray.shard")

Handler = Callable[..., dict[str, Any] | Awaitable[dict[str, Any]]]
"""Called with the connection's number and the request's fields.

What one awaits holds up its own connection only, whose answers come in the order of the requests.
"""

_CONNECTIONS_MAX = 1024
_COUNT_S = 1.0
_SILENT_S = 1.0  # a connection that was heard since goes for none of its own process
_FRAME_S = 10.0
"""How long the rest of a frame may take, or the first one of a connection; after that an engine may
be silent for ever."""
_BUFFER_BYTES = 32 * 2**10
"""Of a connection; the kernel keeps what comes sooner than it is answered."""
_LARGE_BYTES, _LARGE_BYTES_MAX = 128 * 2**10, 16 * 2**20
"""Frames from that size on, and what all of them that are under way have together."""
_WAITING_MAX = 64  # connections that wait to be accepted
_PAUSE_S = 0.2  # how long nobody is accepted once descriptors have run out
_SAY_S = 60.0
_MESSAGE_MAX = 1000
_CREDENTIALS = struct.Struct("3i")
_PATH_MAX = 107  # bytes of a unix socket's path


@dataclass(eq=False, slots=True)
class _Client:
    """One connection."""

    pid: int  # 0: a process of another namespace, nobody knows which
    is_known: bool = False  # it has had an answer to a request that made sense
    heard_at: float = field(default_factory=time.monotonic)
    is_dropped: bool = False
    task: asyncio.Task[None] | None = None
    transport: asyncio.Transport | None = None

    def drop(self) -> None:
        """Hang up soon."""
        self.is_dropped = True
        if self.task is not None:
            self.task.cancel()


class EngineServer:
    """Serves `handlers` (op -> function of the request's fields) on a socket of its own."""

    def __init__(
        self,
        path: Path,
        handlers: Mapping[str, Handler],
        hung_up: Callable[[int], None],
        access: Access = OWN_USER,
    ) -> None:
        """Serve on the socket `path` once started; `hung_up` hears of each connection's end."""
        self._path = path
        self._handlers = handlers
        self._hung_up = hung_up
        self._access = access
        self._connections = itertools.count()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._bound: os.stat_result | None = None
        self._clients: set[_Client] = set()
        self._large: dict[_Client, int] = {}
        """Bytes of the large frames that are under way, the oldest first."""
        self._said: dict[str, float] = {}
        self._counted_at, self._others_open = -_COUNT_S, 0
        """When the descriptors of everything else were counted, and how many they were."""

    async def start(self) -> None:
        """Bind the socket, replacing what a dead shard left; ConfigError if it cannot be made."""
        check_path(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)
            listener.bind(str(self._path))
            # Nobody else can have come in before: the directory keeps others out.
            self._access.give(self._path)
            self._bound = os.stat(self._path)
            listener.listen(_WAITING_MAX)
            listener.setblocking(False)
        except (ConfigError, OSError) as error:
            listener.close()
            if isinstance(error, ConfigError):
                raise
            says = f"The socket {self._path} cannot be made {reason(error)}"
            raise ConfigError(says) from None
        self._listener = listener
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener))

    async def close(self) -> None:
        """Hang up on everybody and unlink the socket. Twice is fine."""
        await self._stop_listening()
        tasks = [one.task for one in self._clients if one.task is not None]
        for client in list(self._clients):
            client.drop()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._has_path():
            self._path.unlink(missing_ok=True)

    async def keep_bound(self) -> None:
        """Bind the socket again if somebody has removed it; who is connected stays so."""
        if self._listener is not None and not self._has_path():
            _log.warning("%s was removed, and is made again", self._path)
            await self._stop_listening()
            await self.start()

    def _has_path(self) -> bool:
        try:
            return self._bound is not None and os.path.samestat(self._bound, os.stat(self._path))
        except OSError:
            return False

    async def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        if listener is not None:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        """Accept who waits; asyncio's own server logs a traceback for each that finds no room."""
        while True:
            try:
                peer, _ = await asyncio.get_running_loop().sock_accept(listener)
                self._admit(peer, _pid_of(peer))
            except OSError as error:
                self._say("no connection can be accepted at the moment (%s)", error.strerror)
                await asyncio.sleep(_PAUSE_S)

    def _admit(self, peer: socket.socket, pid: int) -> None:
        if not self._has_place(pid):
            peer.close()
            self._say("one more connection of process %d was refused", pid)
            return
        client = _Client(pid)
        self._clients.add(client)
        client.task = asyncio.get_running_loop().create_task(self._serve(peer, client))
        # A task that is cancelled before its first step comes to no `finally`.
        client.task.add_done_callback(lambda _: self._end(peer, client))

    def _has_place(self, pid: int) -> bool:
        """Return whether a process may have one more connection; another may be dropped for it.

        A process has at most half of the places, and loses silent connections of its own first. If
        all places are taken, the process with the most connections loses one. So a process that
        opens thousands keeps nobody out, and an engine, heard every few seconds, is not dropped.
        """
        most = self._most()
        num_of = Counter(one.pid for one in self._clients)
        now = time.monotonic()
        if pid and num_of[pid] >= max(1, most // 2):
            own = min(
                (one for one in self._clients if one.pid == pid),
                key=lambda one: (one.is_known, one.heard_at),
            )
            if own.is_known and own.heard_at > now - _SILENT_S:
                return False
            self._drop(own)
        elif len(self._clients) >= most:
            other = max(
                self._clients,
                key=lambda one: (num_of[one.pid], not one.is_known, now - one.heard_at),
            )
            if other.is_known and num_of[other.pid] <= num_of[pid] + 1:
                return False
            self._drop(other)
        return True

    def _most(self) -> int:
        """Return how many connections there may be, by what else the process has open now.

        They take at most half of the descriptors that nothing else has: arena, disk and Ray open
        theirs at any time.
        """
        now = time.monotonic()
        if now >= self._counted_at + _COUNT_S:
            num_open = len(os.listdir("/proc/self/fd"))
            self._counted_at, self._others_open = now, max(0, num_open - len(self._clients))
        return max(1, min(_CONNECTIONS_MAX, _places() - self._others_open // 2))

    def _end(self, peer: socket.socket, client: _Client) -> None:
        self._clients.discard(client)
        if client.transport is None:
            peer.close()

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        client.drop()
        self._say("a connection of process %d was hung up on, to make room", client.pid)

    async def _serve(self, peer: socket.socket, client: _Client) -> None:
        connection = next(self._connections)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(_BUFFER_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        # The peer went away, or speaks something else: hang up.
        ends = (asyncio.IncompleteReadError, asyncio.TimeoutError, OSError, KVRayError)
        try:
            with contextlib.suppress(*ends):
                client.transport, _ = await loop.connect_accepted_socket(lambda: protocol, peer)
                # Wait for what was not taken: nobody has two answers in memory.
                client.transport.set_write_buffer_limits(0)
                writer = asyncio.StreamWriter(client.transport, protocol, reader, loop)
                # Before Python 3.12 a cancellation is lost if the result has just come.
                while not client.is_dropped:
                    body = await self._receive(reader, client)
                    answer = await self._answer(connection, wire.decode(body))
                    client.is_known |= bool(answer["ok"])
                    client.heard_at = time.monotonic()
                    writer.write(wire.encode(answer))
                    await asyncio.wait_for(writer.drain(), _FRAME_S)
        finally:
            self._hung_up(connection)
            # Not closed, which would wait for a peer that never reads.
            if client.transport is not None:
                client.transport.abort()

    async def _receive(self, reader: asyncio.StreamReader, client: _Client) -> bytes:
        head = reader.readexactly(wire.LENGTH.size)
        head_s = None if client.is_known else _FRAME_S
        length = wire.body_length(await asyncio.wait_for(head, head_s))
        if length < _LARGE_BYTES:
            return await asyncio.wait_for(reader.readexactly(length), _FRAME_S)
        # A client that behaves sends a frame in milliseconds, so its frame is not the oldest.
        while self._large and sum(self._large.values()) + length > _LARGE_BYTES_MAX:
            oldest = next(iter(self._large))
            del self._large[oldest]
            self._drop(oldest)
        self._large[client] = length
        try:
            return await asyncio.wait_for(reader.readexactly(length), _FRAME_S)
        finally:
            self._large.pop(client, None)

    def _say(self, message: str, detail: object) -> None:
        now = time.monotonic()
        if now >= self._said.get(message, 0.0):
            self._said[message] = now + _SAY_S
            _log.warning(f"{self._path}: {message} (said once a minute)", detail)

    async def _answer(self, connection: int, request: dict[str, Any]) -> dict[str, Any]:
        op = str(request.pop("op", None))[:64]
        handler = self._handlers.get(op)
        try:
            if handler is None:
                raise ConfigError(f"The shard knows no request {op!r}; engine and shard differ.")
            answer = handler(connection, **request)
            if inspect.isawaitable(answer):
                answer = await answer
            return {"ok": True, **answer}
        except KVRayError as error:
            return wire.error_reply(error)
        except (TypeError, ValueError, AttributeError) as error:
            said = f"Request {op!r} has wrong fields: {error}"[:_MESSAGE_MAX]
            return wire.error_reply(ConfigError(f"{said}."))
        except (LookupError, ArithmeticError) as error:
            return wire.error_reply(ShardUnavailable(f"Request {op!r} failed: {error!r}."))


def _places() -> int:
    """Return how many connections half of the process's descriptors are enough for."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files_max == resource.RLIM_INFINITY else files_max // 2


def _pid_of(peer: socket.socket) -> int:
    """Return the process at the other end; 0 if it is of another namespace."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(found)[0]
    return pid


def check_path(path: Path) -> None:
    """Raise ConfigError for a path that is too long for a socket."""
    if len(os.fsencode(path)) > _PATH_MAX:
        raise ConfigError(
            f"The socket path {path} is longer than {_PATH_MAX} bytes; choose a shorter arena.dir"
            " or cluster_name."
        )
