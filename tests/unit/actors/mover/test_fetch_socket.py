"""Orders to a mover over its socket, or by Ray: each gets its own answer, in time."""

import asyncio
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.mover import actor as actor_module
from kvray.actors.mover.actor import RayMovers
from kvray.actors.mover.fetch_socket import FetchServer, MoverCalls
from kvray.errors import ShardUnavailable
from kvray.wire import MOVER_SOCKET_FILE
from tests.waiting import HANG_S, wait_for

pytestmark = pytest.mark.anyio


class Mover:
    """Answers with the order, those named `slow` once it may."""

    def __init__(self, directory: Path) -> None:
        self.may_answer = threading.Event()
        self.server = FetchServer(directory, self.fetch, calls_max=2)

    def fetch(self, *order: Any) -> Any:
        if order[0] == "slow":
            assert self.may_answer.wait(HANG_S)
        if order[0] == "defect":
            raise ValueError(order)
        return "fetched", *order


@pytest.fixture
def mover(tmp_path: Path) -> Iterator[Mover]:
    made = Mover(tmp_path)
    yield made
    made.may_answer.set()
    made.server.close()
    made.server.close()


@pytest.fixture
async def calls(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    async def over_ray(actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        return "over Ray", actor, method, *args

    made = MoverCalls("m", tmp_path, over_ray)

    async def call(method: str, *args: Any, actor: str = "m", timeout_s: float = HANG_S) -> Any:
        return await made(actor, method, *args, timeout_s=timeout_s)

    yield call
    for _, writer in made._idle:
        writer.close()


async def test_orders_of_the_own_mover_and_nothing_else_go_over_the_socket(mover, calls, tmp_path):
    assert stat.S_IMODE((tmp_path / MOVER_SOCKET_FILE).stat().st_mode) == 0o600
    assert await calls("fetch", b"an", b"order") == ("fetched", b"an", b"order")
    assert await calls("fetch", bytes(10**6)) == ("fetched", bytes(10**6))
    assert await calls("ping") == ("over Ray", "m", "ping")
    assert await calls("fetch", 1, actor="another") == ("over Ray", "another", "fetch", 1)


async def test_as_many_orders_run_at_once_as_the_mover_takes(mover, calls):
    slow = asyncio.ensure_future(calls("fetch", "slow"))
    assert await calls("fetch", "quick") == ("fetched", "quick")
    mover.may_answer.set()
    assert await slow == ("fetched", "slow")


async def test_a_late_answer_is_not_taken_for_the_next_one(mover, calls):
    with pytest.raises(ShardUnavailable, match=r"within 0\.05 s"):
        await calls("fetch", "slow", timeout_s=0.05)
    assert await calls("fetch", "next") == ("fetched", "next")
    mover.may_answer.set()
    assert [await calls("fetch", one) for one in range(3)] == [("fetched", one) for one in range(3)]


async def test_without_a_socket_ray_is_asked(calls, tmp_path):
    assert await calls("fetch", 1) == ("over Ray", "m", "fetch", 1)
    first = Mover(tmp_path)
    assert await calls("fetch", 1) == ("fetched", 1)
    first.server.close()
    assert await calls("fetch", 1) == ("over Ray", "m", "fetch", 1)
    second = Mover(tmp_path)
    assert await calls("fetch", 1) == ("fetched", 1)
    second.server.close()


async def test_a_mover_that_ends_meanwhile_or_has_a_defect_is_told(mover, calls):
    for _ in range(3):
        with pytest.raises(ShardUnavailable, match="m has ended"):
            await calls("fetch", "defect")
    waiting = asyncio.ensure_future(calls("fetch", "slow"))
    await asyncio.sleep(0.05)
    closing = asyncio.get_running_loop().run_in_executor(None, mover.server.close)
    with pytest.raises(ShardUnavailable, match="m has ended"):
        await waiting
    mover.may_answer.set()
    await closing


def test_look_ups_by_ray_that_nobody_waits_for_any_more_are_not_made(monkeypatch):
    searched: list[str] = []
    has_head = threading.Event()

    def get_actor(name: str) -> str:
        searched.append(name)
        assert has_head.wait(HANG_S)
        return name

    monkeypatch.setattr(actor_module, "get_actor", get_actor)
    movers = RayMovers()
    for _ in range(20):
        with pytest.raises(ShardUnavailable, match="head"):
            movers._found("a", 0.01)
    has_head.set()
    wait_for(movers._lookups._work_queue.empty)
    assert movers._found("b", 30.0) == "b"
    assert searched == ["a", "a", "b"], "each of its threads was in one"
    movers._lookups.shutdown()
