"""The shard's end of the node's unix socket: answers engines, one task a connection."""

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvray import wire
from kvray.errors import ConfigError, KVRayError

Handler = Callable[..., dict[str, Any]]
"""Called with the connection's number and the request's fields."""

_CONNECTIONS_MAX = 1024
_FRAME_S = 10.0
"""How long the rest of a frame may take; between requests an engine may be silent for ever."""


class EngineServer:
    """Serves `handlers` (op -> function of the request's fields) on a 0600 socket."""

    def __init__(
        self, path: Path, handlers: Mapping[str, Handler], hung_up: Callable[[int], None]
    ) -> None:
        """Serve on `path` once started; `hung_up` is told of each connection that ends."""
        self._path = path
        self._handlers = handlers
        self._hung_up = hung_up
        self._connections = itertools.count()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Bind the socket, replacing what a dead shard left."""
        self._path.unlink(missing_ok=True)
        if len(os.fsencode(self._path)) > 107:
            raise ConfigError(
                f"The socket path {self._path} is longer than 107 bytes; choose a shorter"
                " arena.dir or cluster_name."
            )
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        finally:
            os.umask(before)

    async def close(self) -> None:
        """Hang up on everybody and unlink the socket."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.close()
            self._path.unlink(missing_ok=True)
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._writers) >= _CONNECTIONS_MAX:
            writer.close()
            return
        self._writers.add(writer)
        connection = next(self._connections)
        try:
            while True:
                length = wire.body_length(await reader.readexactly(wire.LENGTH.size))
                body = await asyncio.wait_for(reader.readexactly(length), _FRAME_S)
                writer.write(wire.encode(self._answer(connection, wire.decode(body))))
                await asyncio.wait_for(writer.drain(), _FRAME_S)
        except (
            asyncio.IncompleteReadError,
            TimeoutError,
            asyncio.TimeoutError,
            OSError,
            KVRayError,
        ):
            pass  # The peer went away, or speaks something else: hang up.
        finally:
            self._writers.discard(writer)
            self._hung_up(connection)
            writer.close()

    def _answer(self, connection: int, request: dict[str, Any]) -> dict[str, Any]:
        op = request.pop("op", None)
        handler = self._handlers.get(str(op))
        try:
            if handler is None:
                raise ConfigError(f"The shard knows no request {op!r}; engine and shard differ.")
            return {"ok": True, **handler(connection, **request)}
        except KVRayError as error:
            return wire.error_reply(error)
        except TypeError as error:
            return wire.error_reply(ConfigError(f"Request {op!r} has wrong fields: {error}."))
