import asyncio
import threading
from typing import Any

from kvray.actors.shard.loop_thread import LoopThread
from tests.waiting import HANG_S


def test_what_is_under_way_when_the_loop_ends_is_cancelled():
    tasks: list[asyncio.Task[Any]] = []
    has_ended = threading.Event()

    async def main() -> None:
        tasks.append(asyncio.create_task(asyncio.sleep(HANG_S), name="begun"))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(asyncio.sleep(HANG_S), name="not begun"))

    thread = LoopThread("the loop", main, lambda failure: has_ended.set())
    thread.start()
    assert thread.join(HANG_S)
    assert has_ended.is_set()
    assert [task.cancelled() for task in tasks] == [True, True]
