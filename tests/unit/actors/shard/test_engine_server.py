"""The server of a shard's socket ends, whatever its connections are doing."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from kvray import wire
from kvray.actors.shard import engine_server
from kvray.actors.shard.engine_server import EngineServer
from kvray.errors import ShardUnavailable


def test_a_server_that_closes_while_it_answers_ends_though_the_engine_stays(tmp_path):
    """Cancelling a wait whose result has just come is lost before Python 3.12."""

    async def close_while_answering() -> None:
        closing: list[asyncio.Task[None]] = []
        is_closing = asyncio.Event()

        def answer(connection: int) -> dict[str, Any]:
            closing.append(asyncio.get_running_loop().create_task(server.close()))
            is_closing.set()
            return {}

        server = EngineServer(tmp_path / "socket", {"hello": answer}, lambda connection: None)
        await server.start()
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
        writer.write(wire.encode({"op": "hello"}))
        await is_closing.wait()
        await asyncio.wait_for(closing[0], 5)
        writer.close()

    asyncio.run(close_while_answering())


Served = Callable[[EngineServer, Path], Coroutine[Any, Any, None]]


def serve(path: Path, handlers: dict[str, Any], scene: Served) -> None:
    """Play a scene with a server that is started, and closed afterwards."""

    async def act() -> None:
        server = EngineServer(path, handlers, lambda connection: None)
        await server.start()
        try:
            await scene(server, path)
        finally:
            await asyncio.wait_for(server.close(), 5)

    asyncio.run(act())


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, **request: Any) -> Any:
    writer.write(wire.encode(request))
    return await answer_of(reader)


async def answer_of(reader: asyncio.StreamReader) -> Any:
    length = wire.body_length(await reader.readexactly(wire.LENGTH.size))
    return wire.decode(await reader.readexactly(length))


def test_a_slow_answer_holds_up_its_own_connection_only(tmp_path):
    may_go_on = asyncio.Event()

    async def slow(connection: int) -> dict[str, Any]:
        await may_go_on.wait()
        return {"was": "slow"}

    async def scene(server: EngineServer, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(wire.encode({"op": "slow"}) + wire.encode({"op": "quick"}))
        others = await asyncio.open_unix_connection(str(path))
        assert (await ask(*others, op="quick"))["was"] == "quick"
        may_go_on.set()
        assert [(await answer_of(reader))["was"] for _ in range(2)] == ["slow", "quick"]
        writer.close()
        others[1].close()

    handlers = {"slow": slow, "quick": lambda connection: {"was": "quick"}}
    serve(tmp_path / "socket", handlers, scene)


def test_an_error_of_a_slow_answer_is_answered(tmp_path):
    async def slow(connection: int) -> dict[str, Any]:
        await asyncio.sleep(0)
        raise ShardUnavailable("Not now.")

    async def scene(server: EngineServer, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(str(path))
        reply = await ask(reader, writer, op="slow")
        assert (reply["error"], reply["message"]) == ("ShardUnavailable", "Not now.")
        writer.close()

    serve(tmp_path / "socket", {"slow": slow}, scene)


def test_a_server_that_closes_cancels_what_it_has_not_answered(tmp_path):
    began, ended = asyncio.Event(), asyncio.Event()

    async def slow(connection: int) -> dict[str, Any]:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return {}

    async def scene(server: EngineServer, path: Path) -> None:
        _, writer = await asyncio.open_unix_connection(str(path))
        writer.write(wire.encode({"op": "slow"}))
        await began.wait()
        await asyncio.wait_for(server.close(), 5)
        assert ended.is_set()
        writer.close()

    serve(tmp_path / "socket", {"slow": slow}, scene)


# -- those that do not behave ---------------------------------------------------------------------

HELLO: dict[str, Any] = {"hello": lambda connection, **fields: {"size": len(fields.get("x", b""))}}


def connected(path: Path, count: int) -> Iterator[socket.socket]:
    for _ in range(count):
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(path))
        client.setblocking(False)
        yield client


async def asked(path: Path, **fields: Any) -> Any:
    """Ask as an engine does, and hang up."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        return await asyncio.wait_for(ask(reader, writer, op="hello", **fields), 5)
    finally:
        writer.close()


def hung_up(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_silent_connections_keep_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_server, "_CONNECTIONS_MAX", 8)

    async def scene(server: EngineServer, path: Path) -> None:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(one) for one in connected(path, 30)]
            assert (await asked(path))["ok"]
            await asyncio.sleep(0.05)
            assert sum(not hung_up(one) for one in silent) == 3, "half of the places, with the last"

    serve(tmp_path / "socket", HELLO, scene)


