"""A Serve replica without Serve: an engine that hangs, callers that go."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import psutil
import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("openai")

from kvray.actors.routers.pools import Pools
from kvray.errors import KVRayError
from kvray.routing import PREFILL_STAT, PrefillSpeed
from kvray.serve.engine import Engine, Forwarded, Head
from kvray.serve.settings import Settings
from tests.waiting import wait_for

pytestmark = pytest.mark.anyio

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


def asked_for(
    max_tokens: int, prompt: Sequence[int] = (5, 6, 7), *, stream: bool = False
) -> Forwarded:
    body = {"model": "tiny", "prompt": [*prompt], "max_tokens": max_tokens, "stream": stream}
    headers = [(b"content-type", b"application/json")]
    return Forwarded("POST", "/v1/completions", headers, json.dumps(body).encode())


async def listen(engine: Any, *args: Any, **options: Any) -> tuple[Head, bytes]:
    """Return an answer whole, to what `asked_for` makes."""
    asked = asked_for(*args, **options)
    name, head, *chunks = [one async for one in engine.forward(asked, 3)]
    assert (name, chunks[-1]) == ("engine-0", b"")
    return head, b"".join(chunks)


def server_of(engine: Any) -> psutil.Process:
    """Return the server, which the process that keeps it has started."""
    (keeper,) = psutil.Process(engine._server.process.pid).children()
    (found,) = keeper.children()
    return found


def test_a_router_knows_what_the_engine_has_and_has_evicted(engine):
    with contextlib.closing(Pools()) as pools:
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


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_hangs_is_unhealthy_and_an_idle_one_is_not(engine, stream):
    await listen(engine, 2, stream=stream)
    await asyncio.sleep(2 * STALL_S)
    await engine.check_health()  # nothing is under way
    server = server_of(engine)
    server.suspend()
    try:
        asked = asyncio.create_task(listen(engine, 2, stream=stream))
        await asyncio.sleep(STALL_S / 2)
        await engine.check_health()
        await asyncio.sleep(STALL_S)
        with pytest.raises(KVRayError, match="said nothing for"):
            await engine.check_health()
    finally:
        server.resume()
    head, _ = await asyncio.wait_for(asked, DEADLINE_S)
    assert head.status == 200
    await engine.check_health()


async def test_a_stream_that_opens_beside_a_long_silent_answer_is_not_its_silence(engine):
    whole = asyncio.create_task(listen(engine, LONG_TOKENS))
    await asyncio.sleep(2 * STALL_S)
    await engine.check_health()
    pieces = engine.forward(asked_for(2, stream=True), 3)
    assert [await anext(pieces), type(await anext(pieces))] == ["engine-0", Head]
    await engine.check_health()
    await pieces.aclose()
    whole.cancel()


@contextlib.asynccontextmanager
async def standing_in(
    monkeypatch: pytest.MonkeyPatch, engine: Any, answer: bytes
) -> AsyncIterator[list[bytes]]:
    """Have a server that answers so stand in for the engine's; yield the heads that it gets."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    monkeypatch.setattr(engine._server, "port", server.sockets[0].getsockname()[1])
    try:
        yield heard
    finally:
        server.close()


async def test_the_first_prompt_of_an_engine_does_not_tell_its_speed(engine, monkeypatch):
    monkeypatch.setattr(engine, "_first_at", 0.0)
    monkeypatch.setattr(engine, "_speed", PrefillSpeed())
    speeds = []
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 4\r\n\r\ndata"
    async with standing_in(monkeypatch, engine, answer):
        for _ in range(2):
            _ = [one async for one in engine.forward(asked_for(2, stream=True), 1000)]
            speeds.append(engine.record_routing_stats()[PREFILL_STAT])
    assert [speed > 0 for speed in speeds] == [False, True]


ODD = {
    "a long header": (b"200 OK", b"x-long: " + 9000 * b"a", None),
    "many headers": (b"200 OK", b"\r\n".join(b"x-%d: 1" % at for at in range(300)), None),
    "a broken head": (b"wrong", b"", "broke off"),
}


