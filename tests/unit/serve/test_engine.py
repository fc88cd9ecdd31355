"""A Serve replica without Serve: an engine that hangs, callers that go."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import psutil
import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("openai")

from kvray.actors.routers.pools import Pools
from kvray.errors import KVRayError
from kvray.serve.engine import Engine, Forwarded, Head
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
    engine: Any, max_tokens: int, prompt: Sequence[int] = (5, 6, 7), *, stream: bool = False
) -> tuple[Head, bytes]:
    """Return an answer whole."""
    body = {"model": "tiny", "prompt": [*prompt], "max_tokens": max_tokens, "stream": stream}
    headers = [(b"content-type", b"application/json")]
    asked = Forwarded("POST", "/v1/completions", headers, json.dumps(body).encode())
    name, head, *chunks = [one async for one in engine.forward(asked, len(prompt))]
    assert (name, chunks[-1]) == ("engine-0", b"")
    return head, b"".join(chunks)


async def listen_once(engine: Any, prompt: Sequence[int]) -> None:
    """Have a prompt computed, on a loop that ends with it."""
    await listen(engine, 1, prompt)
    await engine._session.close()
    engine._session = None


async def finish(asked: Any) -> str:
    """Return why an answer ended."""
    head, body = await asyncio.wait_for(asked, DEADLINE_S)
    assert head.status == 200
    return str(json.loads(body)["choices"][0]["finish_reason"])


def server_of(engine: Any) -> psutil.Process:
    """Return the server, which the process that keeps it has started."""
    (found,) = psutil.Process(engine._server.pid).children()
    return found


def test_a_router_knows_what_the_engine_has_and_has_evicted(engine):
    with closing(Pools()) as pools:
        pools.follow({"engine-0": engine.record_routing_stats()})
        prompts = [[3 + (at * (number + 7)) % 250 for at in range(1000)] for number in range(6)]
        asyncio.run(listen_once(engine, prompts[0]))

        def tokens(prompt: list[int]) -> int | None:
            found = pools.match(prompt).get("engine-0")
            return found.num_tokens if found is not None and found.is_sure else None

        wait_for(lambda: tokens(prompts[0]) == 992, "all full blocks of the prompt")
        assert tokens(prompts[1]) == 0
        for prompt in prompts[1:]:
            asyncio.run(listen_once(engine, prompt))
        wait_for(lambda: tokens(prompts[0]) == 0, "their eviction")
        wait_for(lambda: tokens(prompts[-1]) == 992, "the blocks of the last one")


@pytest.fixture
async def fresh(engine: Any) -> AsyncIterator[Any]:
    """The engine, with connections of this test's loop."""
    yield engine
    await engine._session.close()
    engine._session = None


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_hangs_is_unhealthy_and_an_idle_one_is_not(fresh, stream):
    await listen(fresh, 2, stream=stream)
    await asyncio.sleep(2 * STALL_S)
    await fresh.check_health()  # nothing is under way
    server = server_of(fresh)
    server.suspend()
    try:
        asked = asyncio.create_task(listen(fresh, 2, stream=stream))
        await asyncio.sleep(STALL_S / 2)
        await fresh.check_health()
        await asyncio.sleep(STALL_S)
        with pytest.raises(KVRayError, match="said nothing for"):
            await fresh.check_health()
    finally:
        server.resume()
    head, _ = await asyncio.wait_for(asked, DEADLINE_S)
    assert head.status == 200
    await fresh.check_health()


@pytest.mark.anyio
async def test_a_stream_that_opens_beside_a_long_silent_answer_is_not_its_silence(
    fresh, monkeypatch
):
    whole = asyncio.create_task(listen(fresh, LONG_TOKENS))
    await asyncio.sleep(2 * STALL_S)
    await fresh.check_health()
    asked = Forwarded(
        "POST",
        "/v1/completions",
        [(b"content-type", b"application/json")],
        json.dumps({"model": "tiny", "prompt": [5], "max_tokens": 2, "stream": True}).encode(),
    )
    pieces = fresh.forward(asked, 1)
    assert [await anext(pieces), type(await anext(pieces))] == ["engine-0", Head]
    await fresh.check_health()
    await pieces.aclose()
    whole.cancel()


ODD = {
    "a long header": (b"200 OK", b"x-long: " + 9000 * b"a", None),
    "many headers": (b"200 OK", b"\r\n".join(b"x-%d: 1" % at for at in range(300)), None),
    "a broken head": (b"wrong", b"", "broke off"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", ODD)
async def test_odd_heads_are_passed_on_and_errors_have_no_secrets(fresh, monkeypatch, name):
    status, header, error = ODD[name]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %s\r\n%s\r\ncontent-length: 0\r\n\r\n" % (status, header))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    monkeypatch.setattr(fresh._server, "url", f"http://{host}:{port}")
    asked = Forwarded("GET", "/v1/models", [(b"authorization", b"Bearer secret")], b"")
    try:
        if error is None:
            _, head, *_ = [one async for one in fresh.forward(asked, None)]
            assert head.status == 200
        else:
            with pytest.raises(KVRayError, match=error) as refused:
                [one async for one in fresh.forward(asked, None)]
            assert "secret" not in str(refused.value)
    finally:
        server.close()


@pytest.mark.anyio
async def test_a_caller_that_goes_leaves_no_request(fresh):
    asked = asyncio.create_task(listen(fresh, LONG_TOKENS, stream=True))
    await asyncio.sleep(0.5)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert (fresh._num_open, fresh._num_waiting, fresh._num_streams) == (0, 0, 0)
    # One request at a time has the whole engine: a short one does not wait for the long one's end.
    assert await finish(listen(fresh, 2)) == "length"


@pytest.mark.anyio
async def test_what_the_server_refuses_is_its_own_answer(fresh):
    head, body = await listen(fresh, 100_000)
    assert head.status == 400
    assert "do not fit" in json.loads(body)["error"]["message"]
    assert (b"content-type", b"application/json") in head.headers


@pytest.mark.anyio
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
    await engine._session.close()
    engine.__del__()


def test_a_replica_that_serve_ends_leaves_by_itself(start):
    has_left = threading.Event()
    start(has_left.set).__del__()
    assert not has_left.wait(0.2)