def test_a_process_that_uses_its_share_of_the_places_gets_no_more(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(engine_server, "_CONNECTIONS_MAX", 8)

    async def scene(server: EngineServer, path: Path) -> None:
        engines = [await asyncio.open_unix_connection(str(path)) for _ in range(4)]
        for engine in engines:
            assert (await ask(*engine, op="hello"))["ok"]
        refused, writer = await asyncio.open_unix_connection(str(path))
        assert await asyncio.wait_for(refused.read(), 5) == b""
        writer.close()
        for engine in engines:
            assert (await ask(*engine, op="hello"))["ok"]
            engine[1].close()

    serve(tmp_path / "socket", HELLO, scene)
    assert f"one more connection of process {os.getpid()} was refused" in caplog.text


def test_of_its_own_connections_a_process_loses_the_one_that_was_silent_for_longest(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(engine_server, "_CONNECTIONS_MAX", 8)
    monkeypatch.setattr(engine_server, "_SILENT_S", 0.0)

    async def scene(server: EngineServer, path: Path) -> None:
        engines = [await asyncio.open_unix_connection(str(path)) for _ in range(3)]
        for engine in (*engines, engines[0]):
            assert (await ask(*engine, op="hello"))["ok"]
        silent, writer = await asyncio.open_unix_connection(str(path))
        for loser in (silent, engines[1][0]):
            newcomer = await asyncio.open_unix_connection(str(path))
            assert (await ask(*newcomer, op="hello"))["ok"]
            assert await asyncio.wait_for(loser.read(), 5) == b""
            engines.append(newcomer)
        writer.close()
        for _, other in engines:
            other.close()

    serve(tmp_path / "socket", HELLO, scene)


def test_processes_that_nobody_can_tell_apart_have_all_places(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_server, "_CONNECTIONS_MAX", 8)
    monkeypatch.setattr(engine_server, "_pid_of", lambda peer: 0)

    async def scene(server: EngineServer, path: Path) -> None:
        engines = [await asyncio.open_unix_connection(str(path)) for _ in range(8)]
        for engine in engines:
            assert (await ask(*engine, op="hello"))["ok"]
            engine[1].close()

    serve(tmp_path / "socket", HELLO, scene)


def test_who_has_said_nothing_loses_his_place_to_a_newcomer_and_an_engine_does_not(
    tmp_path, monkeypatch
):
    pids = iter(range(1, 100))
    monkeypatch.setattr(engine_server, "_CONNECTIONS_MAX", 4)
    monkeypatch.setattr(engine_server, "_pid_of", lambda peer: next(pids))

    async def scene(server: EngineServer, path: Path) -> None:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(one) for one in connected(path, 4)]
            engines = [await asyncio.open_unix_connection(str(path)) for _ in range(4)]
            for engine in engines:
                assert (await ask(*engine, op="hello"))["ok"]
            assert all(map(hung_up, silent))
            refused, writer = await asyncio.open_unix_connection(str(path))
            assert await asyncio.wait_for(refused.read(), 5) == b""
            writer.close()
            for engine in engines:
                assert (await ask(*engine, op="hello"))["ok"]
                engine[1].close()

    serve(tmp_path / "socket", HELLO, scene)


def test_who_hangs_up_leaves_his_place(tmp_path):
    async def scene(server: EngineServer, path: Path) -> None:
        assert (await asked(path))["ok"]
        await asyncio.sleep(0.01)
        assert not server._clients

    serve(tmp_path / "socket", HELLO, scene)


def test_who_is_dropped_while_he_is_answered_is_hung_up_on(tmp_path):
    """As when the server closes: the cancellation may be lost."""

    async def scene(server: EngineServer, path: Path) -> None:
        async def drop() -> None:
            for client in list(server._clients):
                server._drop(client)

        def answer(connection: int) -> dict[str, Any]:
            dropping.append(asyncio.get_running_loop().create_task(drop()))
            return {}

        dropping: list[asyncio.Task[None]] = []
        server._handlers = {"hello": answer}
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(wire.encode({"op": "hello"}))
        await asyncio.wait_for(reader.read(), 5)
        writer.close()

    serve(tmp_path / "socket", {}, scene)


# -- a socket that is removed ---------------------------------------------------------------------


def test_a_removed_socket_is_made_again_and_another_ones_is_let_be(tmp_path, caplog):
    async def scene(server: EngineServer, path: Path) -> None:
        first = server._listener
        await server.keep_bound()
        assert server._listener is first
        os.unlink(path)
        await server.keep_bound()
        assert (await asked(path))["ok"]
        assert first is not None
        assert first.fileno() == -1
        os.unlink(path)
        os.mkdir(path)

    serve(tmp_path / "socket", HELLO, scene)
    assert (tmp_path / "socket").is_dir()
    assert "was removed, and is made again" in caplog.text
    assert len(caplog.records) == 1


def test_a_closed_server_leaves_no_socket(tmp_path):
    async def scene(server: EngineServer, path: Path) -> None:
        await server.close()

    serve(tmp_path / "socket", HELLO, scene)
    assert not list(tmp_path.iterdir())


# -- what they send -------------------------------------------------------------------------------


def test_the_process_with_most_connections_loses_one_to_a_newcomer(tmp_path, monkeypatch):
    pids = iter([*[8] * 3, *[7] * 4, 9])
    monkeypatch.setattr(engine_server, "_CONNECTIONS_MAX", 8)
    monkeypatch.setattr(engine_server, "_SILENT_S", 0.0)
    monkeypatch.setattr(engine_server, "_pid_of", lambda peer: next(pids, 10))

    async def scene(server: EngineServer, path: Path) -> None:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(one) for one in connected(path, 8)]
            assert (await asked(path))["ok"]
            await asyncio.sleep(0.05)
            assert [hung_up(one) for one in clients] == [*[False] * 3, True, *[False] * 4]

    serve(tmp_path / "socket", HELLO, scene)


