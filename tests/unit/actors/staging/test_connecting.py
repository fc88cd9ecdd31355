"""When a shard has its mover connect with the others."""

import asyncio
from typing import Any

from kvray.actors.mover.orders import FetchReport
from kvray.actors.staging.peers import Peers
from kvray.errors import ShardUnavailable


class Line:
    """A lookup that knows of two shards, and the mover of one."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.is_cut = False

    async def ask(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        self.methods.append(method)
        if self.is_cut:
            raise ShardUnavailable("No answer.")
        answers = {"shards": ["kvray-shard-a", "kvray-shard-b"], "fetch": FetchReport(here=())}
        return answers.get(method)


async def tick(peers: Peers, now: float, num_shards: int) -> None:
    peers.tick(now, num_shards=num_shards)
    for _ in range(10):
        await asyncio.sleep(0)


def test_it_connects_as_soon_as_there_are_others_and_again_from_time_to_time():
    async def scene() -> None:
        line = Line()
        peers = Peers("kvray-shard-a", line.ask, call_timeout_s=1.0)
        for num_shards in (0, 1):
            await tick(peers, 10.0, num_shards)
        assert line.methods == []
        await tick(peers, 11.0, 2)
        await tick(peers, 11.1, 2)
        assert line.methods == ["shards", "connect", "fetch"]
        await tick(peers, 11.2, 3)
        assert len(line.methods) == 6
        await tick(peers, 17.0, 3)
        assert len(line.methods) == 9
        peers.close()

    asyncio.run(scene())


def test_a_lookup_that_does_not_answer_is_asked_again_later():
    async def scene() -> None:
        line = Line()
        line.is_cut = True
        peers = Peers("kvray-shard-a", line.ask, call_timeout_s=1.0)
        await tick(peers, 10.0, 2)
        line.is_cut = False
        await tick(peers, 16.0, 2)
        assert line.methods == ["shards", "shards", "connect", "fetch"]

    asyncio.run(scene())
