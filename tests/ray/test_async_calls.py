"""Calls to actors from an event loop: none waits longer than told, whatever became of the actor."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from kvray.actors.ray_glue.calls import ActorCalls, current_namespace, list_actors, tier_named
from kvray.actors.tier.local_ray import LocalRay
from kvray.errors import ConfigError, ShardUnavailable
from tests.ray.conftest import TIMEOUT_S
from tests.waiting import wait_for

pytestmark = pytest.mark.ray

NAME = "kvray-test-async"


class Other:
    """An actor that is slow, or raises, if asked to."""

    def echo(self, value: Any, after_s: float = 0.0) -> Any:
        time.sleep(after_s)
        return value

    def refuse(self) -> None:
        raise ConfigError("No.")

    def fail(self) -> None:
        raise IndexError("a defect")


def create() -> Any:
    made = ray.remote(Other).options(name=NAME, namespace=current_namespace(), num_cpus=0).remote()
    ray.get(made.echo.remote(0), timeout=TIMEOUT_S)
    return made


def end(actor: Any) -> None:
    """Kill an actor, and wait until its name is free."""
    ray.kill(actor)
    wait_for(lambda: NAME not in list_actors(), "its end")


@pytest.fixture
def other(local: LocalRay) -> Iterator[Any]:
    made = create()
    yield made
    end(made)


def test_answers_and_errors_come_back(other: Any) -> None:
    async def scene() -> None:
        call = ActorCalls()
        assert await call(NAME, "echo", 5, timeout_s=TIMEOUT_S) == 5
        with pytest.raises(ConfigError, match="No"):
            await call(NAME, "refuse", timeout_s=TIMEOUT_S)
        with pytest.raises(ShardUnavailable, match="a defect"):
            await call(NAME, "fail", timeout_s=TIMEOUT_S)

    asyncio.run(scene())


def test_the_tier_is_meant_that_the_caller_means(other: Any) -> None:
    async def scene() -> None:
        call = ActorCalls()
        with tier_named("another"), pytest.raises(ShardUnavailable, match="tier 'another' has no"):
            await call(NAME, "echo", 5, timeout_s=TIMEOUT_S)
        assert await call(NAME, "echo", 5, timeout_s=TIMEOUT_S) == 5

    asyncio.run(scene())


def test_what_is_late_is_not_waited_for_and_harms_no_later_call(other: Any) -> None:
    async def scene() -> None:
        call = ActorCalls()
        began = time.monotonic()
        with pytest.raises(ShardUnavailable, match="did not answer within"):
            await call(NAME, "echo", 1, 1.0, timeout_s=0.3)
        assert time.monotonic() - began < 1.0
        assert await call(NAME, "echo", 2, timeout_s=TIMEOUT_S) == 2

    asyncio.run(scene())


def test_one_that_was_recreated_is_found_under_its_name(local: LocalRay) -> None:
    async def scene() -> None:
        call = ActorCalls()
        with pytest.raises(ShardUnavailable, match="kvray up"):
            await call(NAME, "echo", 1, timeout_s=TIMEOUT_S)
        first = create()
        assert await call(NAME, "echo", 1, timeout_s=TIMEOUT_S) == 1
        end(first)
        with pytest.raises(ShardUnavailable):
            await call(NAME, "echo", 1, timeout_s=TIMEOUT_S)
        second = create()
        assert await call(NAME, "echo", 2, timeout_s=TIMEOUT_S) == 2
        end(second)

    asyncio.run(scene())


def test_while_ray_tells_of_no_actor_few_threads_ask(
    local: LocalRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def hang(name: str) -> None:
        asked.append(name)
        time.sleep(0.5)
        raise ShardUnavailable("Ray's head is back.")

    monkeypatch.setattr("kvray.actors.ray_glue.calls.get_actor", hang)

    async def scene() -> None:
        call = ActorCalls()
        began = time.monotonic()
        tries = [call(f"actor {number}", "echo", timeout_s=0.1) for number in range(10)]
        errors = [str(one) for one in await asyncio.gather(*tries, return_exceptions=True)]
        assert time.monotonic() - began < 0.45
        assert sum("did not answer" in error for error in errors) == 10
        assert len(asked) == 4

    asyncio.run(scene())
