"""Choose, prefetch, dispatch: in this order, in time, and a choice that is not used goes back."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock, call

import numpy as np
import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("openai")

from ray.serve.context import _get_serve_request_context, _set_request_context
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError, RequestCancelledError

import kvray.serve.dispatch
from kvray.client import Prefetched
from kvray.errors import ConfigError, ShardUnavailable
from kvray.serve.dispatch import Dispatcher, Prefetcher, RequestError
from kvray.serve.engine import Forwarded, Head
from kvray.serve.render import Hint
from kvray.serve.routed import Routed
from kvray.serve.settings import Settings

pytestmark = pytest.mark.anyio

ASKED = Forwarded("POST", "/v1/completions", [(b"content-type", b"application/json")], b"{}")
HINT = Hint(np.array([5, 6, 7], dtype=np.int32), "acme/1")
HEAD = Head(200, [(b"content-type", b"text/plain")])
SSE = Head(200, [(b"content-type", b"text/event-stream")])


class Answer:
    """As Serve's response: an asynchronous iterator, here over events and failures."""

    def __init__(self, events: list[Any]) -> None:
        self.is_cancelled = self.is_silent = False
        self._events = iter(events)

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __anext__(self) -> Any:
        event = next(self._events)
        if isinstance(event, Exception):
            raise event
        if event == "silence":
            self.is_silent = True
            try:
                await asyncio.Event().wait()
            finally:
                if self.is_cancelled:
                    raise RequestCancelledError
        return await event if isinstance(event, asyncio.Future) else event


class Handle:
    """As the handle of Ray's Serve, whose router takes replicas `a`, `b` and so on."""

    def __init__(
        self, *answers: list[Any], failures: Sequence[Exception | None] = (), frozen: str = ""
    ) -> None:
        self.log: list[str] = []
        self.asked: list[Forwarded] = []
        self.answers = [Answer(events) for events in answers]
        self._left = iter(self.answers)
        self._ids = iter("abc")
        self._failures = iter(failures)
        self._frozen = frozen
        self.is_thawed = asyncio.Event()
        self.is_slow_to_leave, self.looks_at_it = False, True
        self.thaws_at = 0
        self.contexts: list[str] = []
        self.decisions = Mock()
        self.here: list[str] = []

    def options(self, **_: Any) -> "Handle":
        return self

    @asynccontextmanager
    async def choose_replica(
        self, *, kvray_tokens: Any, kvray_salt: str | None, kvray_routed: Routed
    ) -> AsyncIterator[Any]:
        assert (kvray_tokens is HINT.tokens, kvray_salt) == (True, HINT.salt)
        self.contexts.append(_get_serve_request_context()._internal_request_id)
        if self.looks_at_it:
            kvray_routed.follow(self.decisions, f"request {len(self.contexts)}", self.here)
        if len(self.contexts) == self.thaws_at:
            self.is_thawed.set()
        if failure := next(self._failures, None):
            raise failure
        choice = SimpleNamespace(replica_id=next(self._ids))
        try:
            if choice.replica_id in self._frozen:
                await self.is_thawed.wait()
            self.log.append(f"choose {choice.replica_id}")
            yield choice
        finally:
            self.log.append(f"leave {choice.replica_id}")
            if self.is_slow_to_leave:
                await asyncio.Event().wait()

    def dispatch(self, choice: Any, asked: Forwarded, num_computed: int | None) -> Answer:
        self.asked.append(asked)
        self.log.append(f"dispatch {choice.replica_id}")
        return next(self._left)


class Bringer:
    """Notes what is asked of kvray; may never be done with it."""

    def __init__(
        self, log: list[str], brought: Prefetched | None = None, *, is_late: bool = False
    ) -> None:
        self._log, self._brought, self._is_late = log, brought, is_late

    async def bring(self, tokens: Any, replica: str, salt: str | None) -> Prefetched | None:
        assert (tokens is HINT.tokens, salt) == (True, HINT.salt)
        self._log.append(f"bring to {replica}")
        if self._is_late:
            await asyncio.Event().wait()
        return self._brought


def dispatcher(handle: Any, prefetcher: Any = None, **options: Any) -> Dispatcher:
    options = {"prefetch_timeout_s": 0, "request_timeout_s": 20.0, **options}
    made = Dispatcher(handle, Settings(**options))
    asked: Any = prefetcher or Bringer(handle.log)
    made._prefetcher = asked
    return made