def test_large_frames_that_are_not_finished_have_a_bound_together(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_server, "_LARGE_BYTES_MAX", 2**20)

    async def scene(server: EngineServer, path: Path) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(one) for one in connected(path, 10)]
            for client in clients:
                await loop.sock_sendall(client, wire.LENGTH.pack(2**19) + bytes(1000))
                await asyncio.sleep(0)
            assert (await asked(path, x=bytes(2**18)))["size"] == 2**18
            assert sum(not hung_up(one) for one in clients) == 1

    serve(tmp_path / "socket", HELLO, scene)


def test_large_frames_that_are_finished_count_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_server, "_LARGE_BYTES_MAX", 2**20)

    async def scene(server: EngineServer, path: Path) -> None:
        engines = [await asyncio.open_unix_connection(str(path)) for _ in range(3)]
        for engine in engines * 2:
            assert (await ask(*engine, op="hello", x=bytes(2**19)))["ok"]
        for _, writer in engines:
            writer.close()

    serve(tmp_path / "socket", HELLO, scene)


def test_whoever_connects_and_says_nothing_is_hung_up_on(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_server, "_FRAME_S", 0.05)

    async def scene(server: EngineServer, path: Path) -> None:
        engine = await asyncio.open_unix_connection(str(path))
        assert (await ask(*engine, op="hello"))["ok"]
        reader, writer = await asyncio.open_unix_connection(str(path))
        assert await asyncio.wait_for(reader.read(), 5) == b""
        assert (await ask(*engine, op="hello"))["ok"], "an engine may be silent"
        writer.close()
        engine[1].close()

    serve(tmp_path / "socket", HELLO, scene)


def test_who_never_reads_has_one_answer_in_memory(tmp_path):
    answers = 0

    def answer(connection: int) -> dict[str, Any]:
        nonlocal answers
        answers += 1
        return {"x": bytes(2**19)}

    async def scene(server: EngineServer, path: Path) -> None:
        _, writer = await asyncio.open_unix_connection(str(path))
        writer.write(wire.encode({"op": "large"}) * 20)
        await asyncio.sleep(0.1)
        assert answers == 1
        writer.close()

    serve(tmp_path / "socket", {"large": answer}, scene)


def test_without_descriptors_it_waits_and_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(engine_server, "_PAUSE_S", 0.02)

    async def scene(server: EngineServer, path: Path) -> None:
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
                client.connect(str(path))
            await asyncio.sleep(0.1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(says) < 10, "it pauses before it tries again"
        loop = asyncio.get_running_loop()
        for client in clients:
            await loop.sock_sendall(client, wire.encode({"op": "hello"}))
            assert await asyncio.wait_for(loop.sock_recv(client, 4), 5)
            client.close()

    serve(tmp_path / "socket", HELLO, scene)
    assert len(caplog.records) == 1
    assert "no connection can be accepted at the moment (Too many open files)" in caplog.text


def test_what_was_wrong_is_not_repeated_at_any_length(tmp_path):
    def refuse(connection: int, x: str) -> dict[str, Any]:
        raise ValueError(x)

    async def scene(server: EngineServer, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(str(path))
        reply = await ask(reader, writer, op="refuse", x="y" * 2**20)
        assert len(reply["message"]) < 2000
        writer.close()

    serve(tmp_path / "socket", {"refuse": refuse}, scene)


def test_connections_leave_descriptors_to_everything_else(tmp_path, monkeypatch):
    """A quarter of the limit is taken by others: connections get half of the rest."""
    others = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(engine_server, "_pid_of", lambda peer: 0)

    async def scene(server: EngineServer, path: Path) -> None:
        had = [os.dup(0) for _ in range(40)]
        taken = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(engine_server, "_places", lambda: taken)  # of a limit of twice that
        try:
            with contextlib.ExitStack() as stack:
                for one in connected(path, 2 * taken):
                    stack.enter_context(one)
                    await asyncio.sleep(0)
                await asyncio.sleep(0.05)
                assert len(server._clients) <= taken - taken // 2 + 1
                assert (await asked(path))["ok"]
        finally:
            for one in had:
                os.close(one)

    serve(tmp_path / "socket", HELLO, scene)
    assert len(os.listdir("/proc/self/fd")) <= others + 1
