"""Two choices, of which one is used: the other goes back, whenever it comes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

pytest.importorskip("ray.serve")

from ray.serve.context import _get_serve_request_context, _set_request_context
from ray.serve.exceptions import BackPressureError

from kvray.serve.dispatch import first_choice

FULL = BackPressureError(num_queued_requests=1, max_queued_requests=1)


class Choices:
    """Choices that come when their events are set, or fail."""

    def __init__(self, *comes: asyncio.Event | Exception) -> None:
        self.log: list[str] = []
        self._comes = iter(enumerate(comes))

    def __call__(self) -> AbstractAsyncContextManager[int]:
        return self._choose(*next(self._comes))

    @asynccontextmanager
    async def _choose(self, number: int, comes: asyncio.Event | Exception) -> AsyncIterator[int]:
        if isinstance(comes, Exception):
            raise comes
        await comes.wait()
        self.log.append(f"enter {number}")
        try:
            yield number
        finally:
            self.log.append(f"leave {number}")


def test_a_choice_that_comes_too_late_goes_back_while_the_other_is_used() -> None:
    async def go() -> list[str]:
        late, now = asyncio.Event(), asyncio.Event()
        now.set()
        choices = Choices(late, now)
        async with first_choice(choices, rival_s=0.0, timeout_s=20.0) as chosen:
            assert chosen == 1
            late.set()
            await asyncio.sleep(0.01)
            assert choices.log == ["enter 1", "enter 0", "leave 0"]
        return choices.log

    assert asyncio.run(go())[-1] == "leave 1"


def test_a_second_choice_that_fails_changes_nothing() -> None:
    async def go() -> None:
        comes = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, comes.set)
        async with first_choice(Choices(comes, FULL), rival_s=0.0, timeout_s=20.0) as chosen:
            assert chosen == 0

    asyncio.run(go())


def test_a_first_choice_that_fails_is_the_failure() -> None:
    async def go() -> None:
        async with first_choice(Choices(FULL), rival_s=20.0, timeout_s=20.0):
            pass

    with pytest.raises(BackPressureError):
        asyncio.run(go())


def test_what_the_block_raises_gives_the_choice_back() -> None:
    comes = asyncio.Event()
    comes.set()
    choices = Choices(comes)

    async def go() -> None:
        async with first_choice(choices, rival_s=20.0, timeout_s=20.0):
            raise KeyError("of the block")

    with pytest.raises(KeyError):
        asyncio.run(go())
    assert choices.log == ["enter 0", "leave 0"]


def test_each_choice_is_a_request_of_its_own_for_serve() -> None:
    seen = []

    @asynccontextmanager
    async def choose() -> AsyncIterator[None]:
        seen.append(_get_serve_request_context())
        await asyncio.sleep(0.05)
        yield

    async def go() -> str:
        _set_request_context(_internal_request_id="caller's", request_id="client's")
        async with first_choice(choose, rival_s=0.0, timeout_s=20.0):
            return _get_serve_request_context()._internal_request_id

    assert asyncio.run(go()) == "caller's"
    assert [one._internal_request_id for one in seen] == ["", ""], "Serve makes one of its own"