async def listen(handle: Any, *args: Any, **options: Any) -> list[Any]:
    """Return all of an answer."""
    said = [one async for one in dispatcher(handle, *args, **options).forward(ASKED, HINT)]
    assert [*{id(one) for one in handle.asked}] == [id(ASKED)]
    return said


def head(name: str, **more: str) -> Head:
    """Return the head of an answer of that replica, as clients get it."""
    ours = {"x-kvray-replica": f"engine-{name}", "x-kvray-route": "fallback", **more}
    return Head(200, [*HEAD.headers, *((key.encode(), one.encode()) for key, one in ours.items())])


def whole(name: str, begins: Head = HEAD) -> list[Any]:
    """Return what a replica says of a request that it answers."""
    return [f"engine-{name}", begins, b"text", b""]


GONE = [[ReplicaUnavailableError(name)] for name in "abc"]
CUT = ["engine-a", HEAD, b"te", StopAsyncIteration()]
LATE = ["engine-a", "silence"]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_the_prompt_is_brought_to_the_chosen_replica_before_it_is_dispatched_there(is_stream):
    handle = Handle(whole("a", SSE) if is_stream else whole("a"))
    found, text = await listen(handle)
    assert (found.headers[1:], text) == (head("a").headers[1:], b"text")
    assert handle.log == ["choose a", "bring to engine-a", "dispatch a", "leave a"]
    await asyncio.sleep(0.01)  # in which the loop ends the answer's generators
    assert handle.decisions.mock_calls == [
        call.sent("request 1", "engine-a", now=ANY),
        *([call.first_token("request 1", now=ANY)] if is_stream else []),
        call.over("request 1", now=ANY),
    ]


@pytest.mark.parametrize(
    ("fault", "is_cancelled"), [(ReplicaUnavailableError("a"), False), ("silence", True)]
)
async def test_a_replica_that_is_gone_or_silent_is_passed_over(monkeypatch, fault, is_cancelled):
    monkeypatch.setattr("kvray.serve.dispatch._TAKEN_S", (0.05, 0.05, 20.0))
    handle = Handle([fault], whole("b"))
    assert await listen(handle) == [head("b"), b"text"]
    assert handle.log[3:] == ["leave a", "choose b", "bring to engine-b", "dispatch b", "leave b"]
    assert [answer.is_cancelled for answer in handle.answers] == [is_cancelled, False]


async def test_a_replica_that_goes_before_the_first_byte_is_replaced_once():
    gone = ["engine-a", StopAsyncIteration()]
    handle = Handle(gone, whole("b"))
    assert await listen(handle) == [head("b"), b"text"]
    handle = Handle(gone, ["engine-b", StopAsyncIteration()], whole("c"))
    with pytest.raises(RequestError, match="engine-b is gone"):
        await listen(handle)
    assert handle.log[-1] == "leave b", "a request that ends engines ends two at most"


@pytest.mark.parametrize(
    ("handle", "timeout_s", "status", "words", "log_ends"),
    [
        (lambda: Handle(*GONE), 20.0, 503, None, ["leave c"]),
        (lambda: Handle(frozen="a"), 0.05, 504, None, ["leave a"]),
        (lambda: Handle(CUT), 20.0, 503, "engine-a is gone", ["leave a"]),
        (lambda: Handle(LATE), 1.0, 504, "engine-a did not answer in time", ["leave a"]),
    ],
    ids=["three are gone", "no choice", "no ending", "no answer in time"],
)
async def test_a_request_that_fails_has_its_status(handle, timeout_s, status, words, log_ends):
    asked = handle()
    with pytest.raises(RequestError, match=words) as failed:
        await listen(asked, request_timeout_s=timeout_s)
    assert failed.value.status == status
    await asyncio.sleep(0)
    assert asked.log[-1:] == log_ends


