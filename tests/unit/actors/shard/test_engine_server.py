"""The server of a shard's socket ends, whatever its connections are doing."""

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvray import wire
from kvray.actors.shard import engine_server
from kvray.actors.shard.engine_server import EngineServer
from kvray.errors import ShardUnavailable
from tests.unit.actors.nodes import until

pytestmark = pytest.mark.anyio


class Engine:
    """An end of a connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    def send(self, *ops: str, **fields: Any) -> None:
        self.writer.write(b"".join(wire.encode({"op": op, **fields}) for op in ops))

    async def answer(self) -> Any:
        length = wire.body_length(await self._reader.readexactly(wire.LENGTH.size))
        return wire.decode(await self._reader.readexactly(length))

    async def ask(self, op: str = "hello", **fields: Any) -> Any:
        self.send(op, **fields)
        return await asyncio.wait_for(self.answer(), 5)

    async def is_hung_up_on(self) -> bool:
        return await asyncio.wait_for(self._reader.read(), 5) == b""

    @property
    def has_place(self) -> bool:
        return not self._reader.at_eof() and self._reader.exception() is None


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EngineServer]:
    """A server that answers `hello` with the size of its field `x`."""
    hello = {"hello": lambda connection, **fields: {"size": len(fields.get("x", b""))}}
    made = EngineServer(tmp_path / "socket", hello, lambda connection: None)
    await made.start()
    yield made
    await asyncio.wait_for(made.close(), 5)


@pytest.fixture
async def connect(
    server: EngineServer, tmp_path: Path
) -> AsyncIterator[Callable[[], Awaitable[Engine]]]:
    engines: list[Engine] = []

    async def connect() -> Engine:
        engines.append(Engine(*await asyncio.open_unix_connection(tmp_path / "socket")))
        return engines[-1]

    yield connect
    for one in engines:
        one.writer.close()


# -- answers that take a while --------------------------------------------------------------------


async def test_a_slow_answer_holds_up_its_own_connection_only(server, connect):
    may_go_on = asyncio.Event()

    async def slow(connection: int) -> dict[str, Any]:
        await may_go_on.wait()
        raise ShardUnavailable("Not now.")

    server._handlers["slow"] = slow
    engine, other = await connect(), await connect()
    engine.send("slow", "hello")
    assert (await other.ask())["ok"]
    may_go_on.set()
    error, hello = await engine.answer(), await engine.answer()
    assert (error["error"], error["message"]) == ("ShardUnavailable", "Not now.")
    assert hello["ok"]


async def test_what_was_wrong_is_not_repeated_at_any_length(server, connect):
    def refuse(connection: int, x: str) -> dict[str, Any]:
        raise ValueError(x)

    server._handlers["refuse"] = refuse
    reply = await (await connect()).ask("refuse", x="y" * 2**20)
    assert len(reply["message"]) < 2000


async def test_a_server_that_closes_cancels_what_it_has_not_answered(server, connect):
    began, ended = asyncio.Event(), asyncio.Event()

    async def slow(connection: int) -> dict[str, Any]:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return {}

    server._handlers["slow"] = slow
    (await connect()).send("slow")
    await began.wait()
    await asyncio.wait_for(server.close(), 5)
    assert ended.is_set()


async def hang_up_on_all(server: EngineServer) -> None:
    for client in list(server._clients):
        server._drop(client)


@pytest.mark.parametrize("act", [EngineServer.close, hang_up_on_all])
async def test_who_is_hung_up_on_while_he_is_answered_does_not_stay(server, connect, act):
    """Cancelling a wait whose result has just come is lost before Python 3.12."""
    acting: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()

    def answer(connection: int) -> dict[str, Any]:
        acting.put_nowait(asyncio.get_running_loop().create_task(act(server)))
        return {}

    server._handlers["hello"] = answer
    engine = await connect()
    engine.send("hello")
    await asyncio.wait_for(await acting.get(), 5)
    await engine.is_hung_up_on()


# -- those that do not behave ---------------------------------------------------------------------


async def test_a_process_loses_places_where_it_is_silent_first(connect, monkeypatch, caplog):
    monkeypatch.setattr(engine_server, "_CONNECTIONS_MAX", 8)
    clients = [await connect() for _ in range(30)]
    engines = [await connect()]
    assert (await engines[0].ask())["ok"], "they keep nobody out"
    await asyncio.sleep(0.05)
    assert sum(one.has_place for one in clients) == 3, "half of the places, with the last"
    engines += [await connect() for _ in range(3)]
    assert all([(await engine.ask())["ok"] for engine in engines])
    assert await (await connect()).is_hung_up_on()
    assert f"one more connection of process {os.getpid()} was refused" in caplog.text
    assert all([(await engine.ask())["ok"] for engine in (*engines, engines[0])])
    monkeypatch.setattr(engine_server, "_SILENT_S", 0.0)
    assert (await (await connect()).ask())["ok"]
    assert await engines[1].is_hung_up_on(), "it was silent for longest"


async def test_processes_that_nobody_can_tell_apart_have_all_places(connect, monkeypatch):
    monkeypatch.setattr(engine_server, "_CONNECTIONS_MAX", 8)
    monkeypatch.setattr(engine_server, "_pid_of", lambda peer: 0)
    engines = [await connect() for _ in range(8)]
    assert all([(await engine.ask())["ok"] for engine in engines])


async def test_who_was_silent_loses_his_place_and_an_engine_does_not(connect, monkeypatch):
    pids = iter(range(1, 100))
    monkeypatch.setattr(engine_server, "_CONNECTIONS_MAX", 4)
    monkeypatch.setattr(engine_server, "_pid_of", lambda peer: next(pids))
    clients = [await connect() for _ in range(4)]
    engines = [await connect() for _ in range(4)]
    assert all([(await engine.ask())["ok"] for engine in engines])
    assert not any(one.has_place for one in clients)
    assert await (await connect()).is_hung_up_on()
    assert all([(await engine.ask())["ok"] for engine in engines])


async def test_who_has_most_connections_loses_one_to_a_newcomer(connect, monkeypatch):
    pids = iter([*[8] * 3, *[7] * 4, 9])
    monkeypatch.setattr(engine_server, "_CONNECTIONS_MAX", 8)
    monkeypatch.setattr(engine_server, "_SILENT_S", 0.0)
    monkeypatch.setattr(engine_server, "_pid_of", lambda peer: next(pids, 10))
    clients = [await connect() for _ in range(8)]
    assert (await (await connect()).ask())["ok"]
    await asyncio.sleep(0.05)
    assert [one.has_place for one in clients] == [*[True] * 3, False, *[True] * 4]


async def test_who_hangs_up_leaves_his_place(server, connect):
    engine = await connect()
    assert (await engine.ask())["ok"]
    engine.writer.close()
    await until(lambda: not server._clients)


@pytest.mark.parametrize("said", [b"", wire.encode({"op": "hello"})[:-1]])
async def test_whoever_connects_and_says_half_or_nothing_is_hung_up_on(connect, monkeypatch, said):
    monkeypatch.setattr(engine_server, "_FRAME_S", 0.05)
    engine, other = await connect(), await connect()
    other.writer.write(said)
    assert (await engine.ask())["ok"]
    assert await other.is_hung_up_on()
    assert (await engine.ask())["ok"], "an engine may be silent"


async def test_large_frames_have_a_bound_together_while_they_are_unfinished(connect, monkeypatch):
    monkeypatch.setattr(engine_server, "_LARGE_BYTES_MAX", 2**20)
    engines = [await connect() for _ in range(3)]
    assert all([(await engine.ask(x=bytes(2**19)))["ok"] for engine in engines * 2])
    clients = [await connect() for _ in range(10)]
    for client in clients:
        client.writer.write(wire.LENGTH.pack(2**19) + bytes(1000))
        await asyncio.sleep(0)
    assert (await engines[0].ask(x=bytes(2**18)))["size"] == 2**18
    assert sum(one.has_place for one in clients) == 1


async def test_who_never_reads_has_one_answer_in_memory_for_a_while(server, connect, monkeypatch):
    monkeypatch.setattr(engine_server, "_FRAME_S", 0.1)
    answers = []

    def answer(connection: int) -> dict[str, Any]:
        answers.append(connection)
        return {"x": bytes(2**19)}

    server._handlers["large"] = answer
    (await connect()).send(*["large"] * 20)
    await until(lambda: bool(answers) and not server._clients)
    assert len(answers) == 1


async def test_without_descriptors_it_waits_and_says_so_once(server, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(engine_server, "_PAUSE_S", 0.02)
    says, say = list[str](), server._say
    monkeypatch.setattr(server, "_say", lambda *said: (says.append(said[0]), say(*said)))
    clients = [socket.socket(socket.AF_UNIX) for _ in range(5)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(engine_server, "_places", lambda: 100)
    next_free = os.dup(0)
    os.close(next_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, limits[1]))
    try:
        for client in clients:
            client.setblocking(False)
            client.connect(str(tmp_path / "socket"))
        await asyncio.sleep(0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(says) < 10, "it pauses before it tries again"
    loop = asyncio.get_running_loop()
    for client in clients:
        await loop.sock_sendall(client, wire.encode({"op": "hello"}))
        assert await asyncio.wait_for(loop.sock_recv(client, 4), 5)
        client.close()
    assert len(caplog.records) == 1
    assert "no connection can be accepted at the moment (Too many open files)" in caplog.text


async def test_connections_leave_descriptors_to_all_others(server, connect, monkeypatch):
    """A quarter of the limit is taken by others: connections get half of the rest."""
    monkeypatch.setattr(engine_server, "_pid_of", lambda peer: 0)
    had = [os.dup(0) for _ in range(40)]
    taken = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(engine_server, "_places", lambda: taken)  # of a limit of twice that
    try:
        for _ in range(2 * taken):
            await connect()
        await asyncio.sleep(0.05)
        assert len(server._clients) <= taken - taken // 2 + 1
        assert (await (await connect()).ask())["ok"]
    finally:
        for one in had:
            os.close(one)


async def test_a_removed_socket_is_made_again_and_no_other_one(server, connect, tmp_path, caplog):
    path, first = tmp_path / "socket", server._listener
    await server.keep_bound()
    assert server._listener is first
    path.unlink()
    await server.keep_bound()
    assert (await (await connect()).ask())["ok"]
    assert first.fileno() == -1
    path.unlink()
    path.mkdir()
    await asyncio.wait_for(server.close(), 5)
    assert path.is_dir()
    assert "was removed, and is made again" in caplog.text
    assert len(caplog.records) == 1
