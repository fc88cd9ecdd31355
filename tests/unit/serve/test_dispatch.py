"""Choose, prefetch, dispatch: in this order, in time, and a choice that is not used goes back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("openai")

from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError

from kvray.client import Prefetched
from kvray.serve.dispatch import Dispatcher, GenerateArgs
from kvray.serve.protocol import RequestError
from kvray.serve.router import Routed

ASKED = GenerateArgs([5, 6, 7], 4, "acme/1")
ENDING = {"finish_reason": "length", "prompt_tokens": 3, "cached_tokens": 0}


class Answer:
    """As Serve's response: an asynchronous iterator, here over events and failures."""

    def __init__(self, events: list[Any]) -> None:
        self.is_cancelled = False
        self._events = iter(events)

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __anext__(self) -> Any:
        event = next(self._events)
        if isinstance(event, Exception):
            raise event
        if event == "silence":
            await asyncio.Event().wait()
        return event


class Decisions:
    """Notes what an ingress tells the router, one line a request."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._number = 0

    def count(self) -> int:
        self._number += 1
        return self._number

    def sent(self, request: str, replica: str, *, now: float) -> None:
        self.told.append(f"{request} sent to {replica}")

    def first_token(self, request: str, *, now: float) -> None:
        self.told.append(f"{request} has a token")

    def over(self, request: str, *, now: float) -> None:
        self.told.append(f"{request} is over")


class OldHandle:
    """As the handle of a Serve that chooses as it hands over."""

    def __init__(self, *answers: list[Any]) -> None:
        self.log: list[str] = []
        self.answers = [Answer(events) for events in answers]
        self._left = iter(self.answers)

    def options(self, **_: Any) -> "OldHandle":
        return self

    def remote(self, tokens: list[int], max_tokens: int, salt: str | None) -> Answer:
        self.log.append("remote")
        return next(self._left)


class Handle(OldHandle):
    """As the handle of Ray 2.60's Serve, whose router takes replicas `a`, `b` and so on."""

    def __init__(
        self, *answers: list[Any], failure: Exception | None = None, frozen: str = ""
    ) -> None:
        super().__init__(*answers)
        self._ids = iter("abc")
        self._failure = failure
        self._frozen = frozen
        self.decisions = Decisions()
        self.here: list[str] = []
        self.traces: list[str] = []

    @asynccontextmanager
    async def choose_replica(
        self, *args: Any, kvray_salt: str | None, kvray_routed: Routed
    ) -> AsyncIterator[Any]:
        assert args == ASKED, "a router may go by the prompt"
        assert kvray_salt == ASKED.salt
        told: Any = self.decisions
        request = f"request {self.decisions.count()}"
        kvray_routed.follow(told, request, "engine-", self.here)
        if self._failure is not None:
            raise self._failure
        choice = SimpleNamespace(replica_id=next(self._ids))
        try:
            if choice.replica_id == self._frozen:
                await asyncio.Event().wait()
            self.log.append(f"choose {choice.replica_id}")
            yield choice
        finally:
            self.log.append(f"leave {choice.replica_id}")

    def dispatch(self, choice: Any, *args: Any, trace: str = "") -> Answer:
        assert args == ASKED
        self.traces.append(trace)
        self.log.append(f"dispatch {choice.replica_id}")
        return next(self._left)


class Prefetcher:
    """Notes what is asked of kvray; may never be done with it."""

    def __init__(self, log: list[str], *, is_late: bool = False) -> None:
        self._log, self._is_late = log, is_late
        self.is_asked = asyncio.Event()
        self.brought: Prefetched | None = None

    async def bring(self, tokens: list[int], replica: str, salt: str | None) -> Prefetched | None:
        assert (tokens, salt) == (ASKED.tokens, ASKED.salt)
        self._log.append(f"bring to {replica}")
        self.is_asked.set()
        if self._is_late:
            await asyncio.Event().wait()
        return self.brought


def dispatcher(
    handle: Any, prefetcher: Prefetcher | None = None, *, timeout_s: float = 20.0
) -> Dispatcher:
    asked: Any = prefetcher or Prefetcher(handle.log)
    return Dispatcher(handle, asked, request_timeout_s=timeout_s)


async def listen(asked: Dispatcher) -> list[Any]:
    return [event async for event in asked.answer(ASKED)]


def taken(name: str) -> dict[str, str]:
    """Return what the ingress is told of an engine that has taken a request."""
    return {"engine": f"engine-{name}", "route": "fallback"}


def test_the_prompt_is_brought_to_the_chosen_replica_before_it_is_dispatched_there() -> None:
    handle = Handle([taken("a"), {"tokens": [8]}, ENDING])
    assert asyncio.run(listen(dispatcher(handle))) == [taken("a"), {"tokens": [8]}, ENDING]
    assert handle.log == ["choose a", "bring to engine-a", "dispatch a", "leave a"]
    assert handle.decisions.told == [
        "request 1 sent to engine-a",
        "request 1 has a token",
        "request 1 is over",
    ]


def test_a_replica_that_is_gone_is_passed_over() -> None:
    handle = Handle([ReplicaUnavailableError("a")], [taken("b"), ENDING])
    assert asyncio.run(listen(dispatcher(handle))) == [taken("b"), ENDING]
    assert handle.log[3:] == ["leave a", "choose b", "bring to engine-b", "dispatch b", "leave b"]