async def test_only_requests_that_no_engine_takes_for_a_while_fill_the_queue(monkeypatch):
    monkeypatch.setattr("kvray.serve.dispatch._PLACED_S", 0.2)
    handle = Handle(*([whole("a")] * 9), frozen="a")
    handle._ids = iter("a" * 9)
    asked = dispatcher(handle, queued_max=2)

    async def ask() -> list[Any]:
        return [one async for one in asked.forward(ASKED, HINT)]

    many = [asyncio.ensure_future(ask()) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert not any(one.done() for one in many), "a burst is placed, not refused"
    await asyncio.sleep(0.3)
    refused = [one for one in many if one.done()]
    assert len(refused) == 3
    for one in refused:
        with pytest.raises(RequestError, match="full") as failed:
            one.result()
        assert (failed.value.status, failed.value.code) == (429, "overloaded")
    with pytest.raises(RequestError, match="full"):
        await ask()
    handle.is_thawed.set()
    waited = [one for one in many if one not in refused]
    assert [len(one) for one in await asyncio.gather(*waited)] == [2, 2]
    assert len(await ask()) == 2


async def leave(listens: Coroutine[Any, Any, Any], *, once: Callable[[], object]) -> None:
    """Be a client that goes once that is so, while its answer does not come on."""
    asked = asyncio.create_task(listens)
    while not (once() or asked.done()):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.001)
    asked.cancel()
    await asyncio.wait({asked})
    assert asked.cancelled()
    await asyncio.sleep(0)


async def test_a_choice_whose_client_has_gone_is_given_back():
    handle = Handle()
    late = Bringer(handle.log, is_late=True)
    await leave(listen(handle, late), once=lambda: len(handle.log) == 2)
    assert handle.log == ["choose a", "bring to engine-a", "leave a"]


async def test_a_client_that_goes_while_it_waits_for_an_engine_leaves_nothing(monkeypatch):
    monkeypatch.setattr("kvray.serve.dispatch._PLACED_S", 0.01)
    handle = Handle(frozen="a")
    made = dispatcher(handle)
    await leave(anext(made.forward(ASKED, HINT)), once=lambda: made._num_queued == 1)
    assert (made._num_queued, handle.log) == (0, ["leave a"])


async def test_a_client_that_goes_as_its_choice_is_given_back_is_gone():
    handle = Handle(whole("a"))
    handle.is_slow_to_leave = True
    await leave(listen(handle), once=lambda: "leave a" in handle.log)
    assert handle.answers[0].is_cancelled
    assert handle.decisions.mock_calls[-1] == call.over("request 1", now=ANY)


