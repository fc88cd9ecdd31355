"""The shard's end of the node's unix socket: answers engines, one task a connection."""

import asyncio
import contextlib
import inspect
import itertools
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from kvray import wire
from kvray.errors import ConfigError, KVRayError
from kvray.store.access import OWN_USER, Access

_log = logging.getLogger("kvray.shard")

Handler = Callable[..., dict[str, Any] | Awaitable[dict[str, Any]]]
"""Called with the connection's number and the request's fields.

What one awaits holds up its own connection only, whose answers come in the order of the requests.
"""

_CONNECTIONS_MAX = 1024
_FRAME_S = 10.0
"""How long the rest of a frame may take; between requests an engine may be silent for ever."""
_PATH_MAX = 107
"""Bytes of a unix socket's path."""


class EngineServer:
    """Serves `handlers` (op -> function of the request's fields) on a socket of its own."""

    def __init__(
        self,
        path: Path,
        handlers: Mapping[str, Handler],
        hung_up: Callable[[int], None],
        access: Access = OWN_USER,
    ) -> None:
        """Serve on `path` once started.

        Args:
            path: of the socket.
            handlers: see there.
            hung_up: told of each connection that ends.
            access: who may connect.
        """
        self._path = path
        self._handlers = handlers
        self._hung_up = hung_up
        self._access = access
        self._connections = itertools.count()
        self._server: asyncio.Server | None = None
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bind the socket, replacing what a dead shard left.

        Raises:
            ConfigError: its path is too long, or it cannot be made.
        """
        check_path(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)
            listener.bind(str(self._path))
            # Nobody else can have come in before: the directory keeps others out.
            self._access.give(self._path)
            self._server = await asyncio.start_unix_server(self._accept, sock=listener)
        except ConfigError:
            listener.close()
            raise
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"The socket {self._path} cannot be made ({error.strerror}); set arena.dir to a"
                " tmpfs that this user may write to."
            ) from None

    async def close(self) -> None:
        """Hang up on everybody and unlink the socket. Twice is fine."""
        if self._server is not None:
            server, self._server = self._server, None
            self._is_closing = True
            server.close()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= _CONNECTIONS_MAX:
            _log.warning("the socket has %d connections; one more was refused", _CONNECTIONS_MAX)
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = next(self._connections)
        # The peer went away, or speaks something else: hang up.
        ends = (asyncio.IncompleteReadError, asyncio.TimeoutError, OSError, KVRayError)
        try:
            with contextlib.suppress(*ends):
                # Before Python 3.12 a cancellation is lost if what is waited for has just come.
                while not self._is_closing:
                    length = wire.body_length(await reader.readexactly(wire.LENGTH.size))
                    body = await asyncio.wait_for(reader.readexactly(length), _FRAME_S)
                    answer = await self._answer(connection, wire.decode(body))
                    writer.write(wire.encode(answer))
                    await asyncio.wait_for(writer.drain(), _FRAME_S)
        finally:
            self._hung_up(connection)
            # Not closed, which would wait for a peer that never reads.
            writer.transport.abort()

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
            return wire.error_reply(ConfigError(f"Request {op!r} has wrong fields: {error}."))


def check_path(path: Path) -> None:
    """Refuse a path that no socket can have.

    Raises:
        ConfigError: it is too long.
    """
    if len(os.fsencode(path)) > _PATH_MAX:
        raise ConfigError(
            f"The socket path {path} is longer than {_PATH_MAX} bytes; choose a shorter arena.dir"
            " or cluster_name."
        )
