"""The server of a shard's socket ends, whatever its connections are doing."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from kvray import wire
from kvray.actors.engine_server import EngineServer
from kvray.errors import ShardUnavailable


def test_a_server_that_closes_while_it_answers_ends_though_the_engine_stays(
    tmp_path: Path,
) -> None:
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


def test_a_slow_answer_holds_up_its_own_connection_only(tmp_path: Path) -> None:
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


def test_an_error_of_a_slow_answer_is_answered(tmp_path: Path) -> None:
    async def slow(connection: int) -> dict[str, Any]:
        await asyncio.sleep(0)
        raise ShardUnavailable("Not now.")

    async def scene(server: EngineServer, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(str(path))
        reply = await ask(reader, writer, op="slow")
        assert (reply["error"], reply["message"]) == ("ShardUnavailable", "Not now.")
        writer.close()

    serve(tmp_path / "socket", {"slow": slow}, scene)


def test_a_server_that_closes_cancels_what_it_has_not_answered(tmp_path: Path) -> None:
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