async def test_the_engine_is_told_of_a_client_that_goes_and_no_error_is_logged(caplog):
    handle = Handle(["engine-a", HEAD, b"te", "silence"])
    await leave(listen(handle), once=lambda: handle.answers[0].is_silent)
    assert handle.answers[0].is_cancelled
    await asyncio.sleep(0.01)
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.fixture
def rival_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second choice begins at once."""
    monkeypatch.setattr("kvray.serve.dispatch._PLACED_S", 0.02)
    monkeypatch.setattr("kvray.serve.dispatch._RIVAL_S", 0.05)


async def test_a_choice_that_does_not_come_gets_a_second_one_beside_it(rival_soon):
    _set_request_context(_internal_request_id="caller's", request_id="client's")
    handle = Handle(whole("b"), frozen="a")
    assert await listen(handle) == [head("b"), b"text"]
    await asyncio.sleep(0)
    assert handle.log == ["choose b", "bring to engine-b", "dispatch b", "leave b", "leave a"]
    assert _get_serve_request_context()._internal_request_id == "caller's"
    assert handle.contexts == ["", ""], "each is a request for Serve, which makes ids of its own"


async def test_a_request_that_no_router_has_looked_at_waits_once(rival_soon):
    handle = Handle(whole("a"), frozen="a")
    handle.looks_at_it = False
    asked = asyncio.create_task(listen(handle))
    await asyncio.sleep(0.2)
    assert len(handle.contexts) == 1, "Serve's autoscaler counts each"
    handle.is_thawed.set()
    assert await asked == [head("a"), b"text"]


async def test_an_answer_that_nobody_hears_is_cancelled():
    handle = Handle(["engine-a", HEAD, b"te", "silence"])
    events = dispatcher(handle).forward(ASKED, HINT)
    await anext(events)
    await events.aclose()
    assert handle.answers[0].is_cancelled


@pytest.mark.parametrize("turns", range(5))
async def test_a_client_that_goes_as_a_piece_comes_is_gone(turns):
    piece = asyncio.get_running_loop().create_future()
    handle = Handle(["engine-a", HEAD, piece, "silence"])
    asked = asyncio.create_task(listen(handle))
    await asyncio.sleep(0.05)
    piece.set_result(b"te")
    for _ in range(turns):
        await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait({asked}, timeout=1.0)
    assert asked.cancelled()
    assert handle.answers[0].is_cancelled


async def test_a_request_that_was_given_up_is_over_also_if_the_router_decides_later():
    routed, decisions = Routed(), Mock()
    routed.over()
    routed.follow(decisions, "request 1")
    await asyncio.sleep(0)
    assert decisions.mock_calls == [call.over("request 1", now=ANY)]


async def test_what_was_brought_is_told_as_tokens_that_are_near():
    handle = Handle(whole("a"))
    brought = Prefetched(num_tokens=32, staged_tokens=0, reason="none")
    (found, _) = await listen(handle, Bringer(handle.log, brought))
    assert found == head("a", **{"x-kvray-cached-tokens": "3"}), "of a prompt of three tokens"


async def test_nothing_is_brought_to_a_replica_that_has_all_in_its_nodes_memory():
    handle = Handle(whole("a"))
    handle.here = ["engine-a", "engine-b"]
    await listen(handle)
    assert handle.log == ["choose a", "dispatch a", "leave a"]


FULL = BackPressureError(num_queued_requests=1, max_queued_requests=1)


async def test_a_choice_that_fails_is_made_again_also_a_second_one(rival_soon):
    handle = Handle(whole("a"), failures=[FULL])
    assert await listen(handle) == [head("a"), b"text"]
    handle = Handle(whole("b"), failures=[None, FULL], frozen="a")
    assert await listen(handle) == [head("b"), b"text"]


async def test_a_choice_that_comes_with_the_used_one_goes_back(rival_soon):
    handle = Handle(whole("a"), frozen="ab")
    handle.thaws_at = 2
    assert len(await listen(handle)) == 2
    assert {"choose a", "choose b", "leave a", "leave b"} < {*handle.log}
    assert sum("dispatch" in line for line in handle.log) == 1


BROUGHT = Prefetched(num_tokens=2, staged_tokens=2, reason="none")


class Client:
    """As `kvray.Client`: what it is asked, and what goes wrong, by replica."""

    def __init__(self, _: object) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.failures: dict[str, Exception] = {}
        self.is_free = threading.Event()
        self.is_free.set()

    def prefetch(self, tokens: list[int], *, replica: str, salt: str | None) -> Prefetched:
        self.asked.append((replica, salt))
        self.is_free.wait(10)
        if replica in self.failures:
            raise self.failures[replica]
        return BROUGHT


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """What a prefetcher asks; its `bring` has the prefetcher bring a prompt to replicas."""
    monkeypatch.setattr(kvray.serve.dispatch, "Client", Client)
    config = tmp_path / "kvray.yaml"
    config.write_text("cluster_name: test\n")
    prefetcher = Prefetcher(Settings(kvray_config=config, prefetch_timeout_s=0.1))

    async def bring(*replicas: str) -> list[Prefetched | None]:
        return [await prefetcher.bring([1, 2], name, "acme/1") for name in replicas]

    client: Any = prefetcher._client
    client.bring = bring
    yield client
    client.is_free.set()
    prefetcher._threads.shutdown()


async def test_a_node_that_fails_is_left_alone_and_the_others_are_not(client):
    client.failures["a"] = ShardUnavailable("No answer.")
    assert await client.bring("a", "a", "b") == [None, None, BROUGHT]
    assert client.asked == [("a", "acme/1"), ("b", "acme/1")], "with its salt"


async def test_a_late_answer_is_not_waited_for_twice(client):
    client.is_free.clear()
    assert await client.bring("a", "a") == [None, None]
    assert [name for name, _ in client.asked] == ["a"]


async def test_a_request_that_cannot_be_prefetched_costs_the_others_nothing(client, caplog):
    client.failures["a"] = ConfigError("The prompt names no tenant.")
    assert await client.bring("a", "a") == [None, None]
    client.failures.clear()
    assert await client.bring("a") == [BROUGHT]
    assert caplog.text.count("names no tenant") == 1, "once is enough"
