"""Routers that choose together: a burst over two of them is dealt out as by one."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from kvray.actors.routers.exchange import AllLoads, SharedLoads
from kvray.routing import Choice, Place, Survey

pytestmark = pytest.mark.anyio

NAMES = ("a", "b", "c", "d")
OPTIONS: dict[str, Any] = {"pool_blocks": 100, "prefill_tokens_per_s": 1000.0}
PLACES = [Place(replica=name, node=name, prefill_tokens_per_s=0.0) for name in NAMES]


def survey(prompt: str) -> Survey:
    words = tuple(f"{prompt} {block}".encode() for block in range(10))
    return Survey(tokens_per_block=32, token_bytes=1.0, words=words, stretches=())


class Actor:
    """The actor as its handle: each method has a `remote`."""

    def __init__(self) -> None:
        self.inside = AllLoads(**OPTIONS)
        self.is_dead = self.is_late = False

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **options: Any) -> "asyncio.Future[Any]":
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if self.is_dead:
                answer.set_exception(RayActorError())
                answer.exception()
            else:
                result = getattr(self.inside, name)(*args, **options)
                if not self.is_late:
                    answer.set_result(result)
            return answer

        return SimpleNamespace(remote=remote)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    """The actor, which routers find."""
    made = Actor()
    handle = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda **_: made))
    monkeypatch.setattr("kvray.actors.routers.exchange.ray.remote", lambda _: handle)
    return made


def routers(actor: Actor, number: int) -> list[Any]:
    made = [SharedLoads("engines", "tier", list, **OPTIONS) for _ in range(number)]
    for one in made:
        one.own.retain(NAMES)
        one._actor = actor
        actor.inside.hello(one._router)
    return made


async def send(router: Any, request: str) -> Choice:
    """Have a router choose for a request and send it there."""
    asked = survey(request)
    choice: Choice = await router.choose(request, PLACES, 320, asked, is_told=True)
    router.routed(request, choice.cost, asked, now=0.0, is_told=True)
    return choice


async def test_a_burst_over_several_routers_takes_every_replica_once(actor):
    made = routers(actor, 4)
    sent = await asyncio.gather(*(send(one, f"r{at}") for at, one in enumerate(made)))
    assert {one.replica for one in sent} == set(NAMES)
    assert {one for _, one in actor.inside._requests.values()} == set(NAMES)


async def test_first_tokens_and_ends_are_told(actor):
    one, other = routers(actor, 2)
    first = await send(one, "r0")
    queue = actor.inside._loads._loads[first.replica]
    assert len(queue) == 1
    one.first_token("r0", 1.0)
    assert len(queue) == 0
    one.done("r0", 2.0)
    one.done("r0", 2.0)
    assert not actor.inside._requests
    assert not one._elsewhere
    await send(other, "r1")
    assert len(actor.inside._requests) == 1


async def test_what_a_router_sent_ends_also_after_it_was_the_only_one(actor):
    one, other = routers(actor, 2)
    await send(one, "r0")
    del actor.inside._routers[other._router]
    one.start()
    for _ in range(20):
        await asyncio.sleep(0)
    one._running.cancel()
    assert not actor.inside._requests
    assert not one._elsewhere


async def test_a_request_that_went_elsewhere_counts_there(actor):
    (one,) = routers(actor, 1)
    choice = await send(one, "r0")
    second = choice.ranked[1].cost
    one.withdraw("r0", 0.0)
    one.routed("r0", second, survey("r0"), now=0.0, is_told=True)
    assert [*actor.inside._requests.values()] == [(one._router, second.replica)]
    for loads in (one.own, actor.inside._loads):
        busy = {name for name, load in loads._loads.items() if load.utilization(0.0)}
        assert busy == {second.replica}


@pytest.mark.parametrize("fault", ["is_dead", "is_late"])
async def test_without_the_actor_a_router_chooses_by_itself(actor, fault):
    (one,) = routers(actor, 1)
    setattr(actor, fault, True)
    first = await send(one, "r0")
    assert (await send(one, "r1")).replica != first.replica, "it knows its own"
    one.first_token("r0", 1.0)
    one.done("r0", 1.0)


async def test_a_request_that_is_given_up_as_the_actor_chooses_is_nobodys(actor):
    (one,) = routers(actor, 1)
    actor.is_late = True
    asked = asyncio.create_task(send(one, "r0"))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait({asked})
    assert asked.cancelled()
    assert not actor.inside._requests


async def test_a_replica_that_ends_while_the_actor_is_asked_is_not_chosen(actor):
    (one,) = routers(actor, 1)
    actor.is_late = True
    asked = asyncio.create_task(send(one, "r0"))
    await asyncio.sleep(0)
    one.own.retain(NAMES[1:])
    assert {each.cost.replica for each in (await asked).ranked} == {*NAMES[1:]}


async def test_a_choice_that_comes_once_a_router_is_alone_again_is_nobodys_there(actor):
    (one,) = routers(actor, 1)
    asked = asyncio.create_task(send(one, "r0"))
    await asyncio.sleep(0)
    assert actor.inside._requests
    one._actor = None
    await asked
    one.done("r0", 1.0)
    assert not actor.inside._requests


def test_requests_of_a_router_that_is_gone_end_and_its_first_tokens_ten_minutes_later(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("kvray.actors.routers.exchange.time.monotonic", lambda: now[0])
    made = AllLoads(**OPTIONS)
    assert (made.hello("one", [0.5, 0.25]), made.hello("other")) == (1, 2)
    made.choose("one", "r0", PLACES, 320, survey("r0"), is_told=True)
    now[0] = 60.0
    assert made.hello("other", [2.0]) == 1
    assert not made._requests
    now[0] = 599.0
    assert made.first_tokens() == [0.5, 0.25, 2.0]
    now[0] = 601.0
    assert made.first_tokens() == [2.0]


async def test_first_tokens_outlive_a_call_that_fails(actor, monkeypatch):
    taken = [[0.5], [0.25]]
    monkeypatch.setattr("kvray.actors.routers.exchange._HELLO_S", 0.0)
    one = SharedLoads("engines", "tier", lambda: taken.pop() if taken else [], **OPTIONS)
    actor.is_dead = True
    one.start()
    while taken:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.001)
    assert not actor.inside.first_tokens()
    actor.is_dead = False
    while not actor.inside.first_tokens():  # noqa: ASYNC110 - nor here
        await asyncio.sleep(0.001)
    while not one._running.done():  # `wait_for` of Python 3.11 may swallow a cancellation
        one._running.cancel()
        await asyncio.sleep(0.001)
    assert actor.inside.first_tokens() == [0.25, 0.5]


def test_replicas_that_are_gone_are_forgotten_and_requests_bounded(monkeypatch):
    monkeypatch.setattr("kvray.actors.routers.exchange._REQUESTS_MAX", 8)
    made = AllLoads(**OPTIONS)
    for age in range(20):
        places = [
            Place(replica=f"{age} {name}", node="n", prefill_tokens_per_s=0.0) for name in NAMES
        ]
        made.choose("one", f"r{age}", places, 320, survey("p"), is_told=True)
    assert len(made._replicas) <= 2 * len(NAMES)
    assert len(made._requests) <= 8