@pytest.mark.parametrize("name", ODD)
async def test_odd_heads_are_passed_on_and_errors_have_no_secrets(engine, monkeypatch, name):
    monkeypatch.setattr("kvray.serve.engine._LEAVE_S", 0.1)
    status, header, error = ODD[name]
    asked = Forwarded("GET", "/v1/models", [(b"authorization", b"Bearer secret")], b"")
    answer = b"HTTP/1.1 %s\r\n%s\r\ncontent-length: 0\r\n\r\n" % (status, header)
    async with standing_in(monkeypatch, engine, answer):
        if error is None:
            _, head, *_ = [one async for one in engine.forward(asked, None)]
            assert head.status == 200
        else:
            with pytest.raises(KVRayError, match=error) as refused:
                [one async for one in engine.forward(asked, None)]
            assert "secret" not in str(refused.value)


LATIN = b"caf\xe9 \xc3\xa9"
"""A byte that is no UTF-8, and two that are."""


async def test_headers_travel_byte_for_byte_but_for_those_of_one_connection(engine, monkeypatch):
    headers = [
        (b"host", b"example.org"),
        (b"x-name", LATIN),
        (b"connection", b"close, X-Hop"),
        (b"x-hop", b"1"),
        (b"te", b"trailers"),
        (b"content-length", b"7"),
    ]
    answer = (
        b"HTTP/1.1 200 OK\r\nX-Name: %s\r\nConnection: x-hop\r\nX-HOP: 1\r\nKeep-Alive: 5\r\n"
        b"Content-Length: 2\r\n\r\nhi" % LATIN
    )
    async with standing_in(monkeypatch, engine, answer) as heard:
        asked = Forwarded("POST", "/v1/\xe9?q=%20'", headers, b"{}")
        _, head, *body = [one async for one in engine.forward(asked, None)]
    assert heard[0].split(b"\r\n") == [
        b"POST /v1/%E9?q=%20' HTTP/1.1",
        b"host: example.org",
        b"x-name: " + LATIN,
        b"content-length: 2",
        b"connection: close",
        b"",
        b"",
    ]
    assert head == Head(200, [(b"X-Name", LATIN), (b"Content-Length", b"2")])
    assert body == [b"hi", b""]


async def test_a_caller_that_goes_leaves_no_request(engine):
    asked = asyncio.create_task(listen(engine, LONG_TOKENS, stream=True))
    await asyncio.sleep(0.5)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert (engine._num_open, engine._num_waiting, engine._num_streams) == (0, 0, 0)
    # One request at a time has the whole engine: a short one does not wait for the long one's end.
    _, body = await asyncio.wait_for(listen(engine, 2), DEADLINE_S)
    assert json.loads(body)["choices"][0]["finish_reason"] == "length"


async def test_a_replica_ends_with_its_engine_and_refuses_no_request_before(start):
    has_left = threading.Event()
    engine = start(has_left.set)
    asked = asyncio.create_task(listen(engine, LONG_TOKENS, stream=True))
    await asyncio.sleep(0.5)
    server_of(engine).kill()
    with pytest.raises(KVRayError, match="engine-0 broke off"):
        await asyncio.wait_for(asked, DEADLINE_S)
    with pytest.raises(asyncio.TimeoutError):  # Serve tells the caller that the process ended
        await asyncio.wait_for(listen(engine, 2), 1.0)
    assert has_left.wait(DEADLINE_S)
    engine.__del__()


def test_a_replica_whose_keeper_is_killed_leaves_no_directory(start, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    has_left = threading.Event()
    engine = start(has_left.set)
    assert len(list(tmp_path.iterdir())) == 1
    engine._server.process.kill()
    assert has_left.wait(DEADLINE_S)
    assert list(tmp_path.iterdir()) == []
    engine.__del__()


def test_a_replica_that_serve_ends_leaves_by_itself(start):
    has_left = threading.Event()
    start(has_left.set).__del__()
    assert not has_left.wait(0.2)
