"""The unix socket on which a mover takes the orders of its node's shard.

A call takes a third of the time that Ray needs for one. A frame each way has a pickle: only this
user, who runs both processes, can connect.
"""

import asyncio
import contextlib
import logging
import pickle
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kvray.errors import ShardUnavailable
from kvray.store.machine.access import OWN_USER
from kvray.wire import LENGTH, MOVER_SOCKET_FILE

_log = logging.getLogger("kvray.mover")

_JOIN_TIMEOUT_S = 1.0
_PAUSE_S = 0.01


class FetchServer:
    """Serves one connection a thread; more connections wait."""

    def __init__(self, directory: Path, fetch: Callable[..., Any], *, calls_max: int) -> None:
        """Serve `calls_max` calls of `fetch` at once, at the socket in `directory`."""
        path = directory / MOVER_SOCKET_FILE
        path.unlink(missing_ok=True)  # of a mover that died
        self._fetch = fetch
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        OWN_USER.give(path)
        self._listener.listen()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._is_closing = False
        # The listener and `fetch` cross to them; each has its own connection.
        self._threads = [
            threading.Thread(target=self._run, name="kvray-orders", daemon=True)
            for _ in range(calls_max)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Hang up; calls under way go on, and nobody hears of their end. Twice is fine."""
        with self._lock:
            self._is_closing = True
            for one in (self._listener, *self._connections):
                with contextlib.suppress(OSError):  # it is closed, or not connected
                    one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)
        self._listener.close()

    def _run(self) -> None:
        while not self._is_closing:
            try:
                connection, _ = self._listener.accept()
                with connection:
                    self._serve(connection)
            except OSError:  # the shard or this has hung up, or there is no descriptor left
                time.sleep(_PAUSE_S)
            except Exception:  # noqa: BLE001 - a defect ends a connection, and not the thread
                _log.exception("an order ended by a defect")

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._connections.add(connection)
        try:
            with connection.makefile("rb") as orders:
                while len(head := orders.read(LENGTH.size)) == LENGTH.size:
                    order = pickle.loads(orders.read(*LENGTH.unpack(head)))  # noqa: S301 - of our user
                    connection.sendall(_frame(self._fetch(*order)))
        finally:
            with self._lock:
                self._connections.discard(connection)


class MoverCalls:
    """An `Ask` that calls `fetch` of one mover by its socket, and everything else by another `Ask`.

    Used by one event loop. A connection has one call at a time.
    """

    def __init__(self, mover: str, directory: Path, others: Callable[..., Awaitable[Any]]) -> None:
        """Call the actor `mover`, whose node has its files in `directory`."""
        self._mover = mover
        self._path = str(directory / MOVER_SOCKET_FILE)
        self._others = others
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __call__(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        """See `Ask`."""
        if (actor, method) == (self._mover, "fetch"):
            try:
                report = await asyncio.wait_for(self._fetch(args), timeout_s)
            except asyncio.TimeoutError:
                raise ShardUnavailable(
                    f"{actor} did not answer within {timeout_s:.2f} s; see `kvray status`."
                ) from None
            if report is not None:
                return report
        return await self._others(actor, method, *args, timeout_s=timeout_s)

    async def _fetch(self, order: tuple[Any, ...]) -> Any:
        """Return the mover's answer; None: it has no socket now."""
        while True:
            is_old = bool(self._idle)
            try:
                connection = (
                    self._idle.pop() if is_old else await asyncio.open_unix_connection(self._path)
                )
            except OSError:
                return None
            reader, writer = connection
            try:
                writer.write(_frame(order))
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                answer = pickle.loads(await reader.readexactly(length))  # noqa: S301 - of our user
            except BaseException as error:
                writer.close()  # a late answer must not be taken for the next one
                if not isinstance(error, EOFError | OSError):
                    raise
                if not is_old:
                    raise ShardUnavailable(f"{self._mover} has ended.") from None
            else:
                self._idle.append(connection)
                return answer


def _frame(value: Any) -> bytes:
    body = pickle.dumps(value)
    return LENGTH.pack(len(body)) + body
