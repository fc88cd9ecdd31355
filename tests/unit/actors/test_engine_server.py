"""The server of a shard's socket ends, whatever its connections are doing."""

import asyncio
from pathlib import Path
from typing import Any

from kvray import wire
from kvray.actors.engine_server import EngineServer


def test_a_server_that_closes_while_it_answers_ends_though_the_engine_stays(
    tmp_path: Path,
) -> None:
    """Cancelling a wait whose result has just come is lost before Python 3.12."""

    async def close_while_answering() -> None:
        closing: list[asyncio.Task[None]] = []

        def answer(connection: int) -> dict[str, Any]:
            closing.append(asyncio.get_running_loop().create_task(server.close()))
            return {}

        server = EngineServer(tmp_path / "socket", {"hello": answer}, lambda connection: None)
        await server.start()
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
        writer.write(wire.encode({"op": "hello"}))
        while not closing:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(closing[0], 5)
        writer.close()

    asyncio.run(close_while_answering())