def test_a_silent_replica_is_passed_over_and_its_request_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvray.serve.dispatch._TAKE_TIMEOUT_S", 0.05)
    handle = Handle(["silence"], [taken("b"), ENDING])
    assert asyncio.run(listen(dispatcher(handle))) == [taken("b"), ENDING]
    assert [answer.is_cancelled for answer in handle.answers] == [True, False]


def test_after_three_replicas_a_request_has_failed() -> None:
    handle = Handle(*[[ReplicaUnavailableError(name)] for name in "abc"])
    with pytest.raises(RequestError) as failed:
        asyncio.run(listen(dispatcher(handle)))
    assert failed.value.status == 503
    assert handle.log[-1] == "leave c"


def test_full_engines_are_not_asked_again() -> None:
    full = BackPressureError(num_queued_requests=1, max_queued_requests=1)
    with pytest.raises(RequestError) as failed:
        asyncio.run(listen(dispatcher(Handle(failure=full))))
    assert failed.value.status == 429


def test_a_choice_whose_client_has_gone_is_given_back() -> None:
    handle = Handle()

    async def go() -> None:
        prefetcher = Prefetcher(handle.log, is_late=True)
        asked = asyncio.create_task(listen(dispatcher(handle, prefetcher)))
        await prefetcher.is_asked.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(go())
    assert handle.log == ["choose a", "bring to engine-a", "leave a"]


def test_a_choice_that_does_not_come_gets_a_second_one_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvray.serve.dispatch._RIVAL_S", 0.05)
    handle = Handle([taken("b"), ENDING], frozen="a")
    assert asyncio.run(listen(dispatcher(handle))) == [taken("b"), ENDING]
    assert handle.log == ["choose b", "bring to engine-b", "dispatch b", "leave b", "leave a"]


def test_a_choice_that_never_comes_ends_in_time() -> None:
    handle = Handle(frozen="a")
    with pytest.raises(RequestError) as failed:
        asyncio.run(listen(dispatcher(handle, timeout_s=0.05)))
    assert failed.value.status == 504
    assert handle.log == ["leave a"]


def test_an_answer_that_ends_without_an_ending_is_a_failure() -> None:
    handle = Handle([taken("a"), {"tokens": [8]}, StopAsyncIteration()])
    with pytest.raises(RequestError, match="engine-a is gone") as failed:
        asyncio.run(listen(dispatcher(handle)))
    assert failed.value.status == 503


def test_an_answer_that_nobody_hears_is_cancelled() -> None:
    handle = Handle([taken("a"), {"tokens": [8]}, "silence"])

    async def go() -> None:
        events = dispatcher(handle).answer(ASKED)
        await anext(events)
        await events.aclose()

    asyncio.run(go())
    assert handle.answers[0].is_cancelled


def test_time_that_is_up_is_said() -> None:
    handle = Handle([taken("a"), "silence"])
    with pytest.raises(RequestError, match="engine-a did not answer in time") as failed:
        asyncio.run(listen(dispatcher(handle, timeout_s=0.05)))
    assert failed.value.status == 504


def test_without_choose_replica_serve_chooses_and_the_log_says_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("kvray.serve.dispatch._log.warning", said.append)
    handle = OldHandle([taken("a"), ENDING], [taken("b"), ENDING])

    async def go() -> None:
        asked = dispatcher(handle)
        assert await listen(asked) == [taken("a"), ENDING]
        assert await listen(asked) == [taken("b"), ENDING]

    asyncio.run(go())
    assert handle.log == ["remote", "remote"]
    assert len(said) == 1
    assert said[0].endswith("kvray prefetches nothing.")


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        (None, {"pool": 64, "tier": 128}),
        ((), {"pool": 64, "host": 128, "disk": 0, "remote": 0}),
        (((96, "remote"), (160, "disk")), {"pool": 64, "host": 32, "disk": 64, "remote": 32}),
        (((32, "disk"), (500, "remote")), {"pool": 64, "host": 0, "disk": 0, "remote": 128}),
    ],
)
def test_the_tiers_tokens_are_told_by_where_they_were(sources: Any, found: dict[str, int]) -> None:
    by_source = {"pool": 64, "tier": 128}
    handle = Handle([taken("a"), {**ENDING, "cached_tokens_by_source": by_source}])
    prefetcher = Prefetcher(handle.log)
    if sources is not None:
        prefetcher.brought = Prefetched(
            num_tokens=160, staged_tokens=0, reason="none", sources=sources
        )
    ending = asyncio.run(listen(dispatcher(handle, prefetcher)))[-1]
    assert ending["cached_tokens_by_source"] == found


def test_nothing_is_brought_to_a_replica_that_has_all_in_its_nodes_memory() -> None:
    by_source = {"pool": 0, "tier": 32}
    handle = Handle([taken("a"), {**ENDING, "cached_tokens_by_source": by_source}])
    handle.here = ["a", "b"]
    ending = asyncio.run(listen(dispatcher(handle)))[-1]
    assert handle.log == ["choose a", "dispatch a", "leave a"]
    found = {"pool": 0, "host": 32, "disk": 0, "remote": 0}
    assert ending["cached_tokens_by_source"] == found


def test_an_engine_that_tells_no_sources_has_none() -> None:
    handle = Handle([taken("a"), ENDING])
    assert asyncio.run(listen(dispatcher(handle)))[-1] == ENDING
