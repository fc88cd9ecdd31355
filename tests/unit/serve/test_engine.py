"""A Serve replica without Serve: an engine that hangs, callers that go."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("openai")

from kvray.actors.routers.pools import Pools
from kvray.errors import KVRayError
from kvray.serve.engine import Engine
from kvray.serve.settings import Settings
from tests.waiting import wait_for

STALL_S = 0.5
DEADLINE_S = 60.0
LONG_TOKENS = 3000


Start = Callable[[Callable[[], None]], Any]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts an engine, which calls the argument in place of ending this process."""
    config = tmp_path_factory.mktemp("engine") / "kvray.yaml"
    config.write_text("cluster_name: nowhere\n")
    settings = Settings(
        engine="reference",
        model="tiny",
        kvray_config=config,
        engine_options={"num_threads": 1, "num_blocks": 128},
        pool_events=True,
        stall_timeout_s=STALL_S,
    )
    return lambda leave: Engine(settings, name="engine-0", leave=leave)


@pytest.fixture(scope="module")
def engine(start: Start) -> Iterator[Any]:
    engine = start(lambda: pytest.fail("the engine was there to the end"))
    yield engine
    engine.__del__()


async def listen(
    engine: Any, max_tokens: int, prompt: Sequence[int] = (5, 6, 7)
) -> list[dict[str, Any]]:
    return [event async for event in engine.generate([*prompt], max_tokens)]


def test_a_router_knows_what_the_engine_has_and_has_evicted(engine):
    with closing(Pools()) as pools:
        pools.follow({"engine-0": engine.record_routing_stats()})
        prompts = [[3 + (at * (number + 7)) % 250 for at in range(1000)] for number in range(6)]
        asyncio.run(listen(engine, 1, prompts[0]))

        def tokens(prompt: list[int]) -> int | None:
            found = pools.match(prompt).get("engine-0")
            return found.num_tokens if found is not None and found.is_sure else None

        wait_for(lambda: tokens(prompts[0]) == 992, "all full blocks of the prompt")
        assert tokens(prompts[1]) == 0
        for prompt in prompts[1:]:
            asyncio.run(listen(engine, 1, prompt))
        wait_for(lambda: tokens(prompts[0]) == 0, "their eviction")
        wait_for(lambda: tokens(prompts[-1]) == 992, "the blocks of the last one")


@pytest.mark.anyio
async def test_an_engine_that_hangs_is_unhealthy_and_an_idle_one_is_not(engine):
    assert (await listen(engine, 2))[-1]["finish_reason"] == "length"
    await asyncio.sleep(2 * STALL_S)
    engine.check_health()  # nothing is under way
    os.kill(engine._replica.pid, signal.SIGSTOP)
    try:
        asked = asyncio.create_task(listen(engine, 2))
        await asyncio.sleep(STALL_S / 2)
        engine.check_health()
        await asyncio.sleep(STALL_S)
        with pytest.raises(KVRayError, match="said nothing for"):
            engine.check_health()
    finally:
        os.kill(engine._replica.pid, signal.SIGCONT)
    assert (await asyncio.wait_for(asked, DEADLINE_S))[-1]["finish_reason"] == "length"
    engine.check_health()


@pytest.mark.anyio
async def test_a_caller_that_goes_while_its_request_is_handed_over_leaves_no_request(engine):
    calls = engine._replica._calls
    os.kill(engine._replica.pid, signal.SIGSTOP)
    try:
        asked = asyncio.create_task(listen(engine, LONG_TOKENS))
        await asyncio.sleep(0)  # a thread hands it over now
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.to_thread(wait_for, lambda: calls, "the call")
        (call,) = calls.values()
        await asyncio.sleep(0.5)  # and another that nobody wants it
    finally:
        os.kill(engine._replica.pid, signal.SIGCONT)
    ended = await asyncio.wait_for(asyncio.wrap_future(call.future), DEADLINE_S)
    assert ended.finish_reason == "cancelled"


@pytest.mark.anyio
async def test_a_replica_ends_with_its_engine_and_refuses_no_request_before(start):
    has_left = threading.Event()
    engine = start(has_left.set)
    asked = asyncio.create_task(listen(engine, LONG_TOKENS))
    await asyncio.sleep(0.2)
    os.kill(engine._replica.pid, signal.SIGKILL)
    assert "is gone" in (await asyncio.wait_for(asked, DEADLINE_S))[-1]["error"]
    with pytest.raises(asyncio.TimeoutError):  # Serve tells the caller that the process ended
        await asyncio.wait_for(listen(engine, 2), 1.0)
    assert has_left.wait(DEADLINE_S)
    engine.__del__()


def test_a_replica_that_serve_ends_leaves_by_itself(start):
    has_left = threading.Event()
    start(has_left.set).__del__()
    assert not has_left.wait(0.2)
