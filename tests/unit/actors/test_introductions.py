"""When a shard is introduced to its peers."""

import asyncio
from typing import Any

from kvray.actors.introductions import Introductions
from kvray.actors.orders import FetchReport
from kvray.actors.peers import Peers
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


async def tick(introductions: Introductions, now: float, num_shards: int) -> None:
    introductions.tick(now, num_shards=num_shards)
    for _ in range(10):
        await asyncio.sleep(0)


def test_it_is_introduced_as_soon_as_there_are_others_and_again_from_time_to_time() -> None:
    async def scene() -> None:
        line = Line()
        made = Introductions(Peers("kvray-shard-a", line.ask, call_timeout_s=1.0))
        for num_shards in (0, 1):
            await tick(made, 10.0, num_shards)
        assert line.methods == []
        await tick(made, 11.0, 2)
        await tick(made, 11.1, 2)
        assert line.methods == ["shards", "meet", "fetch"]
        await tick(made, 11.2, 3)
        assert len(line.methods) == 6
        await tick(made, 17.0, 3)
        assert len(line.methods) == 9
        made.close()

    asyncio.run(scene())


def test_who_does_not_answer_is_asked_again_later() -> None:
    async def scene() -> None:
        line = Line()
        line.is_cut = True
        made = Introductions(Peers("kvray-shard-a", line.ask, call_timeout_s=1.0))
        await tick(made, 10.0, 2)
        line.is_cut = False
        await tick(made, 16.0, 2)
        assert line.methods == ["shards", "shards", "meet", "fetch"]

    asyncio.run(scene())
